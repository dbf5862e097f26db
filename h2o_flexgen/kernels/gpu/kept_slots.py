"""Keys or values of slots as kernels read them from memory: plain, or in the codes of a group format.

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
