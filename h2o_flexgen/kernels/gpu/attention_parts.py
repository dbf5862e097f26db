"""What kernels of attention share. Keys or values of slots as they read them from memory: plain, or in the codes of a group
format. Softmax of a chunk of keys, and of the chunks of a row together.

A slot's codes are read in units, each with four of them: 16 bits of a four-bit group or 32 of an eight-bit one, 16 units either
way. Threads read neighbouring units at once, as many as the slots' alignment allows. What is unpacked lies in an order of its
own along a slot (`column_numbers`), in which queries are read too and outcomes are written.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import triton
import triton.language as tl

from h2o_flexgen.formats.grouped import GROUP, groups_of
from h2o_flexgen.formats.table import GROUPED, PLAIN
from h2o_flexgen.kernels.gpu.launching import Seen

BITS = {PLAIN: 0} | {format.name: format.bits for format in GROUPED}
UNITS = 16  # of a group's codes
WIDEST_LOAD = 16  # bytes that a thread can load at once
LEAST_DOT = 16  # values that products of tiles are summed over at least


class SlotPlaces(NamedTuple):
    """Slots as a kernel is told of them. Strides count steps of `step` values, or of units of codes, so that the compiler knows
    what they are multiples of."""

    row: int
    head: int
    slot: int
    step: int
    bits: int  # of a code; 0 for plain values
    width: int  # columns of a tile: a power of two

    @classmethod
    def of(cls, data: Seen, format: str, dim: int) -> SlotPlaces:
        """`data`: (rows, kv_heads, slots, width)"""
        (shape, strides, dtype), bits = data, BITS[format]
        assert strides[3] == 1
        nbytes, of_element = dtype.itemsize, bits // 2 or dtype.itemsize
        row, head, slot = (stride * nbytes if size > 1 else 0 for size, stride in zip(shape, strides[:3]))
        step = max(1, gcd(WIDEST_LOAD, row, head, slot) // of_element)
        of_step = step * of_element
        width = GROUP * triton.next_power_of_2(groups_of(dim)) if bits else max(LEAST_DOT, triton.next_power_of_2(dim))
        return cls(row // of_step, head // of_step, slot // of_step, step, bits, width)


def named(part: str, places: SlotPlaces) -> dict[str, int]:
    """What is a constant of a kernel."""
    return {f"{part}_{name}": number for name, number in zip(("STEP", "BITS", "WIDTH"), places[3:], strict=True)}


@triton.jit
def column_numbers(BITS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """The column of a head's values that stands at each place of a tile's rows."""
    place = tl.arange(0, WIDTH)
    group, unit, upper, later = place // 64, place // 4 % 16, place // 2 % 2, place % 2
    column = place
    if BITS == 4:
        column = group * 64 + 32 * later + 2 * unit + upper
    return column


@triton.jit
def values_of_slots(
    data: tl.tensor, start: tl.tensor, numbers: tl.tensor, is_there: tl.tensor, slot_stride: tl.tensor,
    STEP: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The values of slots with these numbers (count,) as a tile (count, WIDTH): plain ones in their type, decoded ones in
    float32. `start` is where slot 0 begins, in steps. Zeros for slots that are not there, and behind the last plain column."""
    slots = start + numbers.to(tl.int64) * slot_stride
    if BITS == 0:
        column = tl.arange(0, WIDTH)
        there = is_there[:, None] & (column < DIM)[None, :]
        values = tl.load(data + (slots * STEP)[:, None] + column[None, :], mask=there, other=0.0)
    else:
        GROUPS: tl.constexpr = (DIM + 63) // 64
        shared = data.to(tl.pointer_type(tl.bfloat16))  # scales and minima
        data = data.to(tl.pointer_type(tl.int16 if BITS == 4 else tl.int32))
        group, unit = tl.arange(0, WIDTH // 64), tl.arange(0, 16)
        there = is_there[:, None] & (group < GROUPS)[None, :]
        groups = (slots * STEP)[:, None] + (16 * group)[None, :]
        codes = tl.load(data + groups[:, :, None] + unit[None, None, :], mask=there[:, :, None], other=0).to(tl.int32)
        steps = (slots * (STEP * (BITS // 4)))[:, None] + GROUPS * 4 * BITS + group[None, :]
        scale = tl.load(shared + steps, mask=there, other=0.0).to(tl.float32)[:, :, None]
        least = tl.load(shared + steps + GROUPS, mask=there, other=0.0).to(tl.float32)[:, :, None]
        first, second, third, fourth = (
            code_at(codes, 0, scale, least, BITS),
            code_at(codes, 1, scale, least, BITS),
            code_at(codes, 2, scale, least, BITS),
            code_at(codes, 3, scale, least, BITS),
        )
        values = tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (numbers.shape[0], WIDTH))
    return values


@triton.jit
def code_at(codes: tl.tensor, NUMBER: tl.constexpr, scale: tl.tensor, least: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """The values of one of the codes of each unit."""
    MASK: tl.constexpr = (1 << BITS) - 1
    return ((codes >> (BITS * NUMBER)) & MASK).to(tl.float32) * scale + least


# -- softmax ---------------------------------------------------------------------------------------------------------------
# The softmax of kernels that meet keys tile by tile: what queries have gathered so far, and what one more tile adds to it.

BY_POWERS = tl.constexpr(0.125)  # parts of a cap below which four powers of a series are tanh to the last bits


@triton.jit
def exponential_of(scores: tl.tensor, top: tl.tensor) -> tl.tensor:
    """exp(scores - top). A top of -inf stands where nothing was found yet; scores of -inf give 0 all the same."""
    return tl.exp(scores - tl.where(top == -float("inf"), 0.0, top))


@triton.jit
def highest(one: tl.tensor, other: tl.tensor) -> tl.tensor:
    """The higher of numbers that are not below zero. Their bits rank as they do, and those of a NaN above all."""
    bits = tl.maximum(one.to(tl.uint32, bitcast=True), other.to(tl.uint32, bitcast=True))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def highest_of_rows(values: tl.tensor) -> tl.tensor:
    """The highest number of each row, with the same order."""
    return tl.max(values.to(tl.uint32, bitcast=True), 1).to(tl.float32, bitcast=True)


@triton.jit
def capped(scores: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """Scores stay between -CAP and CAP, near which they hardly grow any more: CAP * tanh(score / CAP). 0: they are as large as
    they are. Triton's own tanh is a function of CUDA's, which its interpreter lacks; one made of exponentials loses the digits
    of small scores, so these are made of the first powers of the series."""
    if CAP > 0.0:
        part = scores * (1.0 / CAP)
        size, square = tl.abs(part), part * part
        faded = tl.exp(-2.0 * size)
        large = (1.0 - faded) / (1.0 + faded)
        small = part * (1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
        scores = tl.where(size < BY_POWERS, small, tl.where(part < 0.0, -large, large)) * CAP
    return scores


@triton.jit
def scores_of(q: tl.tensor, keys: tl.tensor, is_there: tl.tensor, scale: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """Scores in float32, (queries, slots), of several queries (queries, width) and keys (slots, width); -inf where none is."""
    products = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")
    return tl.where(is_there[None, :], capped(products * scale, CAP), -float("inf"))


@triton.jit
def scores_of_one(q: tl.tensor, keys: tl.tensor, is_there: tl.tensor, scale: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """The same of one query (1, width): (slots,)."""
    products = tl.sum(keys.to(tl.float32) * q.to(tl.float32), 1)
    return tl.where(is_there, capped(products * scale, CAP), -float("inf"))


@triton.jit
def gathered(
    top: tl.tensor, total: tl.tensor, made: tl.tensor, scores: tl.tensor, values: tl.tensor, dtype: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The largest score, the sum of exponentials (queries,) and the weighed values (queries, width) of several queries with
    those of a tile. They meet its values in `dtype`."""
    highest = tl.maximum(top, tl.max(scores, 1))
    shares, kept = exponential_of(scores, highest[:, None]), exponential_of(top, highest)
    new = tl.dot(shares.to(dtype), values.to(dtype), input_precision="ieee")
    return highest, total * kept + tl.sum(shares, 1), made * kept[:, None] + new


@triton.jit
def gathered_by_lanes(
    top: tl.tensor, total: tl.tensor, made: tl.tensor, scores: tl.tensor, values: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The same of one query, for each lane by itself: (lanes,), (lanes,) and (lanes, width) with a tile's scores (slots,). The
    slots of a lane are as far apart as there are lanes."""
    LANES: tl.constexpr = top.shape[0]
    SLOTS: tl.constexpr = values.shape[0]
    found = tl.reshape(scores, (SLOTS // LANES, LANES))
    highest = tl.maximum(top, tl.max(found, 0))
    shares, kept = exponential_of(found, highest[None, :]), exponential_of(top, highest)
    own = tl.reshape(values.to(tl.float32), (SLOTS // LANES, LANES, values.shape[1]))
    return highest, total * kept + tl.sum(shares, 0), made * kept[:, None] + tl.sum(shares[:, :, None] * own, 0)


@triton.jit
def lanes_together(top: tl.tensor, total: tl.tensor, made: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """What the lanes of one query have gathered, as of one: (1,), (1,) and (1, width)."""
    highest = tl.max(top, 0, keep_dims=True)
    kept = exponential_of(top, highest)
    return highest, tl.sum(total * kept, 0, keep_dims=True), tl.sum(made * kept[:, None], 0, keep_dims=True)


# -- chunks ----------------------------------------------------------------------------------------------------------------
# The second pass of attention over chunks of slots: what the chunks gave becomes the outcome, in the order of the chunks. A
# chunk gives for each query its largest score (`tops`), the sum of exponentials beside it (`totals`) and the values that
# these weigh (`made`): (queries, chunks) or (queries, chunks, dim), in float32. Chunks have one size, and so a query's
# outcome depends on nothing but its own slots. All of it lies in one tensor, and the scores of slots where they are wanted.

TOGETHER = 16  # chunks that are read at once


def values_left(queries: int, chunks: int, dim: int, scored: int = 0) -> int:
    """The number of values that chunks leave. `scored`: slots of a query of which the scores are left, too."""
    return queries * (chunks * (dim + 2) + scored)


@triton.jit
def parts_of_left(
    left: tl.tensor, queries: tl.tensor, chunks: tl.tensor, scored: tl.tensor, DIM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The places where the values, the scores, the tops and the totals begin."""
    chunks_of_all = queries.to(tl.int64) * chunks
    scores = left + chunks_of_all * DIM
    tops = scores + queries.to(tl.int64) * scored
    return left, scores, tops, tops + chunks_of_all


@triton.jit
def softmax_of_chunks(
    tops: tl.tensor, totals: tl.tensor, more: tl.tensor, query: tl.tensor, chunks: tl.tensor, filled: tl.tensor,
    TOGETHER: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The largest score of a query, and the sum of all exponentials beside it; `more` is the score of one more key."""
    top, place = more, tl.arange(0, TOGETHER)
    for start in range(0, filled, TOGETHER):
        chunk = start + place
        top = tl.maximum(top, tl.max(tl.load(tops + query * chunks + chunk, mask=chunk < filled, other=-float("inf")), 0))
    total = exponential_of(more, top)
    for start in range(0, filled, TOGETHER):
        chunk = start + place
        is_there = chunk < filled
        share = exponential_of(tl.load(tops + query * chunks + chunk, mask=is_there, other=-float("inf")), top)
        total += tl.sum(tl.load(totals + query * chunks + chunk, mask=is_there, other=0.0) * share, 0)
    return top, total


@triton.jit
def values_of_chunks(
    tops: tl.tensor, made: tl.tensor, top: tl.tensor, query: tl.tensor, chunks: tl.tensor, filled: tl.tensor,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The values of all chunks, weighed by exponentials beside `top`. (WIDTH,)"""
    column, place = tl.arange(0, WIDTH), tl.arange(0, TOGETHER)
    out = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, filled, TOGETHER):
        chunk = start + place
        is_there = chunk < filled
        share = exponential_of(tl.load(tops + query * chunks + chunk, mask=is_there, other=-float("inf")), top)
        rows = made + ((query * chunks + chunk).to(tl.int64) * DIM)[:, None] + column[None, :]
        own = tl.load(rows, mask=is_there[:, None] & (column < DIM)[None, :], other=0.0)
        out += tl.sum(own * share[:, None], 0)
    return out
