"""The operations on values that have kernels of their own, each done by the kernel that formats/kernel_table.py chooses for it.

Kernels are chosen nowhere else. A kernel and its twin in torch take the same arguments, and give the same bits unless their
file says how they differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import repeat
from math import inf

import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_sizes import TWIN_VALUES
from h2o_flexgen.formats.kernel_table import (
    ADD_COUNTED,
    ADD_SCALED,
    ADD_WEIGHTED,
    APPEND,
    BRING_SLOTS,
    CHOOSE_SLOTS,
    CHOSEN_ATTENTION,
    CLAMPED_SILU,
    COUNTED_PRODUCTS,
    CPU,
    DECODE,
    DECODE_ATTENTION,
    DECODE_ROWS,
    ENCODE,
    EVICT,
    GATED_DELTA,
    GATED_GELU,
    GATED_GELU_TANH,
    GATED_IDENTITY,
    GATED_NORM,
    GATED_QUICK_GELU,
    GATED_RELU,
    GATED_RELU_SQUARED,
    GATED_SIGMOID,
    GATED_SILU,
    GATHER_CHOSEN,
    GATHER_COUNTED,
    GATHER_SLOTS,
    HALVES_APART,
    LAYER_NORM,
    LENGTHS,
    LIKELIEST,
    MAX,
    NOTE,
    PICK_TOKENS,
    PRODUCT,
    PRODUCTS_OF_SAME,
    PROMPT_ATTENTION,
    PUT_ROWS,
    READ_TOKENS,
    RMS_NORM,
    ROTATE,
    ROUTE,
    SELECTIVE_SCAN,
    SHARED_ATTENTION,
    SHORT_CONVOLUTION,
    STEADY_PRODUCT,
    STEP_SIZES,
    SUM,
    TAKE_ROWS,
    TAKE_SLOTS,
    XIELU,
    Kernel,
    Processor,
    choose,
    kernels_of,
)
from h2o_flexgen.formats.table import FORMATS, PLAIN
from h2o_flexgen.kernels.append import RotationAngles
from h2o_flexgen.kernels.chosen_slots import Always
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.evict import Leaving, Missing, Newest, Notes, RowsOfBoth
from h2o_flexgen.kernels.factor import CountedRows, Factor, Meeting
from h2o_flexgen.kernels.functions import COUNTED, SEVERAL, Function, function_of
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.native import processor
from h2o_flexgen.kernels.pick_tokens import Draw, PickedTokens, ScoreChanges, TokenMasks, Upload
from h2o_flexgen.kernels.read_tokens import ReadQueue, TokenReads
from h2o_flexgen.kernels.recording import CannotBeRecorded
from h2o_flexgen.kernels.routing import Chosen, GatheredRows, RouterRule, RouterScores
from h2o_flexgen.kernels.row_functions import (
    clamped_silu_twin,
    gated_gelu_tanh_twin,
    gated_relu_squared_twin,
    gated_silu_twin,
)

Counts = Sequence[int] | CountedRows  # how many rows each expert has: known here, or to memory alone
SIZES_KNOWN = 1024  # prompts come with many numbers of rows


def chosen(op: str, format: str, like: Tensor, rows: int = 1, width: int = 1) -> Function | None:
    """The function for values with the type and the device of `like`. No rows are worked on as one is."""
    kernel = _kernel(op, format, like.dtype, processor(like.device.type), rows or 1, width)
    return None if kernel is None else function_of(kernel)


@lru_cache(maxsize=SIZES_KNOWN)
def _kernel(op: str, format: str, dtype: torch.dtype, there: Processor, rows: int, width: int) -> Kernel | None:
    """Every layer asks the same, several times."""
    return choose(op, format, str(dtype).removeprefix("torch."), there.runs, rows, width)


def in_one_order(op: str, format: str, like: Tensor, rows: int) -> bool:
    """Whether a kernel in C does it: what becomes of a row and an output depends on nothing beside them."""
    kernel = _kernel(op, format, like.dtype, processor(like.device.type), rows or 1, 1)
    return kernel is not None and kernel.device == CPU and bool(kernel.libraries)


def _required(op: str, format: str, like: Tensor, rows: int = 1, width: int = 1) -> Function:
    if function := chosen(op, format, like, rows, width):
        return function
    raise ValueError(f"nothing here does {op} of {format}, {like.dtype} on {like.device.type}; take another codec")


# -- stored formats --------------------------------------------------------------------------------------------------------


def encode(format: str, values: Tensor, out: Tensor) -> None:
    """Encodes values into `out`, which has as many bytes as the format's `nbytes` says."""
    rows = values.shape[:-1].numel()
    _required(ENCODE, format, values)(FORMATS[format], values.reshape(rows, -1), _in_units(format, out, rows))


