"""Attention of many queries over one text that they share, and what it weighs beside other keys, for GPUs.

A program attends a chunk of the text with some queries of one KV head; a second pass puts the chunks together (softmax.py). It
differs from the twin in the last bits, and where queries have 16 bits, shares and decoded values are rounded to these before
tensor cores multiply them. Queries go in pieces, so that what is left between the passes stays small.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats.kernel_sizes import FLOAT_BYTES, SCORED_BYTES
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.gpu.kept_slots import SlotPlaces, column_numbers, values_of_slots
from h2o_flexgen.kernels.gpu.softmax import TOGETHER, gathered, scores_of, softmax_of_chunks, values_of_chunks
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
    key, value = (SlotPlaces.of(KVSlots(kept.data[None], kept.format), dim) for kept in (keys, values))
    at_once = max(1, SCORED_BYTES // (FLOAT_BYTES * heads * chunks * dim))
    for start in range(0, queries, at_once):
        piece = slice(start, start + at_once)
        _attend(q[piece], key, value, scores[0, piece], out[0, piece], keys.data.shape[0], length, chunks, cap or 0.0)
    return More(scores, out)


def _attend(
    q: Tensor,
    key: SlotPlaces,
    value: SlotPlaces,
    scores: Tensor,
    out: Tensor,
    kv_heads: int,
    length: int,
    chunks: int,
    cap: float,
) -> None:
    queries, heads, dim = q.shape
    group, nothing = heads // kv_heads, out.new_empty(0)
    is_over = chunks == 1
    tops, totals = (nothing if is_over else out.new_empty(queries, heads, chunks) for _ in range(2))
    made = nothing if is_over else out.new_empty(queries, heads, chunks, dim)
    tile = min(LARGEST_TILE, max(LEAST_TILE, TILE_VALUES // max(key.width, value.width)))
    attend_text_kernel[triton.cdiv(queries * group, tile), kv_heads, chunks](
        *(q, *key[:2], *key[3:5], *value[:2], *value[3:5], tops, totals, made, scores, out),
        *(dim**-0.5, length, queries, kv_heads),
        *(*key[5:], *value[5:]),
        GROUP=group,
        DIM=dim,
        CHUNK=CHUNK,
        TILE=tile,
        CAP=cap,
        IS_OVER=is_over,
        num_stages=STAGES,
        num_warps=WARPS[q.itemsize],
    )
    if not is_over:
        width = triton.next_power_of_2(dim)
        join_text_kernel[(queries * heads,)](tops, totals, made, scores, out, chunks, DIM=dim, WIDTH=width, TOGETHER=TOGETHER)


@triton.jit(do_not_specialize=["queries"])
def attend_text_kernel(
    q: tl.tensor,
    keys: tl.tensor, key_shared: tl.tensor, key_head: tl.tensor, key_slot: tl.tensor,
    values: tl.tensor, value_shared: tl.tensor, value_head: tl.tensor, value_slot: tl.tensor,
    tops: tl.tensor, totals: tl.tensor, made: tl.tensor, scores: tl.tensor, out: tl.tensor,
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
        k = values_of_slots(keys, key_shared, head * key_head, slot, there, key_slot, KEY_STEP, KEY_BITS, DIM, KEY_WIDTH)
        v = values_of_slots(
            values, value_shared, head * value_head, slot, there, value_slot, VALUE_STEP, VALUE_BITS, DIM, VALUE_WIDTH
        )
        top, total, summed = gathered(top, total, summed, scores_of(own, k, there, scale, CAP), v, own.dtype)
    column = column_numbers(VALUE_BITS, VALUE_WIDTH)
    is_value = is_query[:, None] & (column < DIM)[None, :]
    if IS_OVER:
        tl.store(scores + number, top + tl.log(total), mask=is_query)
        tl.store(out + number[:, None] * DIM + column[None, :], summed / total[:, None], mask=is_value)
    else:
        number = number * tl.num_programs(2) + chunk
        tl.store(tops + number, top, mask=is_query)
        tl.store(totals + number, total, mask=is_query)
        tl.store(made + number[:, None] * DIM + column[None, :], summed, mask=is_value)


@triton.jit(do_not_specialize=["chunks"])
def join_text_kernel(
    tops: tl.tensor, totals: tl.tensor, made: tl.tensor, scores: tl.tensor, out: tl.tensor, chunks: tl.tensor,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
) -> None:  # fmt: skip
    number, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    top, total = softmax_of_chunks(tops, totals, -float("inf"), number, chunks, chunks, TOGETHER)
    summed = values_of_chunks(tops, made, top, number, chunks, chunks, DIM, WIDTH, TOGETHER)
    tl.store(scores + number, top + tl.log(total))
    tl.store(out + number * DIM + column, summed / total, mask=column < DIM)
