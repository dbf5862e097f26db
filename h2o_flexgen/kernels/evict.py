"""Eviction, and slots that move: which slot goes, what takes its place, and what was changed. In C and in torch."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.native import ValuePlaces, pointer, run, threads_for
from h2o_flexgen.kernels.raw_memory import address_of, numpy_of

# -- newest ----------------------------------------------------------------------------------------------------------------
# The arguments about slots for kernels of a decode step: where each row's newest token goes, what a policy has noted of the
# others, and which of them may be evicted.


class Newest(NamedTuple):
    """The newest token of each row, which is written behind the others."""

    rows: Tensor  # (rows,): 0, 1, 2 ...
    slots: Tensor  # (rows,): its slot
    held: Tensor  # (rows,): slots in use, its own included
    positions: Tensor  # (rows, 1): its position in the text


class Notes(NamedTuple):
    """What a policy that evicts knows of each slot of a KV head."""

    positions: Tensor  # (rows, heads, slots), int32
    scores: Tensor | None  # alike, fp32, where tokens rank by attention
    by_chance: bool = False  # without scores, tokens rank by chance instead of by age
    worth: Tensor | None = None  # as scores, which it weighs; without scores, tokens rank by it. It is known when a token comes


class Leaving(NamedTuple):
    """The tokens that may be evicted, as (rows, 1, 1), and how many slots a row then holds."""

    start: Tensor  # tokens with positions from here
    end: Tensor  # up to but not including this one may go
    after: Tensor  # slots that a row holds in the end


# -- evict -----------------------------------------------------------------------------------------------------------------
# The end of a decode step for caches that evict: what the newest query gave goes into the scores, and the newest token
# takes over the slot of the one that goes, with all that is noted of it. So the slots in use stay one range. All have the
# same outcome, bit for bit. But where a score is NaN, C looks at the others, and torch lets the newest go.

WORD = (1 << 32) - 1
LAST = torch.iinfo(torch.int32).max
LEAST_SCORE = 1e-4  # is added where a worth weighs scores: of tokens that get no attention, the most worthy stay


def evict(
    image: Tensor, notes: Notes, newest: Newest, leaving: Leaving, got: Tensor | None, decay: float, gathers: str = SUM
) -> Tensor:
    (rows, heads, slots), bounds = notes.positions.shape, (leaving.start, leaving.end, leaving.after)
    assert image.shape[1:4] == notes.positions.shape and newest.slots.shape == (rows,)
    assert all(bound.shape == (rows, 1, 1) and bound.dtype == torch.int64 for bound in bounds)
    target, is_weighed = torch.empty(rows, heads, dtype=torch.int64), notes.scores is not None and notes.worth is not None
    room = torch.empty(rows, heads, slots) if notes.by_chance or is_weighed else None
    given = _Evicting(
        *(ValuePlaces.of(own, writes=True) for own in (image[0], image[-1])),
        NotesInC.of(notes),
        *(None if each is None else pointer(each) for each in (got, room, newest.slots, *bounds, target)),
        *(rows, heads, slots, image.shape[-1] * image.itemsize),
        *(decay, LEAST_SCORE, gathers == MAX, notes.by_chance),
    )
    run("evict", given, threads_for(notes.positions.numel()))
    return target


def note(notes: Notes, newest: Newest, got: Tensor | None, decay: float, gathers: str = SUM) -> None:
    if notes.scores is None or got is None:
        return
    nowhere, sizes = ValuePlaces(), notes.positions.shape
    places = pointer(got), None, pointer(newest.slots), None, None, None, None
    given = _Evicting(nowhere, nowhere, NotesInC.of(notes), *places, *sizes, 0, decay, 0.0, gathers == MAX, False)
    run("evict", given, threads_for(notes.positions.numel()))


def evict_twin(
    image: Tensor, notes: Notes, newest: Newest, leaving: Leaving, got: Tensor | None, decay: float, gathers: str = SUM
) -> Tensor:
    note_twin(notes, newest, got, decay, gathers)
    ranks = chances(notes.positions) if notes.by_chance else weighed(notes.scores, notes.worth)
    lowest = _lowest_slot(notes.positions, ranks, newest.held, leaving.start, leaving.end)
    own = newest.slots[:, None]
    target = torch.where(leaving.after[..., 0] > own, own.expand_as(lowest), lowest)
    for noted in (notes.positions, notes.scores, notes.worth):
        if noted is not None:
            noted.scatter_(-1, target.unsqueeze(-1), noted.gather(-1, own.unsqueeze(-1).expand(*target.shape, 1)))
    row, head = newest.rows[:, None], torch.arange(target.shape[1], device=target.device)
    image[:, row, head, target] = image[:, row, head, own]
    return target


def note_twin(notes: Notes, newest: Newest, got: Tensor | None, decay: float, gathers: str = SUM) -> None:
    if notes.scores is None or got is None:
        return
    if decay != 1.0:
        notes.scores.mul_(decay)
    if gathers == MAX:
        own = newest.slots[:, None, None].expand(*got.shape[:2], 1)
        torch.maximum(notes.scores, got.scatter(-1, own, 0.0), out=notes.scores)
    else:
        notes.scores.add_(got)


def _lowest_slot(positions: Tensor, ranks: Tensor | None, held: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """The slot of each head that ranks lowest among those that may go; among equals, the oldest token's."""
    behind = torch.arange(positions.shape[2], device=positions.device) >= held[:, None, None]
    stays = (positions < start) | (positions >= end) | behind
    free = (positions.double() if ranks is None else ranks).masked_fill(stays, torch.inf)
    lowest = (free == free.amin(-1, keepdim=True)) & ~stays
    oldest = positions.masked_fill(~lowest, LAST).argmin(-1)
    return torch.where(lowest.any(-1), oldest, held[:, None] - 1)


