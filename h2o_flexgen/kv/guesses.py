"""What guessed tokens change in caches that evict, so that it can be taken back.

A guessed token is computed as in a later step of its row: it adds to scores, and takes over the slot of another token. Until it
is known to be right, what was there before is kept beside the cache. So no guess changes what a policy decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.kv.slots import SlotScores
from h2o_flexgen.kv.step import KVStep


@dataclass(frozen=True)
class Change:
    """What a step changed in the slots of some rows, as it was before. All tensors are on the device that computes."""

    image: Tensor  # (sets, rows, kv_heads, slots, width) of these rows
    noted: SlotScores  # alike
    before: SlotScores  # what was noted then
    slots: Tensor | None  # (rows, kv_heads): those that the newest tokens took over; None: no token went
    values: Tensor | None  # (sets, rows, kv_heads, width): what was in these

    @classmethod
    def by(cls, now: KVStep, image: Tensor, noted: SlotScores, got: Tensor | None) -> Change:
        """Ends a decode step as `SlotScores.evict` does. Which slot goes follows from what is noted. So keys and values are
        left out there, and moved here, once those that go were copied."""
        before = noted.copied_as_it_is()
        if not now.evicts:
            noted.evict(now, image, got)
            return cls(image, noted, before, None, None)
        slots = noted.evict(now, image.new_empty(*image.shape[:4], 1), got)
        assert slots is not None, "rows that evict say which slots"
        row, head = now.row_index[:, None], torch.arange(slots.shape[1], device=slots.device)
        values = image[:, row, head, slots]
        image[:, row, head, slots] = image[:, row, head, now.counts[:, None]]
        return cls(image, noted, before, slots, values)

    def take_back(self, row: int) -> None:
        """Makes the slots of one of the rows what they were."""
        for own, before in zip(self.noted.tensors, self.before.tensors, strict=True):
            own[row] = before[row]
        if self.slots is not None and self.values is not None:
            head = torch.arange(self.slots.shape[1], device=self.slots.device)
            self.image[:, row, head, self.slots[row]] = self.values[:, row]


class _Turn(NamedTuple):
    rows: slice  # their places in the batch
    number: int  # of their tokens behind the newest ones, from 0
    change: Change


class Guesses:
    """What the guesses of a batch changed in a pass, in all layers."""

    def __init__(self) -> None:
        self._turns: list[_Turn] = []

    def noting(self, rows: slice, number: int) -> Callable[[Change], None]:
        """Notes what is changed by tokens of some rows, each of which is so many behind the newest of its row."""
        return lambda change: self._turns.append(_Turn(rows, number, change))

    def take_back(self, staying: Sequence[int]) -> None:
        """Takes back all but so many tokens behind the newest of each row, the last ones first."""
        for rows, number, change in reversed(self._turns):
            for place in range(rows.start, rows.stop):
                if number >= staying[place]:
                    change.take_back(place - rows.start)
        self._turns.clear()
