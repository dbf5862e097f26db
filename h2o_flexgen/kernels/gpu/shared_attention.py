"""Attention of many queries over one text that they share, and what it weighs beside other keys, for GPUs.

A program attends a chunk of the text with some queries of one KV head; a second pass puts the chunks together
(attention_parts.py). It differs from the twin in the last bits, and where queries have 16 bits, shares and decoded values are
rounded to these before tensor cores multiply them. Queries go in pieces, so that what is left between the passes stays small.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats.kernel_sizes import FLOAT_BYTES, SCORED_BYTES
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.gpu.attention_parts import (
    TOGETHER,
    SlotPlaces,
    column_numbers,
    gathered,
    named,
    parts_of_left,
    scores_of,
    softmax_of_chunks,
    values_left,
    values_of_chunks,
    values_of_slots,
)
from h2o_flexgen.kernels.gpu.launching import Launch, Seen, kept_by_shape, launcher, seen
from h2o_flexgen.kernels.more_keys import More

CHUNK = 512  # tokens of a program
TILE_VALUES, LEAST_TILE, LARGEST_TILE = 4096, 16, 32  # values, and queries or tokens, that a program multiplies at once
STAGES = 2  # tiles that are read ahead where a GPU can do so
WARPS = {2: 8, 4: 4}  # by the bytes of a value: so registers suffice


def shared_attention(q: Tensor, keys: KVSlots, values: KVSlots, cap: float | None = None) -> More:
    queries, heads, dim = q.shape
    length = keys.data.shape[1]
    assert keys.data.shape[:2] == values.data.shape[:2] and length
    q, chunks = q.contiguous(), triton.cdiv(length, CHUNK)
    out = torch.empty(1, queries, heads, dim, dtype=torch.float32, device=q.device)
    scores = torch.empty(1, queries, heads, dtype=torch.float32, device=q.device)
    text = seen(keys.data[None]), keys.format, seen(values.data[None]), values.format
    at_once = max(1, SCORED_BYTES // (FLOAT_BYTES * heads * chunks * dim))
    for start in range(0, queries, at_once):
        piece = slice(start, start + at_once)
        own = q[piece]
        attend, join, count = launches_of(own.shape, own.dtype, *text, cap or 0.0)
        left = torch.empty(count, dtype=torch.float32, device=q.device)
        attend(own, keys.data, values.data, left, scores[0, piece], out[0, piece])
        if join is not None:
            join(left, scores[0, piece], out[0, piece])
    return More(scores, out)


class _Piece(NamedTuple):
    """The launches for some queries, and how many values the first leaves for the second."""

    attend: Launch
    join: Launch | None  # None: the first one makes the outcome
    left: int


@kept_by_shape
def launches_of(
    shape: torch.Size, dtype: torch.dtype, keys: Seen, key_format: str, values: Seen, value_format: str, cap: float
) -> _Piece:
    (queries, heads, dim), (_, kv_heads, length, _) = shape, keys[0]
    key, value = SlotPlaces.of(keys, key_format, dim), SlotPlaces.of(values, value_format, dim)
    group, chunks = heads // kv_heads, triton.cdiv(length, CHUNK)
    tile = min(LARGEST_TILE, max(LEAST_TILE, TILE_VALUES // max(key.width, value.width)))
    attend = launcher(
        attend_text_kernel,
        (triton.cdiv(queries * group, tile), kv_heads, chunks),
        (*key[1:3], *value[1:3], dim**-0.5, length, queries, kv_heads),
        **named("KEY", key),
        **named("VALUE", value),
        GROUP=group,
        DIM=dim,
        CHUNK=CHUNK,
        TILE=tile,
        CAP=cap,
        IS_OVER=chunks == 1,
        num_stages=STAGES,
        num_warps=WARPS[dtype.itemsize],
    )
    if chunks == 1:
        return _Piece(attend, None, 0)
    width = triton.next_power_of_2(dim)
    join = launcher(join_text_kernel, (queries * heads,), (chunks,), DIM=dim, WIDTH=width, TOGETHER=TOGETHER)
    return _Piece(attend, join, values_left(queries * heads, chunks, dim))


@triton.jit(do_not_specialize=["queries"])
def attend_text_kernel(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, left: tl.tensor, scores: tl.tensor, out: tl.tensor,
    key_head: tl.tensor, key_slot: tl.tensor, value_head: tl.tensor, value_slot: tl.tensor,
    scale: tl.tensor, length: tl.tensor, queries: tl.tensor, kv_heads: tl.tensor,
    KEY_STEP: tl.constexpr, KEY_BITS: tl.constexpr, KEY_WIDTH: tl.constexpr,
    VALUE_STEP: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr,
    IS_OVER: tl.constexpr,
) -> None:  # fmt: skip
    """The queries of a KV head are those of all its query heads."""
    place, head, chunk = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1).to(tl.int64), tl.program_id(2)
    query, is_query = place // GROUP, place < queries * GROUP
    number = (query.to(tl.int64) * kv_heads + head) * GROUP + place % GROUP
    column = column_numbers(KEY_BITS, KEY_WIDTH)
    is_there = is_query[:, None] & (column < DIM)[None, :]
    own = tl.load(q + number[:, None] * DIM + column[None, :], mask=is_there, other=0.0)
    top = tl.full((TILE,), -float("inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    summed = tl.zeros((TILE, VALUE_WIDTH), tl.float32)
    end = tl.minimum(chunk * CHUNK + CHUNK, length)
    for start in range(chunk * CHUNK, end, TILE):
        slot = start + tl.arange(0, TILE)
        there = slot < end
        k = values_of_slots(keys, head * key_head, slot, there, key_slot, KEY_STEP, KEY_BITS, DIM, KEY_WIDTH)
        v = values_of_slots(values, head * value_head, slot, there, value_slot, VALUE_STEP, VALUE_BITS, DIM, VALUE_WIDTH)
        top, total, summed = gathered(top, total, summed, scores_of(own, k, there, scale, CAP), v, own.dtype)
    column = column_numbers(VALUE_BITS, VALUE_WIDTH)
    is_value = is_query[:, None] & (column < DIM)[None, :]
    if IS_OVER:
        tl.store(scores + number, top + tl.log(total), mask=is_query)
        tl.store(out + number[:, None] * DIM + column[None, :], summed / total[:, None], mask=is_value)
    else:
        made, _, tops, totals = parts_of_left(left, queries * kv_heads * GROUP, tl.num_programs(2), 0, DIM)
        number = number * tl.num_programs(2) + chunk
        tl.store(tops + number, top, mask=is_query)
        tl.store(totals + number, total, mask=is_query)
        tl.store(made + number[:, None] * DIM + column[None, :], summed, mask=is_value)


@triton.jit(do_not_specialize=["chunks"])
def join_text_kernel(
    left: tl.tensor, scores: tl.tensor, out: tl.tensor, chunks: tl.tensor,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
) -> None:  # fmt: skip
    number, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    made, _, tops, totals = parts_of_left(left, tl.num_programs(0), chunks, 0, DIM)
    top, total = softmax_of_chunks(tops, totals, -float("inf"), number, chunks, chunks, TOGETHER)
    summed = values_of_chunks(tops, made, top, number, chunks, chunks, DIM, WIDTH, TOGETHER)
    tl.store(scores + number, top + tl.log(total))
    tl.store(out + number * DIM + column, summed / total, mask=column < DIM)