def weighed(scores: Tensor | None, worth: Tensor | None) -> Tensor | None:
    """What tokens rank by that have a score, a worth of their own, or both; None where they have neither."""
    if scores is None or worth is None:
        return worth if scores is None else scores
    return (scores + LEAST_SCORE) * worth


def chances(positions: Tensor) -> Tensor:
    """Pseudo-random numbers that depend only on position and head. (rows, heads, any number)"""
    heads = torch.arange(positions.shape[1], device=positions.device)[:, None]
    x = (positions.long() * 2654435761 + heads * 2246822519 + 374761393) & WORD
    x = ((x ^ (x >> 15)) * 2246822519) & WORD
    x = ((x ^ (x >> 13)) * 3266489917) & WORD
    return ((x ^ (x >> 16)) >> 8).float()


class NotesInC(ctypes.Structure):
    """The addresses of what is noted of slots, (rows, heads, slots), and the strides of all of it, in numbers."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("positions", "scores", "worth")),
        *((name, ctypes.c_long) for name in ("row", "head")),
    )

    @classmethod
    def of(cls, notes: Notes | None) -> NotesInC:
        if notes is None:
            return cls()
        noted, strides = (notes.positions, notes.scores, notes.worth), notes.positions.stride()
        assert strides[2] == 1 and all(each is None or each.stride() == strides for each in noted)
        return cls(*(None if each is None else address_of(each, writes=True) for each in noted), *strides[:2])


class _Evicting(ctypes.Structure):
    _fields_ = (
        *((name, ValuePlaces) for name in ("keys", "values")),
        ("notes", NotesInC),
        *((name, ctypes.c_void_p) for name in ("got", "room", "newest", "start", "end", "after", "out")),
        *((name, ctypes.c_long) for name in ("rows", "heads", "slots", "nbytes")),
        *((name, ctypes.c_float) for name in ("decay", "least")),
        *((name, ctypes.c_int) for name in ("is_highest", "by_chance")),
    )


# -- take slots ------------------------------------------------------------------------------------------------------------
# Slots that each head chooses, copied to another place. C and torch give the same bits. Torch wants an index for every
# value of a slot: eight bytes of index to move two.


def take_slots(source: Tensor, index: Tensor, out: Tensor) -> None:
    rows, heads, count, width = out.shape
    source = source if source.stride(3) == 1 else source.contiguous()  # C reads the values of a slot side by side
    index = index.contiguous()  # both are kept alive until C is done
    assert source.dtype == out.dtype and (*source.shape[:2], source.shape[3]) == (rows, heads, width)
    assert index.dtype == torch.int64 and index.shape in ((rows, heads, count), (rows, 1, count))
    strides = (index.stride(0), index.stride(1) if index.shape[1] > 1 else 0)
    given = _Taking(
        *(ValuePlaces.of(source), ValuePlaces.of(out, writes=True), pointer(index)),
        *strides,
        *(rows, heads, count, width * out.itemsize),
    )
    run("take_slots", given, torch.get_num_threads())


def take_slots_twin(source: Tensor, index: Tensor, out: Tensor) -> None:
    out.copy_(source.gather(2, index.unsqueeze(-1).expand(*out.shape)))


class _Taking(ctypes.Structure):
    _fields_ = (
        *((name, ValuePlaces) for name in ("source", "out")),
        ("index", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("index_row", "index_head", "rows", "heads", "count", "width")),
    )


# -- changed slots ---------------------------------------------------------------------------------------------------------
# The one slot of every row and head that a step changed, between one image and another: bytes that are copied at once. The
# numbers of these slots come first, then their keys, then their values.

NUMBER = torch.int64


class ChangedSlots:
    """What the host does with the gathered bytes of some rows, where an image lies token by token: (slots, sets, rows, heads)
    runs of bytes. Made once for all layers: it knows where the first slot of every row and head lies."""

    def __init__(self, rows: int, shape: tuple[int, int, int], slot_bytes: int, sets: int = 2) -> None:
        """`shape`: the rows, heads and slots of the image; `slot_bytes`: bytes of one slot of all its rows."""
        all_rows, heads, slots = shape
        runs = sets * all_rows * heads
        self._runs, self._image_bytes = runs, slots * slot_bytes
        self._run = numpy.dtype((numpy.void, slot_bytes // runs))
        self._slots = torch.Size((rows, heads))
        self._first = numpy.arange(runs).reshape(sets, all_rows * heads)[:, : rows * heads]
        self._numbers_bytes = rows * heads * NUMBER.itemsize
        self.value_bytes = rows * slot_bytes // all_rows
        self.nbytes = self._numbers_bytes + self.value_bytes

    def numbers(self, gathered: Tensor) -> Tensor:
        return gathered[: self._numbers_bytes].view(NUMBER).view(self._slots)

    def bring(self, gathered: Tensor, home: Tensor) -> None:
        """Brings keys and values to the slots of the image, by numpy, as it is a matter of microseconds."""
        there, runs = numpy_of(gathered), numpy_of(home[: self._image_bytes], writes=True).view(self._run)
        numbers = there[: self._numbers_bytes].view(numpy.int64)
        runs[numbers * self._runs + self._first] = there[self._numbers_bytes :].view(self._run).reshape(self._first.shape)


def parts(gathered: Tensor, slots: torch.Size, image: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers (rows, heads), and the keys and values (sets, rows, heads, width) of an image, in gathered bytes."""
    sets, width, numbers = len(image), image.shape[-1], slots.numel() * NUMBER.itemsize
    end = numbers + sets * slots.numel() * width * image.itemsize
    return gathered[:numbers].view(NUMBER).view(slots), gathered[numbers:end].view(image.dtype).view(sets, *slots, width)


