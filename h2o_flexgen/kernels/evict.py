"""The end of a decode step for caches that evict: what the newest query gave is added to the scores, and the newest token takes
over the slot of the one that goes, with all that is noted of it. So the slots in use stay one range.

All have the same outcome, bit for bit. But where a score is NaN, C looks at the others, and torch lets the newest go."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from h2o_flexgen.kernels.lowest_slot import lowest_slot, lowest_slot_twin
from h2o_flexgen.kernels.newest import Leaving, Newest, Notes

WORD = (1 << 32) - 1
LowestSlot = Callable[[Tensor, "Tensor | None", Tensor, Tensor, Tensor], Tensor]


def evict(image: Tensor, notes: Notes, newest: Newest, leaving: Leaving, sums: Tensor | None, decay: float) -> Tensor:
    """Who goes is found in C."""
    return _evicted(lowest_slot, image, notes, newest, leaving, sums, decay)


def evict_twin(image: Tensor, notes: Notes, newest: Newest, leaving: Leaving, sums: Tensor | None, decay: float) -> Tensor:
    return _evicted(lowest_slot_twin, image, notes, newest, leaving, sums, decay)


def _evicted(
    lowest_slot: LowestSlot,
    image: Tensor,
    notes: Notes,
    newest: Newest,
    leaving: Leaving,
    sums: Tensor | None,
    decay: float,
) -> Tensor:
    add_sums(notes, sums, decay)
    ranks = chances(notes.positions) if notes.by_chance else notes.scores
    lowest = lowest_slot(notes.positions, ranks, newest.held, leaving.start, leaving.end)
    own = newest.slots[:, None]
    target = torch.where(leaving.after[..., 0] > own, own.expand_as(lowest), lowest)
    for noted in (notes.positions, notes.scores):
        if noted is not None:
            noted.scatter_(-1, target.unsqueeze(-1), noted.gather(-1, own.unsqueeze(-1).expand(*target.shape, 1)))
    row, head = newest.rows[:, None], torch.arange(target.shape[1], device=target.device)
    image[:, row, head, target] = image[:, row, head, own]
    return target


def add_sums(notes: Notes, sums: Tensor | None, decay: float) -> None:
    """Adds `sums` (rows, heads, slots), fp32, the attention that each slot received, to scores that fade by `decay`."""
    if notes.scores is None or sums is None:
        return
    if decay != 1.0:
        notes.scores.mul_(decay)
    notes.scores.add_(sums)


def chances(positions: Tensor) -> Tensor:
    """Pseudo-random numbers that depend only on position and head. (rows, heads, any number)"""
    heads = torch.arange(positions.shape[1], device=positions.device)[:, None]
    x = (positions.long() * 2654435761 + heads * 2246822519 + 374761393) & WORD
    x = ((x ^ (x >> 15)) * 2246822519) & WORD
    x = ((x ^ (x >> 13)) * 3266489917) & WORD
    return ((x ^ (x >> 16)) >> 8).float()
