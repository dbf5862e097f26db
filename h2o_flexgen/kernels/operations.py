"""The operations on values that have kernels of their own, each done by the one that kernels/table.py names for it.

Nobody else chooses. A kernel and its twin in torch take the same arguments, and give the same bits unless their file says how
they differ.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from h2o_flexgen.kernels.decode_attention import Kept
from h2o_flexgen.kernels.functions import FUNCTIONS, Function
from h2o_flexgen.kernels.native import processor
from h2o_flexgen.kernels.table import (
    DECODE,
    DECODE_ATTENTION,
    ENCODE,
    LOWEST_SLOT,
    PRODUCT,
    PROMPT_ATTENTION,
    TAKE_SLOTS,
    choose,
)
from h2o_flexgen.quant.codec import CODECS, PLAIN


def chosen(op: str, form: str, like: Tensor, rows: int = 1, width: int = 1) -> Function | None:
    """The function for values of the type and on the device of `like`."""
    dtype = str(like.dtype).removeprefix("torch.")
    kernel = choose(op, form, dtype, processor(like.device.type).runs, rows, width)
    return None if kernel is None else FUNCTIONS[kernel.function]


def _required(op: str, form: str, like: Tensor, rows: int = 1) -> Function:
    if function := chosen(op, form, like, rows):
        return function
    raise ValueError(f"nothing here does {op} of {form}, {like.dtype} on {like.device.type}; take another codec")


# -- stored forms --------------------------------------------------------------------------------------------------------


def encode(codec: str, values: Tensor, out: Tensor) -> None:
    """Values -> bytes of a codec in `out`, which has as many as the codec's `nbytes` says."""
    rows = prod(values.shape[:-1])
    _required(ENCODE, codec, values)(CODECS[codec], values.reshape(rows, -1), out.view(rows, -1))


def decode(codec: str, data: Tensor, out: Tensor) -> None:
    """Bytes of a codec -> values in `out`, which has their shape and the type that is computed with."""
    rows = prod(out.shape[:-1])
    _required(DECODE, codec, out)(CODECS[codec], data.view(rows, -1), out.view(rows, -1))


def packed_product(codec: str, x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor | None:
    """x (..., inputs) times the transposed of the matrix whose bytes are data (outputs, bytes of a row), plus bias. None where
    no kernel multiplies so many rows with the bytes: the matrix is to be decoded first."""
    function = chosen(PRODUCT, codec, x, prod(x.shape[:-1]))
    return None if function is None else function(CODECS[codec], x, data, bias)


def plain_product(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., inputs), matrix (outputs, inputs) -> (..., outputs)"""
    function = _required(PRODUCT, PLAIN, x, max(1, prod(x.shape[:-1])))
    out: Tensor = function(CODECS[PLAIN], x, matrix, bias)
    return out


# -- attention -----------------------------------------------------------------------------------------------------------


def decode_attention(q: Tensor, keys: Kept, values: Kept, held: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of one new token per row: q (rows, kv_heads, group, dim); held (rows,), slots that count, the newest included,
    and as a mask to add (rows, 1, 1, slots) -> out like q, and sums (rows, kv_heads, slots) in float32: what each slot got.

    Keys and values are decoded first unless one kernel reads both as they are kept."""
    of_keys, of_values = (chosen(DECODE_ATTENTION, kept.codec, q, width=q.shape[3]) for kept in (keys, values))
    if of_keys is None or of_keys is not of_values:
        keys, values = (_plain(kept, q) for kept in (keys, values))
        of_keys = chosen(DECODE_ATTENTION, PLAIN, q, width=q.shape[3])
    assert of_keys is not None
    out, sums = of_keys(q, keys, values, held, mask)
    return out, sums


def _plain(kept: Kept, like: Tensor) -> Kept:
    if kept.codec == PLAIN:
        return kept
    values = like.new_empty(*kept.data.shape[:3], like.shape[3])
    decode(kept.codec, kept.data.contiguous(), values)
    return Kept(values)


def prompt_attention(q: Tensor, k: Tensor, v: Tensor, before: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """q (rows, heads, tokens, dim), k and v (rows, kv_heads, keys, dim); keys that are more than the queries stand before them
    all, and of those each row has the first `before` (rows,). weights (rows, tokens), fp32: how much queries count in the sums.

    -> (rows, tokens, heads * dim), and sums (rows, kv_heads, keys) in fp32 where there are weights."""
    out, sums = _required(PROMPT_ATTENTION, PLAIN, q)(q, k, v, before, weights)
    return out, sums


# -- slots ---------------------------------------------------------------------------------------------------------------


def lowest_slot(positions: Tensor, ranks: Tensor | None, held: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """positions (rows, heads, slots), int32, and ranks the same, fp32, or None where positions rank; of a row's slots the first
    `held` (rows,) count, and of these may go whose position is from `start` (rows, 1, 1) on and before `end`; where nobody
    may, the last -> (rows, heads)"""
    out: Tensor = _required(LOWEST_SLOT, PLAIN, positions)(positions, ranks, held, start, end)
    return out


def take_slots(source: Tensor, index: Tensor, out: Tensor) -> None:
    """source (rows, heads, slots, width), index (rows, heads or 1, count) -> out (rows, heads, count, width), which lies
    elsewhere."""
    _required(TAKE_SLOTS, PLAIN, source)(source, index, out)