def gather_slots_twin(image: Tensor, slots: Tensor, out: Tensor) -> None:
    numbers, values = parts(out, slots.shape, image)
    row, head = (torch.arange(count, device=image.device) for count in slots.shape)
    numbers.copy_(slots)
    values.copy_(image[:, row[:, None], head, slots])


# -- between two images ----------------------------------------------------------------------------------------------------
# Slots that are in one image, and go to the same slots of another: those that a step has chosen, and those that it has changed.


class RowsOfBoth(NamedTuple):
    """The rows of two images in which the rows of a batch lie, (rows,) of each; None: in their order, from the first on."""

    source: Tensor | None = None
    target: Tensor | None = None


class Missing(NamedTuple):
    """What of the chosen slots of each row is not there yet: the first `counts` (rows,), one at least, are chosen, and of these
    all but the slot of its `newest` token (rows,)."""

    counts: Tensor
    newest: Tensor


def bring_slots_twin(source: Tensor, target: Tensor, slots: Tensor, rows: RowsOfBoth, missing: Missing | None = None) -> None:
    """Row by row, so that few copies are held at once. What is not missing is written again as it is."""
    (count, heads, _), there = slots.shape, slots.device
    head, in_order = torch.arange(heads, device=there)[:, None], torch.arange(count, device=there)
    from_rows, to_rows = (in_order if each is None else each for each in rows)
    for row in range(count):
        own, (here, goes_to) = slots[row], (each[row : row + 1, None] for each in (from_rows, to_rows))
        if missing is not None:  # behind the chosen ones comes the first of them again
            place = torch.arange(own.shape[-1], device=there)
            own = torch.where(place < missing.counts[row], own, own[:, :1])
        values = source[:, here, head, own]
        if missing is not None:
            values = torch.where((own == missing.newest[row])[..., None], target[:, goes_to, head, own], values)
        target[:, goes_to, head, own] = values
