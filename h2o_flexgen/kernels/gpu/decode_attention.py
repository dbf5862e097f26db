"""Attention of one new token per row over the slots it holds, and what each slot got, for GPUs.

A program attends a chunk of the slots of one KV head of one row, and reads keys and values once; chunks behind what the row
holds do nothing. A second pass puts the chunks together (attention_parts.py) and gathers what slots got, if it is needed.
Chunks have one size, so a row's outcome depends on nothing but the row. Scores are in float32, and so are the shares of a head
with one query; where a group of queries shares a head, tensor cores multiply shares that were rounded to the queries' type, as
torch does.

What a head with one query gathers is kept apart by lanes: slots that the same threads read, one behind the other. Lanes are put
together once for a chunk, so that nothing has to be summed up across threads in each of its tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats.kernel_sizes import STEP_CHUNK
from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.gpu.attention_parts import (
    TOGETHER,
    UNITS,
    SlotPlaces,
    column_numbers,
    exponential_of,
    gathered,
    gathered_by_lanes,
    highest,
    lanes_together,
    named,
    parts_of_left,
    scores_of,
    scores_of_one,
    softmax_of_chunks,
    values_left,
    values_of_chunks,
    values_of_slots,
)
from h2o_flexgen.kernels.gpu.launching import Launch, Seen, kept_by_shape, launcher, seen
from h2o_flexgen.kernels.more_keys import More

CHUNK = STEP_CHUNK  # slots of a program
TILE_VALUES, LARGEST_TILE = 8192, 128  # values and slots that a program reads at once: of keys, and as many of values
DOT_VALUES, LARGEST_DOT = 4096, 32  # the same for several queries: more do not fit registers without tensor cores
LEAST_TILE = 16  # slots
DOT_QUERIES = 16  # the fewest that tensor cores multiply
GATHERED = 1024  # slots for which one program gathers shares
STAGES = 2  # tiles that are read ahead where a GPU can do so
WARPS, WARP = 4, 32  # of a program; threads of each
REGISTERS, NARROW = 144, 128  # do for one query and slots of 4 bits of up to so many values


class _Step(NamedTuple):
    """The launches of an attention, and how many values the first leaves for the second."""

    attend: Launch
    join: Launch | None  # None: the first one makes the outcome
    left: int


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
    q = q.contiguous()
    out, got = torch.empty_like(q), None
    if gathers:
        got = torch.empty(keys.data.shape[:3], dtype=torch.float32, device=q.device)
    if not out.numel():
        return out, got
    has_values = more is not None and more.values is not None
    given = q.shape, q.dtype, seen(keys.data), keys.format, seen(values.data), values.format
    attend, join, count = launches_of(*given, more is not None, has_values, gathers, cap or 0.0)
    left = torch.empty(count, dtype=torch.float32, device=q.device)
    attend(q, keys.data, values.data, left, out, held)
    if join is not None:
        nothing = left, left
        elsewhere = nothing if more is None else (more.scores, left if more.values is None else more.values)
        join(left, *elsewhere, out, left if got is None else got, held)
    return out, got


def tile_slots(width: int, queries: int) -> int:
    values, largest = (TILE_VALUES, LARGEST_TILE) if queries == 1 else (DOT_VALUES, LARGEST_DOT)
    return min(largest, max(LEAST_TILE, values // width))


def lanes_of(places: SlotPlaces, tile: int) -> int:
    """The slots of a tile that threads read at once: each reads a step of one, and comes back for those behind them."""
    threads = (UNITS if places.bits else places.width) // places.step
    return min(tile, max(1, WARPS * WARP // threads))


def most_registers(places: SlotPlaces, queries: int) -> int | None:
    """The registers of a thread, where compilers would take more than it needs; None: as many as they like."""
    return REGISTERS if queries == 1 and places.bits == 4 and places.width <= NARROW else None


@kept_by_shape
def launches_of(
    shape: torch.Size,
    dtype: torch.dtype,
    keys: Seen,
    key_format: str,
    values: Seen,
    value_format: str,
    has_more: bool,
    has_values: bool,
    gathers: str | None,
    cap: float,
) -> _Step:
    (rows, kv_heads, group, dim), slots = shape, keys[0][2]
    chunks, scored = triton.cdiv(slots, CHUNK), slots if gathers else 0
    is_over = chunks == 1 and not has_more and not gathers
    queries = 1 if group == 1 else max(DOT_QUERIES, triton.next_power_of_2(group))
    key, value = SlotPlaces.of(keys, key_format, dim), SlotPlaces.of(values, value_format, dim)
    tile = tile_slots(max(key.width, value.width), queries)
    attend = launcher(
        attend_chunk_kernel,
        (rows * kv_heads, chunks),
        (*key[:3], *value[:3], dim**-0.5, scored, kv_heads),
        **named("KEY", key),
        **named("VALUE", value),
        GROUP=group,
        QUERIES=queries,
        DIM=dim,
        CHUNK=CHUNK,
        TILE=tile,
        LANES=lanes_of(value, tile) if queries == 1 else queries,
        CAP=cap,
        GATHERS=bool(gathers),
        IS_OVER=is_over,
        num_stages=STAGES,
        num_warps=WARPS,
        maxnreg=most_registers(value, queries),
    )
    if is_over:
        return _Step(attend, None, 0)
    join = launcher(
        join_chunks_kernel,
        (rows * kv_heads, group + triton.cdiv(scored, GATHERED)),
        (chunks, scored, kv_heads),
        GROUP=group,
        DIM=dim,
        WIDTH=triton.next_power_of_2(dim),
        CHUNK=CHUNK,
        TOGETHER=TOGETHER,
        GATHERED=GATHERED,
        HAS_MORE=has_more,
        HAS_VALUES=has_values,
        IS_HIGHEST=gathers == MAX,
    )
    return _Step(attend, join, values_left(rows * kv_heads * group, chunks, dim, scored))


@triton.jit(do_not_specialize_on_alignment=["held"])
def attend_chunk_kernel(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, left: tl.tensor, out: tl.tensor, held: tl.tensor,
    key_row: tl.tensor, key_head: tl.tensor, key_slot: tl.tensor,
    value_row: tl.tensor, value_head: tl.tensor, value_slot: tl.tensor,
    scale: tl.tensor, slots: tl.tensor, kv_heads: tl.tensor,
    KEY_STEP: tl.constexpr, KEY_BITS: tl.constexpr, KEY_WIDTH: tl.constexpr,
    VALUE_STEP: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    LANES: tl.constexpr, CAP: tl.constexpr, GATHERS: tl.constexpr, IS_OVER: tl.constexpr,
) -> None:  # fmt: skip
    of_head, chunk = tl.program_id(0), tl.program_id(1)
    row, head = (of_head // kv_heads).to(tl.int64), (of_head % kv_heads).to(tl.int64)
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, tl.load(held + row).to(tl.int32))
    if first < end:
        query = tl.arange(0, QUERIES)
        number, is_query = of_head.to(tl.int64) * GROUP + query, query < GROUP
        column = column_numbers(KEY_BITS, KEY_WIDTH)
        where = number[:, None] * DIM + column[None, :]
        own = tl.load(q + where, mask=is_query[:, None] & (column < DIM)[None, :], other=0.0)
        top = tl.full((LANES,), -float("inf"), tl.float32)
        total = tl.zeros((LANES,), tl.float32)
        summed = tl.zeros((LANES, VALUE_WIDTH), tl.float32)
        key_start, value_start = row * key_row + head * key_head, row * value_row + head * value_head
        made, scores, tops, totals = parts_of_left(left, tl.num_programs(0) * GROUP, tl.num_programs(1), slots, DIM)
        for start in range(first, end, TILE):
            slot = start + tl.arange(0, TILE)
            there = slot < end
            k = values_of_slots(keys, key_start, slot, there, key_slot, KEY_STEP, KEY_BITS, DIM, KEY_WIDTH)
            v = values_of_slots(values, value_start, slot, there, value_slot, VALUE_STEP, VALUE_BITS, DIM, VALUE_WIDTH)
            if QUERIES == 1:
                found = scores_of_one(own, k, there, scale, CAP)
                if GATHERS:
                    tl.store(scores + of_head.to(tl.int64) * slots + slot, found, mask=there)
                top, total, summed = gathered_by_lanes(top, total, summed, found, v)
            else:
                found = scores_of(own, k, there, scale, CAP)
                if GATHERS:
                    place = number[:, None] * slots + slot[None, :]
                    tl.store(scores + place, found, mask=is_query[:, None] & there[None, :])
                top, total, summed = gathered(top, total, summed, found, v, own.dtype)
        if QUERIES == 1:
            top, total, summed = lanes_together(top, total, summed)
        column = column_numbers(VALUE_BITS, VALUE_WIDTH)
        is_value = is_query[:, None] & (column < DIM)[None, :]
        if IS_OVER:
            tl.store(out + number[:, None] * DIM + column[None, :], (summed / total[:, None]).to(own.dtype), mask=is_value)
        else:
            place = number * tl.num_programs(1) + chunk
            tl.store(tops + place, top, mask=is_query)
            tl.store(totals + place, total, mask=is_query)
            tl.store(made + place[:, None] * DIM + column[None, :], summed, mask=is_value)


@triton.jit(do_not_specialize_on_alignment=["held"])
def join_chunks_kernel(
    left: tl.tensor, more_scores: tl.tensor, more_values: tl.tensor, out: tl.tensor, got: tl.tensor, held: tl.tensor,
    chunks: tl.tensor, slots: tl.tensor, kv_heads: tl.tensor,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, TOGETHER: tl.constexpr,
    GATHERED: tl.constexpr, HAS_MORE: tl.constexpr, HAS_VALUES: tl.constexpr, IS_HIGHEST: tl.constexpr,
) -> None:  # fmt: skip
    """The first programs of a KV head make the outcome of a query each, the others gather shares of some slots each."""
    of_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(held + of_head // kv_heads).to(tl.int32)
    filled = tl.cdiv(end, CHUNK)
    made, scores, tops, totals = parts_of_left(left, tl.num_programs(0) * GROUP, chunks, slots, DIM)
    more = -float("inf")
    if part < GROUP:
        query = of_head * GROUP + part
        if HAS_MORE:
            more = tl.load(more_scores + query)
        top, total = softmax_of_chunks(tops, totals, more, query, chunks, filled, TOGETHER)
        summed = values_of_chunks(tops, made, top, query, chunks, filled, DIM, WIDTH, TOGETHER)
        column = tl.arange(0, WIDTH)
        is_value = column < DIM
        if HAS_VALUES:
            summed += exponential_of(more, top) * tl.load(more_values + query * DIM + column, mask=is_value, other=0.0)
        tl.store(out + query * DIM + column, (summed / total).to(out.dtype.element_ty), mask=is_value)
    else:
        slot = (part - GROUP) * GATHERED + tl.arange(0, GATHERED)
        there = slot < end
        own = tl.zeros((GATHERED,), tl.float32)
        for number in range(GROUP):
            query = of_head * GROUP + number
            if HAS_MORE:
                more = tl.load(more_scores + query)
            top, total = softmax_of_chunks(tops, totals, more, query, chunks, filled, TOGETHER)
            found = tl.load(scores + query * slots + slot, mask=there, other=-float("inf"))
            share = exponential_of(found, top) / total
            own = highest(own, share) if IS_HIGHEST else own + share
        tl.store(got + of_head * slots + slot, tl.where(there, own, 0.0), mask=slot < slots)