def decode(format: str, data: Tensor, out: Tensor) -> None:
    """Decodes the bytes of a format into `out`, which has the shape of the values and the type that is computed with."""
    rows = out.shape[:-1].numel()
    _required(DECODE, format, out)(FORMATS[format], _in_units(format, data, rows), out.view(rows, -1))


def decode_rows(format: str, data: Tensor, numbers: Tensor, out: Tensor) -> None:
    """Decodes the rows with these numbers (count,) of data (units of rows, bytes of a unit) into out (count, columns)."""
    if FORMATS[format].rows_together == 1:
        decode(format, take_rows(data, numbers), out)
    elif len(out):
        _required(DECODE_ROWS, format, out)(FORMATS[format], data, numbers, out)


def _in_units(format: str, data: Tensor, rows: int) -> Tensor:
    return data.view(-(-rows // FORMATS[format].rows_together), -1)


# -- products ------------------------------------------------------------------------------------------------------------


def packed_product(op: str, format: str, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor | None:
    """Multiplies x (..., inputs) with the transposed matrix in `data` (units of rows, bytes of a unit) and adds bias
    (outputs,). None if no kernel multiplies this many rows with the bytes: the matrix must be decoded first."""
    function = chosen(op, format, x.values, x.rows)
    return None if function is None else function(FORMATS[format], x, data, outputs, bias)


def packed_products(
    op: str, format: str, x: Factor, matrices: Sequence[tuple[Tensor, int, Tensor | None]]
) -> Sequence[Tensor] | None:
    """The same of two or three matrices, each with its bytes, its outputs and its bias; None if no kernel takes them
    at once."""
    function = chosen(PRODUCTS_OF_SAME, format, x.values, x.rows) if op == PRODUCT else None
    made: Sequence[Tensor] | None = None if function is None else function(FORMATS[format], x, matrices)
    return made


def plain_product(x: Factor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., inputs), matrix (outputs, inputs) -> (..., outputs)"""
    return _plain_product(PRODUCT, x, matrix, bias)


def steady_product(x: Factor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """The same, where what becomes of a row is not to depend on the rows beside it: with kernels in C it does not."""
    return _plain_product(STEADY_PRODUCT, x, matrix, bias)


def _plain_product(op: str, x: Factor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    function = _required(op, PLAIN, x.values, x.rows)
    out: Tensor = function(FORMATS[PLAIN], x, matrix, matrix.shape[0], bias)
    return out


def products_of_each(op: str, format: str, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> list[Meeting]:
    """Multiplies rows of x (rows, inputs) with transposed matrices of their own, all of one format, into out (rows, outputs),
    by the kernels that would do so one by one. -> Those for which there is none: their matrices must be decoded first."""
    left, by_kernel = list[Meeting](), defaultdict[Function, list[Meeting]](list)
    for meeting in meetings:
        function = chosen(op, format, x.values, meeting.rows)
        (left if function is None else by_kernel[function]).append(meeting)
    for function, its in by_kernel.items():
        if several := SEVERAL.get(function):
            several(FORMATS[format], x, its, out)
            continue
        for first, rows, data, bias in its:
            out[first : first + rows] = function(FORMATS[format], x.part(first, rows), data, out.shape[-1], bias)
    return left


def counted_products(op: str, format: str, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> None:
    """The same where memory alone says which rows of x meet which matrix: for each number of rows there are calls of the kernel
    that is chosen for it, which find none where there are more or fewer."""
    assert x.counted is not None
    if counts_in_memory(op, format, x.values):
        _required(COUNTED_PRODUCTS, format, x.values)(FORMATS[format], x, meetings, out)
        return
    for least, most, function in _by_rows(op, format, x.values, x.counted.most):
        counted = None if function is None else COUNTED.get(function)
        if counted is None:
            raise CannotBeRecorded(f"no kernel multiplies rows that memory counts with {format}")
        counted(FORMATS[format], x.within(least, most), meetings, out)


def counts_in_memory(op: str, format: str, like: Tensor, each: int = 1) -> bool:
    """Whether rows like these, which memory counts, may be multiplied with matrices of a format, and nothing waits for it.
    `each`: how many of them meet a matrix on average."""
    return op == PRODUCT and chosen(COUNTED_PRODUCTS, format, like, each) is not None


def _by_rows(op: str, format: str, like: Tensor, most: int) -> list[tuple[int, int, Function | None]]:
    """The functions for up to so many rows, and for how many each is."""
    bounds = sorted({int(kernel.most_rows) for kernel in kernels_of(op, format) if kernel.most_rows < most} | {most})
    found = list[tuple[int, int, Function | None]]()
    for least, bound in zip((1, *(bound + 1 for bound in bounds)), bounds):
        function = chosen(op, format, like, bound)
        if found and found[-1][2] is function:
            least = found.pop()[0]
        found.append((least, bound, function))
    return found


# -- attention -----------------------------------------------------------------------------------------------------------


def decode_attention(
    q: Tensor,
    keys: KVSlots,
    values: KVSlots,
    held: Tensor,
    mask: Tensor,
    more: More | None = None,
    gathers: str | None = SUM,
    cap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one new token per row: q (rows, kv_heads, group, dim); `held` (rows,) is the number of filled slots, the
    newest included, and also a mask to add (rows, 1, 1, slots) -> out like q, and unless `gathers` is None the attention that
    each slot got from its group, (rows, kv_heads, slots) in float32: the sum, or the highest share. With `more`, a query head
    has one more key, and slots lack its share; with a `cap`, scores come near it and no further.

    Keys and values are decoded first unless one kernel reads both as they are kept."""
    of_keys = of_values = chosen(DECODE_ATTENTION, keys.format, q, width=q.shape[3])
    if values.format != keys.format:
        of_values = chosen(DECODE_ATTENTION, values.format, q, width=q.shape[3])
    if of_keys is None or of_keys is not of_values:
        keys, values = _both_plain(keys, values, q)
        of_keys = chosen(DECODE_ATTENTION, PLAIN, q, width=q.shape[3])
    assert of_keys is not None
    out, got = of_keys(q, keys, values, held, mask, more, gathers, cap)
    return out, got


def choose_slots(
    q: Tensor,
    index: KVSlots,
    held: Tensor,
    counts: Tensor,
    most: int,
    always: Always,
    more: More | None = None,
    cap: float | None = None,
    together: bool = False,
) -> Tensor:
    """The slots that a decode step attends where it reads a share of them: q as above; index (rows, kv_heads, slots, bytes),
    the keys in few bits; of `held` (rows,) filled slots each row attends `counts` (rows,), `most` at most -> (rows, kv_heads,
    most): each head's slots, ascending, and 0 behind them. The first and the newest are always among them; of the others those
    that get most attention from the head's queries together, and of equals the older. `together`: from those of all heads of a
    row, which then have the same slots."""
    function = _required(CHOOSE_SLOTS, index.format, q, width=q.shape[3])
    out: Tensor = function(q, index, held, counts, most, always, more, cap, together)
    return out


def chosen_attention(
    q: Tensor,
    keys: KVSlots,
    values: KVSlots,
    slots: Tensor,
    counts: Tensor,
    more: More | None = None,
    gathers: str | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one new token per row over the slots (rows, kv_heads, most) that were chosen for it, of which `counts`
    (rows,) are real. It is `decode_attention` over these side by side, bit for bit, and that where no kernel reads them where
    they lie; what each of them got is in their order, and 0 behind the real ones."""
    if function := chosen(CHOSEN_ATTENTION, keys.format, q, width=q.shape[3]):
        out, got = function(q, keys, values, slots, counts, more, gathers, cap)
        return out, got
    own = _taken(keys, slots)
    taken = own, own if values is keys else _taken(values, slots)
    return decode_attention(q, *taken, counts, _mask(counts, slots.shape[-1]), more, gathers, cap)


def _mask(counts: Tensor, most: int) -> Tensor:
    """0 for as many slots as a row has, and -inf behind them. (rows, 1, 1, most), fp32"""
    behind = torch.arange(most, device=counts.device) >= counts[:, None, None, None]
    return torch.zeros(behind.shape, dtype=torch.float32, device=counts.device).masked_fill_(behind, -torch.inf)


def _taken(kept: KVSlots, slots: Tensor) -> KVSlots:
    side_by_side = kept.data.new_empty(*slots.shape, kept.data.shape[-1])
    take_slots(kept.data, slots, side_by_side)
    return KVSlots(side_by_side, kept.format)


def _both_plain(keys: KVSlots, values: KVSlots, like: Tensor) -> tuple[KVSlots, KVSlots]:
    """Keys and values, decoded. Both may be the same."""
    plain = _plain(keys, like)
    return plain, plain if values is keys else _plain(values, like)


def _plain(kept: KVSlots, like: Tensor) -> KVSlots:
    if kept.format == PLAIN:
        return kept
    values = like.new_empty(*kept.data.shape[:3], like.shape[3])
    decode(kept.format, kept.data.contiguous(), values)
    return KVSlots(values)


def prompt_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: Tensor,
    weights: Tensor | None,
    more: More | None = None,
    gathers: str = SUM,
    window: int | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of prompts: q (rows, heads, tokens, dim), k and v (rows, kv_heads, keys, dim). If there are more keys than
    queries, the first ones stand before all queries, and each row has the first `before` (rows,) of them. weights (rows,
    tokens), fp32, from 0 on, say how much the shares of queries count. -> (rows, tokens, heads * dim), and where there are
    weights what each key got, (rows, kv_heads, keys) in fp32: the sum over queries and their heads, or the highest. With
    `more`, a query has one more key, and the others lack its share; with a `window`, it sees so many tokens, itself included;
    with a `cap`, scores come near it and no further."""
    out, got = _required(PROMPT_ATTENTION, PLAIN, q, width=q.shape[3])(q, k, v, before, weights, more, gathers, window, cap)
    return out, got


def of_all_heads(shares: Tensor, gathers: str) -> Tensor:
    """What keys got from several KV heads together, (rows, kv_heads, keys) -> (rows, 1, keys): the sum, or the highest."""
    return shares.amax(1, keepdim=True) if gathers == MAX else shares.sum(1, keepdim=True)


def shared_attention(q: Tensor, keys: KVSlots, values: KVSlots, cap: float | None = None) -> More:
    """Attention of queries (queries, heads, dim) over a text that all of them share, (kv_heads, tokens, width): one more key of
    each, for the attention over what stands behind that text."""
    function = chosen(SHARED_ATTENTION, keys.format, q, width=q.shape[2])
    if function is None or keys.format != values.format:
        of_row = KVSlots(keys.data[None], keys.format)
        both = of_row, of_row if values is keys else KVSlots(values.data[None], values.format)
        keys, values = (KVSlots(each.data[0]) for each in _both_plain(*both, q[None]))
        function = _required(SHARED_ATTENTION, PLAIN, q, width=q.shape[2])
    out: More = function(q, keys, values, cap)
    return out


# -- slots ---------------------------------------------------------------------------------------------------------------


def append(
    image: Tensor,
    newest: Newest,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    turn: RotationAngles | None,
    notes: Notes | None,
    worth: Tensor | None = None,
) -> Tensor:
    """Puts the newest token of each row in its slot of an image (sets, rows, heads, slots, width): k and v (rows, 1, heads,
    width), or k alone where keys have the values, and what is noted of it; `worth` (rows, heads), fp32, where notes have that.
    With a `turn`, q (rows, 1, query heads, dim) and k are rotated first -> q as it is now."""
    out: Tensor = _required(APPEND, PLAIN, q)(image, newest, q, k, v, turn, notes, worth)
    return out


def append_coded(
    format: str,
    image: Tensor,
    newest: Newest,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    turn: RotationAngles | None,
    notes: Notes | None,
    worth: Tensor | None = None,
) -> Tensor | None:
    """The same of an image of packed slots, for which k and v (rows, 1, heads, dim) are encoded once they are rotated; None if
    no kernel does all of it at once."""
    function = chosen(APPEND, format, q)
    out: Tensor | None = None
    if function is not None:
        out = function(image, newest, q, k, v, turn, notes, worth, FORMATS[format])
    return out


def evict(
    image: Tensor, notes: Notes, newest: Newest, leaving: Leaving, got: Tensor | None, decay: float, gathers: str = SUM
) -> Tensor:
    """Adds what slots got (rows, heads, slots), fp32, to scores that fade by `decay`, or raises scores to it, where what the
    newest token gave itself does not count; and moves each head's newest token into the slot of the one that goes -> that slot
    (rows, heads); its own where a row may hold it. Of the tokens that may go it is the one that ranks lowest, and among equals
    the oldest; if none may, it is the newest itself."""
    out: Tensor = _required(EVICT, PLAIN, notes.positions)(image, notes, newest, leaving, got, decay, gathers)
    return out


def note(notes: Notes, newest: Newest, got: Tensor | None, decay: float, gathers: str = SUM) -> None:
    """The first half of it alone: adds what slots got to scores, or raises scores to it."""
    _required(NOTE, PLAIN, notes.positions)(notes, newest, got, decay, gathers)


def take_slots(source: Tensor, index: Tensor, out: Tensor) -> None:
    """Copies slots of source (rows, heads, slots, width), chosen by index (rows, heads or 1, count), to out (rows, heads,
    count, width), which must not overlap source."""
    _required(TAKE_SLOTS, PLAIN, source)(source, index, out)


def gather_slots(image: Tensor, slots: Tensor, out: Tensor) -> None:
    """Gathers one slot (rows, heads) of every row and head of an image (sets, rows, heads, slots, width) into bytes: the
    numbers of these slots, and behind them keys and values, as `changed_slots.parts` finds them."""
    _required(GATHER_SLOTS, PLAIN, image)(image, slots, out)


def bring_slots(source: Tensor, target: Tensor, slots: Tensor, rows: RowsOfBoth, missing: Missing | None = None) -> None:
    """Copies slots (rows, heads, count) of an image (sets, rows, heads, slots, width) to the same slots of another, where the
    `rows` may lie elsewhere; of those that a row has chosen only what is `missing`. Nothing else of the target changes."""
    _required(BRING_SLOTS, PLAIN, target)(source, target, slots, rows, missing)


def read_tokens(wanted: TokenReads, buffer: Tensor, at_once: int, queue: ReadQueue | None = None) -> None:
    """Reads tokens that lie apart in a file to their places in an image, until none is left. Page groups that lie side by side
    are read `at_once`. Several threads may call it for the same reads, each with a buffer of its own; or one, with a queue and
    a buffer for all that is under way in it."""
    _required(READ_TOKENS, PLAIN, buffer)(wanted, buffer, at_once, queue)


# -- rows by their numbers -----------------------------------------------------------------------------------------------


def take_rows(source: Tensor, numbers: Tensor, axis: int = 0, first: int = 0) -> Tensor:
    """The parts of a tensor along an axis that have these numbers, of any shape, each counted from `first` on."""
    out: Tensor = _required(TAKE_ROWS, PLAIN, source)(source, numbers, axis, first)
    return out


def put_rows(target: Tensor, numbers: Tensor, axis: int, rows: Tensor) -> None:
    """Copies rows, which have the shape of what `take_rows` would take, to those of a tensor that have these numbers (count,).
    Nothing else of it changes."""
    _required(PUT_ROWS, PLAIN, target)(target, numbers, axis, rows)


# -- heads and rows ------------------------------------------------------------------------------------------------------


def rotate(x: Tensor, turn: RotationAngles) -> Tensor:
    """x (rows, tokens, heads, dim) with its pairs turned."""
    out: Tensor = _required(ROTATE, PLAIN, x)(x, turn)
    return out


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, from_one: bool = False) -> Tensor:
    """x (..., width) divided by the root of its mean square, and multiplied by weight (width,), if there is one. `from_one`: by
    what is above one by a weight. In 16 bits nothing but the outcome is rounded then, or where weights are in fp32."""
    out: Tensor = _required(RMS_NORM, PLAIN, x)(x, weight, eps, from_one)
    return out


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x (..., width) less its mean, divided by its standard deviation, times weight (width,), plus bias (width,). Both may be
    other ones for each of the rows (..., rows, width): (rows, width)."""
    out: Tensor = _required(LAYER_NORM, PLAIN, x)(x, weight, bias, eps)
    return out


def lengths(x: Tensor) -> Tensor:
    """The lengths of vectors (rows, tokens, heads, dim), in fp32."""
    out: Tensor = _required(LENGTHS, PLAIN, x)(x)
    return out


def gated_silu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up, or silu alone. May overwrite the gate."""
    out: Tensor = _required(GATED_SILU, PLAIN, gate)(gate, up)
    return out


def gated_gelu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The same with gelu."""
    out: Tensor = _required(GATED_GELU, PLAIN, gate)(gate, up)
    return out


def gated_gelu_tanh(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The same with gelu by a tanh."""
    out: Tensor = _required(GATED_GELU_TANH, PLAIN, gate)(gate, up)
    return out


def gated_quick_gelu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The same with gelu by a sigmoid."""
    out: Tensor = _required(GATED_QUICK_GELU, PLAIN, gate)(gate, up)
    return out


def gated_relu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The same with relu."""
    out: Tensor = _required(GATED_RELU, PLAIN, gate)(gate, up)
    return out


def gated_relu_squared(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The same with the square of relu."""
    out: Tensor = _required(GATED_RELU_SQUARED, PLAIN, gate)(gate, up)
    return out


def gated_sigmoid(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The same with the sigmoid itself."""
    out: Tensor = _required(GATED_SIGMOID, PLAIN, gate)(gate, up)
    return out


def gated_identity(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The same with the gate itself: their product."""
    out: Tensor = _required(GATED_IDENTITY, PLAIN, gate)(gate, up)
    return out


def gated_silu_of_each(gate: Tensor, up: Tensor, counts: Counts) -> Tensor:
    """The same with silu of rows (rows, width), of which so many, one behind the other, come out as if the rest were not there.
    Torch gives the last values of a tensor other last bits than those in its middle."""
    function = _required(GATED_SILU, PLAIN, gate)
    return _of_each(function, function is gated_silu_twin, gate, up, counts)


def gated_gelu_tanh_of_each(gate: Tensor, up: Tensor, counts: Counts) -> Tensor:
    """The same with gelu by a tanh."""
    function = _required(GATED_GELU_TANH, PLAIN, gate)
    return _of_each(function, function is gated_gelu_tanh_twin, gate, up, counts)


def gated_relu_squared_of_each(x: Tensor, counts: Counts) -> Tensor:
    """The same with the square of relu, and without another factor."""
    function = _required(GATED_RELU_SQUARED, PLAIN, x)
    return _of_each(function, function is gated_relu_squared_twin, x, None, counts)


def clamped_silu_of_each(gate: Tensor, up: Tensor, counts: Counts, limit: float, alpha: float) -> Tensor:
    """The same with silu of alpha * gate, times (up + 1) / alpha. The gate counts as no higher than the limit, and up is within
    it. May overwrite both."""
    function = _required(CLAMPED_SILU, PLAIN, gate)
    limited = partial(function, limit=limit, alpha=alpha)
    return _of_each(limited, function is clamped_silu_twin, gate, up, counts)


def _of_each(function: Function, is_twin: bool, gate: Tensor, up: Tensor | None, counts: Counts) -> Tensor:
    if isinstance(counts, CountedRows):
        counted: Tensor = function(gate, up) if is_twin else function(gate, up, counted=counts)
        return counted
    if is_twin:
        ups = repeat(None) if up is None else up.split(list(counts))
        return torch.cat([function(*own) for own in zip(gate.split(list(counts)), ups)])
    out: Tensor = function(gate, up)
    return out


def xielu(x: Tensor, rising: Tensor, falling: Tensor, slope: Tensor, least: Tensor) -> Tensor:
    """softplus(rising) * x**2 above 0, else (slope + softplus(falling)) * (expm1(min(x, least)) - x), and slope * x added.
    Each of the four is one number in fp32. May overwrite x."""
    out: Tensor = _required(XIELU, PLAIN, x)(x, rising, falling, slope, least)
    return out


def halves_apart(x: Tensor, paired: int | None = None) -> Tensor:
    """Values (..., width) of which the first `paired`, or all, are neighbours that are rotated together, with those behind one
    another half as many apart. The rest stays."""
    out: Tensor = _required(HALVES_APART, PLAIN, x)(x, x.shape[-1] if paired is None else paired)
    return out


# -- sums ----------------------------------------------------------------------------------------------------------------


def route(scored: RouterScores, rule: RouterRule, out: Chosen, total: Tensor | None = None) -> None:
    """Gives rows to experts by their scores: those with the highest ones. A total (rows, width), fp32, of what these experts
    will make becomes zeros."""
    _required(ROUTE, PLAIN, scored.scores)(scored, rule, out, total)


def gather_chosen(chosen: Chosen, rows: Tensor, experts: range, most: int, turn: int) -> GatheredRows:
    """The rows (tokens, width) that some experts were given, expert by expert, each expert's in the order of their tokens. In a
    turn, from 0, come as many whole experts as have no more than `most` rows together, which is not less than all tokens."""
    out: GatheredRows = _required(GATHER_CHOSEN, PLAIN, rows)(chosen, rows, experts, most, turn)
    return out


def gather_counted(chosen: Chosen, rows: Tensor, experts: range) -> GatheredRows:
    """The same of all these experts at once, where nothing waits for what was chosen: there are as many rows as choices, and
    those that other experts were given come last."""
    out: GatheredRows = _required(GATHER_COUNTED, PLAIN, rows)(chosen, rows, experts)
    return out


def add_scaled(
    x: Tensor, added: Tensor | None = None, scale: float = 1.0, limit: float = inf, by: Tensor | None = None
) -> Tensor:
    """Values, no larger than `limit` on either side of 0, times a scale, plus others of their shape, and all of it times a
    number (1,), fp32. In place -> x"""
    out: Tensor = _required(ADD_SCALED, PLAIN, x)(x, added, scale, limit, by)
    return out


def add_weighted(sums: Tensor, rows: Tensor, weights: Tensor, to: Tensor, counts: Counts) -> None:
    """Adds rows (count, width), each times its weight (count,), fp32, to the sums (sums, width), fp32, that `to` (count,)
    names. Those of a sum are added in their order. Of the `counts`, which follow each other, no two rows have the same sum."""
    if isinstance(counts, CountedRows) and (function := chosen(ADD_COUNTED, PLAIN, rows)):
        function(sums, rows, weights, to, counts)
        return
    _required(ADD_WEIGHTED, PLAIN, rows)(sums, rows, weights, to, counts)


# -- states of rows ------------------------------------------------------------------------------------------------------
# Rows may be filled up behind their tokens: `lengths` (rows,), int64, says how many of each are real; None: all. A state is
# changed in place, and is then that behind a row's last real token; `is_trial`: it stays as it was. Its rows may lie apart. In
# bfloat16 it is rounded behind each token.


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    lengths: Tensor | None = None,
    is_tiled: bool = False,
    is_trial: bool = False,
) -> Tensor:
    """The gated delta rule: q and k (rows, tokens, key heads, key width), which are made as long as one, and q then scaled; v
    (rows, tokens, heads, value width); decay, a logarithm, and beta (rows, tokens, heads), or decay (rows, tokens, heads, key
    width), fp32, where each value of a key fades by itself; state (rows, heads, key width, value width), fp32 or bfloat16. A
    key head serves heads that follow each other, or `is_tiled`: those as far apart as there are key heads. -> (rows, tokens,
    heads, value width)"""
    function = _required(GATED_DELTA, PLAIN, v, width=q.shape[-1])
    out: Tensor = function(q, k, v, decay, beta, state, lengths, is_tiled, is_trial)
    return out


def selective_scan(
    x: Tensor,
    steps: Tensor,
    rates: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    state: Tensor,
    lengths: Tensor | None = None,
    are_logs: bool = False,
    is_trial: bool = False,
) -> Tensor:
    """Mamba-2's scan: x (rows, tokens, heads, head width); steps (rows, tokens, heads), the sizes of steps; rates (heads,),
    below zero, or `are_logs`: the logarithms of what they are below zero; b and c (rows, tokens, groups, state width), of which
    each serves heads that follow each other; skip (heads,), how much of x itself is added; state (rows, heads, state width,
    head width), fp32 or bfloat16. -> like x"""
    function = _required(SELECTIVE_SCAN, PLAIN, x, width=b.shape[-1])
    out: Tensor = function(x, steps, rates, b, c, skip, state, lengths, are_logs, is_trial)
    return out


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    lengths: Tensor | None = None,
    is_activated: bool = True,
    is_trial: bool = False,
) -> Tensor:
    """Each channel of x (rows, tokens, channels) becomes the sum of its last inputs, itself at last, times weight (channels,
    width) or (channels, 1, width), plus bias (channels,); `is_activated`: and silu of that. state (rows, width - 1, channels),
    fp32, has the inputs before those that come, the oldest first. -> like x"""
    function = _required(SHORT_CONVOLUTION, PLAIN, x, width=weight.shape[-1])
    out: Tensor = function(x, weight, bias, state, lengths, is_activated, is_trial)
    return out


def step_sizes(
    x: Tensor,
    bias: Tensor | None,
    rates: Tensor | None = None,
    are_logs: bool = False,
    least: float = 0.0,
    most: float = inf,
) -> Tensor:
    """softplus(x + bias), from `least` to `most`, of x (rows, tokens, heads); and times rates, if there are any: then it is the
    logarithm of a decay. bias (heads,); rates (heads,), or fewer, each of as many neighbours; `are_logs`: as in
    `selective_scan`. In fp32."""
    out: Tensor = _required(STEP_SIZES, PLAIN, x)(x, bias, rates, are_logs, least, most)
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int = 1, gate_first: bool = False) -> Tensor:
    """RMS norm of each of so many groups of x (..., width), times weight (width,) and silu(gate); or `gate_first`: the norm of
    what silu(gate) has left of x. Nothing but the outcome is rounded."""
    out: Tensor = _required(GATED_NORM, PLAIN, x)(x, gate, weight, eps, groups, gate_first)
    return out


# -- tokens --------------------------------------------------------------------------------------------------------------


def pick_tokens(
    logits: Tensor,
    draws: Sequence[Draw] | None = None,
    changes: ScoreChanges | None = None,
    upload: Upload = Tensor.to,
    at_once: int = TWIN_VALUES,
    masks: TokenMasks | None = None,
) -> PickedTokens:
    """Picks a token for each row of logits (rows, vocab): the likeliest, or as `draws` say, where there are. The scores
    are the logits with `changes`, of the tokens that `masks` allow. Temporaries are made of `at_once` logits, or of a row."""
    picked: PickedTokens = _required(PICK_TOKENS, PLAIN, logits)(logits, draws, changes, upload, at_once, masks)
    return picked


def likeliest(values: Tensor, count: int, at_once: int = TWIN_VALUES) -> tuple[Tensor, Tensor]:
    """The highest values of each row (rows, vocab), fp32, and their places, (rows, count) each."""
    highest, ids = _required(LIKELIEST, PLAIN, values)(values, count, at_once)
    return highest, ids
