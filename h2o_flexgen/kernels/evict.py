"""The end of a decode step for caches that evict: what the newest query gave goes into the scores, and the newest token takes
over the slot of the one that goes, with all that is noted of it. So the slots in use stay one range.

All have the same outcome, bit for bit. But where a score is NaN, C looks at the others, and torch lets the newest go."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_table import MAX, SUM
from h2o_flexgen.kernels.lowest_slot import lowest_slot, lowest_slot_twin
from h2o_flexgen.kernels.newest import Leaving, Newest, Notes

WORD = (1 << 32) - 1
LEAST_SCORE = 1e-4  # is added where a worth weighs scores: of tokens that get no attention, the most worthy stay
LowestSlot = Callable[[Tensor, "Tensor | None", Tensor, Tensor, Tensor], Tensor]


def evict(
    image: Tensor, notes: Notes, newest: Newest, leaving: Leaving, got: Tensor | None, decay: float, gathers: str = SUM
) -> Tensor:
    """The slot to evict is found in C."""
    note(notes, newest, got, decay, gathers)
    return _evicted(lowest_slot, image, notes, newest, leaving)


def evict_twin(
    image: Tensor, notes: Notes, newest: Newest, leaving: Leaving, got: Tensor | None, decay: float, gathers: str = SUM
) -> Tensor:
    note(notes, newest, got, decay, gathers)
    return _evicted(lowest_slot_twin, image, notes, newest, leaving)


def _evicted(lowest_slot: LowestSlot, image: Tensor, notes: Notes, newest: Newest, leaving: Leaving) -> Tensor:
    ranks = chances(notes.positions) if notes.by_chance else weighed(notes.scores, notes.worth)
    lowest = lowest_slot(notes.positions, ranks, newest.held, leaving.start, leaving.end)
    own = newest.slots[:, None]
    target = torch.where(leaving.after[..., 0] > own, own.expand_as(lowest), lowest)
    for noted in (notes.positions, notes.scores, notes.worth):
        if noted is not None:
            noted.scatter_(-1, target.unsqueeze(-1), noted.gather(-1, own.unsqueeze(-1).expand(*target.shape, 1)))
    row, head = newest.rows[:, None], torch.arange(target.shape[1], device=target.device)
    image[:, row, head, target] = image[:, row, head, own]
    return target


def note(notes: Notes, newest: Newest, got: Tensor | None, decay: float, gathers: str = SUM) -> None:
    """Adds what slots got (rows, heads, slots), fp32, to scores that fade by `decay`, or raises scores to it. A token's look
    at itself says nothing of whether others need it, so the newest is not raised."""
    if notes.scores is None or got is None:
        return
    if decay != 1.0:
        notes.scores.mul_(decay)
    if gathers == MAX:
        own = newest.slots[:, None, None].expand(*got.shape[:2], 1)
        torch.maximum(notes.scores, got.scatter(-1, own, 0.0), out=notes.scores)
    else:
        notes.scores.add_(got)


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
