"""Updates scores, chooses the token to evict, and writes the newest token to its slot: one program for each KV head of a row.

Everything is read before anything is written, with a barrier between. The result depends only on whole numbers, and on a
product and a sum that are each rounded, so it equals that of the twin, bit for bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.evict import LEAST_SCORE
from h2o_flexgen.kernels.gpu.softmax import highest
from h2o_flexgen.kernels.gpu.words import as_words
from h2o_flexgen.kernels.newest import Leaving, Newest, Notes

BY_SCORE, BY_AGE, BY_CHANCE, BY_WORTH = (tl.constexpr(number) for number in range(4))
LEAST = tl.constexpr(LEAST_SCORE)
NO_POSITION = tl.constexpr(torch.iinfo(torch.int32).max)  # a position behind all others
MOST_SLOTS = 1024  # that a program looks at side by side


def evict(
    image: Tensor, notes: Notes, newest: Newest, leaving: Leaving, got: Tensor | None, decay: float, gathers: str = SUM
) -> Tensor:
    rows, heads, slots = notes.positions.shape
    (words,) = as_words(image)
    assert notes.positions.is_contiguous() and (got is None or got.is_contiguous())
    target = torch.empty(rows, heads, dtype=torch.int64, device=image.device)
    has_worth = notes.worth is not None
    by = BY_SCORE if notes.scores is not None else BY_WORTH if has_worth else BY_CHANCE if notes.by_chance else BY_AGE
    evict_one[(heads, rows)](
        words,
        notes.positions,
        *(notes.positions if each is None else each for each in (notes.scores, got, notes.worth)),
        newest.slots,
        leaving.start,
        leaving.end,
        leaving.after,
        target,
        decay,
        slots,
        words.shape[-1],
        *words.stride()[:4],
        BY=by.value,
        IS_HIGHEST=gathers == MAX,
        HAS_WORTH=has_worth,
        SLOTS=min(MOST_SLOTS, triton.next_power_of_2(slots)),
        WORDS=triton.next_power_of_2(words.shape[-1]),
        enable_fp_fusion=False,
    )
    return target


@triton.jit
def scored(scores, got, at, newest, there, decay, IS_HIGHEST: tl.constexpr):
    """The scores of these slots, with what they got; `newest` is where the newest token's is."""
    faded = tl.load(scores + at, mask=there, other=0.0) * decay
    new = tl.load(got + at, mask=there, other=0.0)
    return highest(faded, tl.where(at == newest, 0.0, new)) if IS_HIGHEST else faded + new


@triton.jit
def ranked(
    positions, scores, got, worth, at, newest, there, decay, head,
    BY: tl.constexpr, IS_HIGHEST: tl.constexpr, HAS_WORTH: tl.constexpr,
):  # fmt: skip
    """Positions of these slots, and what they rank by."""
    position = tl.load(positions + at, mask=there, other=0)
    if BY == BY_SCORE:
        rank = scored(scores, got, at, newest, there, decay, IS_HIGHEST)
        if HAS_WORTH:
            rank = (rank + LEAST) * tl.load(worth + at, mask=there, other=0.0)
    elif BY == BY_WORTH:
        rank = tl.load(worth + at, mask=there, other=0.0)
    elif BY == BY_AGE:
        rank = tl.zeros_like(position).to(tl.float32)
    else:
        x = position.to(tl.uint32, bitcast=True) * 2654435761 + head.to(tl.uint32) * 2246822519 + 374761393
        x = (x ^ (x >> 15)) * 2246822519
        x = (x ^ (x >> 13)) * 3266489917
        rank = ((x ^ (x >> 16)) >> 8).to(tl.float32)
    return position, rank


@triton.jit(do_not_specialize=["slots"])
def evict_one(
    image, positions, scores, got, worth, newest, start, end, after, target, decay, slots, words,
    half_stride, row_stride, head_stride, slot_stride,
    BY: tl.constexpr, IS_HIGHEST: tl.constexpr, HAS_WORTH: tl.constexpr, SLOTS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = (row * tl.num_programs(0) + head) * slots
    last = tl.load(newest + row)
    begins, ends = tl.load(start + row), tl.load(end + row)
    lane, own = tl.arange(0, SLOTS), first + last

    least, oldest, place = (
        tl.full((SLOTS,), float("inf"), tl.float32),
        tl.full((SLOTS,), NO_POSITION, tl.int32),
        lane.to(tl.int64),
    )
    lost = tl.zeros((SLOTS,), tl.int32)
    for block in range(0, slots, SLOTS):
        at = block + lane
        position, rank = ranked(
            positions, scores, got, worth, first + at, own, at < slots, decay, head, BY, IS_HIGHEST, HAS_WORTH
        )
        may_go = (at <= last) & (at < slots) & (position >= begins) & (position < ends)
        lost |= (may_go & (rank != rank)).to(tl.int32)
        better = may_go & ((rank < least) | ((rank == least) & (position < oldest)))
        least, oldest, place = tl.where(better, rank, least), tl.where(better, position, oldest), tl.where(better, at, place)
    best = tl.min(least)
    oldest = tl.where(least == best, oldest, NO_POSITION)
    eldest = tl.min(oldest)
    lowest = tl.min(tl.where(oldest == eldest, place, slots))
    none_goes = (eldest == NO_POSITION) | (tl.max(lost) > 0)
    goes = tl.where(none_goes | (tl.load(after + row) > last), last, lowest)
    tl.store(target + row * tl.num_programs(0) + head, goes)

    position = tl.load(positions + own)
    if BY == BY_SCORE:
        own_score = scored(scores, got, own, own, True, decay, IS_HIGHEST)
    if HAS_WORTH:
        own_worth = tl.load(worth + own)
    word = tl.arange(0, WORDS)
    from_here = image + row * row_stride + head.to(tl.int64) * head_stride + last * slot_stride + word
    key = tl.load(from_here, mask=word < words)
    value = tl.load(from_here + half_stride, mask=word < words)
    tl.debug_barrier()
    tl.store(positions + first + goes, position)
    if HAS_WORTH:
        tl.store(worth + first + goes, own_worth)
    to_there = from_here + (goes - last) * slot_stride
    tl.store(to_there, key, mask=word < words)
    tl.store(to_there + half_stride, value, mask=word < words)
    if BY == BY_SCORE:
        for block in range(0, slots, SLOTS):
            at = block + lane
            score = scored(scores, got, first + at, own, at < slots, decay, IS_HIGHEST)
            tl.store(scores + first + at, tl.where(at == goes, own_score, score), mask=at < slots)
