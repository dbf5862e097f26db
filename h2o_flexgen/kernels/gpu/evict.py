"""Eviction, and slots that move."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.evict import LEAST_SCORE, Leaving, Missing, Newest, Notes, RowsOfBoth, parts
from h2o_flexgen.kernels.gpu.attention_parts import highest
from h2o_flexgen.kernels.gpu.codes import as_words, in_words, widest_word
from h2o_flexgen.kernels.gpu.launching import ALIGNED, InWords, Launch, Seen, kept_by_shape, launcher, seen
from h2o_flexgen.kernels.raw_memory import begins_behind

# -- evict -----------------------------------------------------------------------------------------------------------------
# Updates scores, chooses the token to evict, and writes the newest token to its slot: one program for each KV head of a
# row. Everything is read before anything is written, with a barrier between. The result depends only on whole numbers, and
# on a product and a sum that are each rounded, so it equals that of the twin, bit for bit.

BY_SCORE, BY_AGE, BY_CHANCE, BY_WORTH = (tl.constexpr(number) for number in range(4))
LEAST = tl.constexpr(LEAST_SCORE)
NO_POSITION = tl.constexpr(torch.iinfo(torch.int32).max)  # a position behind all others
MOST_SLOTS = 1024  # that a program looks at side by side


def evict(
    image: Tensor, notes: Notes, newest: Newest, leaving: Leaving, got: Tensor | None, decay: float, gathers: str = SUM
) -> Tensor:
    positions, scores, by_chance, worth = notes
    assert positions.is_contiguous() and (got is None or got.is_contiguous())
    target = torch.empty(positions.shape[:2], dtype=torch.int64, device=image.device)
    ways = scores is not None, by_chance, worth is not None, decay, gathers
    launch = eviction_of(begins_behind(ALIGNED, image), seen(image), *ways)
    noted = (positions if each is None else each for each in (scores, got, worth))
    launch(image, positions, *noted, target, newest.slots, leaving.start, leaving.end, leaving.after)
    return target


@kept_by_shape
def eviction_of(
    begin: int, image: Seen, has_scores: bool, by_chance: bool, has_worth: bool, decay: float, gathers: str
) -> Launch:
    (sets, rows, heads, slots, width), strides, word = in_words(image, widest_word(begin, image))
    behind = strides[0] * (sets - 1)  # a key that has the values in it is moved alone
    by = BY_SCORE if has_scores else BY_WORTH if has_worth else BY_CHANCE if by_chance else BY_AGE
    return launcher(
        evict_one,
        (heads, rows),
        (decay, slots, width, behind, *strides[1:4]),
        InWords(word, (0,)),
        BY=by.value,
        IS_HIGHEST=gathers == MAX,
        HAS_WORTH=has_worth,
        SLOTS=min(MOST_SLOTS, triton.next_power_of_2(slots)),
        WORDS=triton.next_power_of_2(width),
        enable_fp_fusion=False,
    )


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


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["newest", "start", "end", "after"])
def evict_one(
    image, positions, scores, got, worth, target, newest, start, end, after, decay, slots, words,
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


# -- move slots ------------------------------------------------------------------------------------------------------------
# Slots that go from one place to another: those kept of a prompt, those that a step changed.

SLOTS = 8  # that a program moves


def take_slots(source: Tensor, index: Tensor, out: Tensor) -> None:
    rows, heads, count, _ = out.shape
    if not out.numel():
        return
    source, out = as_words(source, out)
    index = index.expand(rows, heads, count)
    _move(source[None], index, out[None])


def gather_slots(image: Tensor, slots: Tensor, out: Tensor) -> None:
    numbers, values = parts(out, slots.shape, image)
    image, values = as_words(image, values)
    _move(image, slots.unsqueeze(-1), values.unsqueeze(3), numbers)


def _move(source: Tensor, index: Tensor, out: Tensor, numbers: Tensor | None = None) -> None:
    """source (halves, rows, heads, slots, words), index (rows, heads, count) -> out (halves, rows, heads, count, words), and
    `numbers` (rows, heads), where the first of the index is wanted as well."""
    launch = move_of(seen(source), seen(index), seen(out), numbers is not None)
    launch(source, index, out, index if numbers is None else numbers)


@kept_by_shape
def move_of(source: Seen, index: Seen, out: Seen, numbers: bool) -> Launch:
    halves, rows, heads, count, words = out[0]
    return launcher(
        move_slots,
        (triton.cdiv(count, SLOTS), heads, rows),
        (count, words, *source[1][:4], *index[1], *out[1][:4]),
        NUMBERS=numbers,
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


# -- between two images ----------------------------------------------------------------------------------------------------
# One of them lies in page-locked memory of the host, where a program reads or writes over the link: whole slots, of which
# neighbouring threads take neighbouring words. Nothing but what is missing is read there.


def bring_slots(source: Tensor, target: Tensor, slots: Tensor, rows: RowsOfBoth, missing: Missing | None = None) -> None:
    source, target = as_words(source, target)
    ways = rows.source is not None, rows.target is not None, missing is not None
    launch = bring_of(seen(source), seen(target), seen(slots), *ways)
    numbers = (*rows, *((None, None) if missing is None else missing))
    launch(source, target, slots, *(slots if each is None else each for each in numbers))


@kept_by_shape
def bring_of(source: Seen, target: Seen, slots: Seen, from_elsewhere: bool, to_elsewhere: bool, picks: bool) -> Launch:
    (rows, heads, count), halves, words = slots[0], source[0][0], source[0][-1]
    return launcher(
        bring_some,
        (triton.cdiv(count, SLOTS), heads, rows),
        (count, words, *source[1][:4], *target[1][:4], *slots[1]),
        FROM_ELSEWHERE=from_elsewhere,
        TO_ELSEWHERE=to_elsewhere,
        PICKS=picks,
        HALVES=halves,
        SLOTS=SLOTS,
        WORDS=triton.next_power_of_2(words),
    )


@triton.jit(
    do_not_specialize=["count", "slots_row", "slots_head"],
    do_not_specialize_on_alignment=["slots", "source_rows", "target_rows", "counts", "newest"],
)
def bring_some(
    source, target, slots, source_rows, target_rows, counts, newest, count, words,
    source_half, source_row, source_head, source_slot, target_half, target_row, target_head, target_slot,
    slots_row, slots_head, slots_place,
    FROM_ELSEWHERE: tl.constexpr, TO_ELSEWHERE: tl.constexpr, PICKS: tl.constexpr,
    HALVES: tl.constexpr, SLOTS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    word, from_row, to_row = tl.arange(0, WORDS), row, row
    if FROM_ELSEWHERE:
        from_row = tl.load(source_rows + row)
    if TO_ELSEWHERE:
        to_row = tl.load(target_rows + row)
    slot = tl.load(slots + row * slots_row + head * slots_head + place * slots_place, mask=place < count, other=0)
    wanted = place < count
    if PICKS:
        wanted = (place < tl.load(counts + row)) & (slot != tl.load(newest + row))
    there = wanted[:, None] & (word < words)[None, :]
    taken = source + from_row * source_row + head * source_head + slot[:, None] * source_slot + word[None, :]
    put = target + to_row * target_row + head * target_head + slot[:, None] * target_slot + word[None, :]
    for half in tl.static_range(HALVES):
        tl.store(put + half * target_half, tl.load(taken + half * source_half, mask=there), mask=there)
