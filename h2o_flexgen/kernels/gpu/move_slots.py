"""Slots that go from one place to another: those kept of a prompt, those that a step changed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.kernels.changed_slots import parts
from h2o_flexgen.kernels.gpu.words import as_words

SLOTS = 8  # that a program moves


def take_slots(source: Tensor, index: Tensor, out: Tensor) -> None:
    rows, heads, count, _ = out.shape
    if not out.numel():
        return
    source, out = as_words(source, out)
    index = index.expand(rows, heads, count)
    _move(source[None], index, out[None])


def gather_slots(image: Tensor, slots: Tensor, out: Tensor) -> None:
    numbers, values = parts(out, slots.shape, image.shape[-1], image.dtype)
    image, values = as_words(image, values)
    _move(image, slots.unsqueeze(-1), values.unsqueeze(3), numbers)


def _move(source: Tensor, index: Tensor, out: Tensor, numbers: Tensor | None = None) -> None:
    """source (halves, rows, heads, slots, words), index (rows, heads, count) -> out (halves, rows, heads, count, words), and
    `numbers` (rows, heads), where the first of the index is wanted as well."""
    halves, rows, heads, count, words = out.shape
    move_slots[(triton.cdiv(count, SLOTS), heads, rows)](
        source,
        index,
        out,
        index if numbers is None else numbers,
        count,
        words,
        *source.stride()[:4],
        *index.stride(),
        *out.stride()[:4],
        NUMBERS=numbers is not None,
        HALVES=halves,
        SLOTS=SLOTS,
        WORDS=triton.next_power_of_2(words),
    )


@triton.jit(do_not_specialize=["count", "index_row", "index_head"])
def move_slots(
    source,
    index,
    out,
    numbers,
    count,
    words,
    source_half,
    source_row,
    source_head,
    source_slot,
    index_row,
    index_head,
    index_place,
    out_half,
    out_row,
    out_head,
    out_slot,
    NUMBERS: tl.constexpr,
    HALVES: tl.constexpr,
    SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
):
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    word = tl.arange(0, WORDS)
    slot = tl.load(index + row * index_row + head * index_head + place * index_place, mask=place < count, other=0)
    if NUMBERS:
        tl.store(numbers + row * tl.num_programs(1) + head + place, slot, mask=place < 1)
    there = (place < count)[:, None] & (word < words)[None, :]
    taken = source + row * source_row + head * source_head + slot[:, None] * source_slot + word[None, :]
    put = out + row * out_row + head * out_head + place[:, None] * out_slot + word[None, :]
    for half in tl.static_range(HALVES):
        tl.store(put + half * out_half, tl.load(taken + half * source_half, mask=there), mask=there)
