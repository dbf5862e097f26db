"""Waiting: the rows that have no seat yet in a running block. The rows of a job are made when their turn comes, and forgotten
when they have ended, so that a job may be larger than memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from h2o_flexgen.core.prefix_groups import SharedPrefix
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.stores.prefix_store import PrefixStore
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.queues import Queues

MakeRow = Callable[[int], RowState]  # from its place in the workload


class Waiting(ABC):
    """The rows that have not ended of a block in which rows come and go."""

    keeps_prefixes: ClassVar[bool] = False  # the prefixes that they shared may serve rows of the next block

    @abstractmethod
    def seat_in(self, planned: BlockPlan) -> None:
        """Puts all rows that have not ended into the queues of this block."""

    @abstractmethod
    def left(self, blocks: Iterable[BlockPlan]) -> Sequence[int]:
        """The places of all rows that have not ended, in order; no row has a seat any more."""

    @abstractmethod
    def end(self, row: RowState) -> None:
        """Frees the seat of a row that has ended."""

    def choose(self, row: RowState, kept: PrefixStore, room: int) -> SharedPrefix | None:
        """Decides which prefix a row shares that takes a seat now, where this is not known before. Returns the prefix from
        which a new one is copied first. `room`: the tokens of prefixes that may still be computed in the next pass."""
        return None

    @abstractmethod
    def need(self, row: RowState) -> SeatNeed:
        """The most that a seated row may need."""

    @abstractmethod
    def take(self, batch: int, seated: Sequence[SharedPrefix | None]) -> list[RowState]:
        """The rows that join a batch now; `seated`: what each seated row shares with others."""


class WaitingJob(Waiting):
    def __init__(self, make: MakeRow) -> None:
        self._make = make
        self._begun: dict[int, RowState] = {}  # rows that were seated and have not ended

    def seat_in(self, planned: BlockPlan) -> None:
        self._queues = Queues(planned)

    def left(self, blocks: Iterable[BlockPlan]) -> Sequence[int]:
        finished = {place for place, row in self._begun.items() if row.finished}
        self._begun = {place: row for place, row in self._begun.items() if place not in finished}
        for row in self._begun.values():
            row.start_anew()
        return sorted(self._queues.needs.keys() - finished)

    def end(self, row: RowState) -> None:
        del self._begun[row.row]
        del self._queues.needs[row.row]

    def __len__(self) -> int:
        return len(self._queues)

    def need(self, row: RowState) -> SeatNeed:
        return self._queues.needs[row.row]

    def take(self, batch: int, seated: Sequence[SharedPrefix | None]) -> list[RowState]:
        return [self._row(place) for place in self._queues.take(batch, len(seated), seated)]

    def _row(self, place: int) -> RowState:
        if place not in self._begun:
            self._begun[place] = self._make(place)
        return self._begun[place]
