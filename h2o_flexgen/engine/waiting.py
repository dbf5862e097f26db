"""Waiting: the rows of a job that have no seat yet, queue by queue. A row is made when its turn comes, and is forgotten when it
has ended, so that a job may be longer than memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from h2o_flexgen.core.seats import Need
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.policies.policy import KVPolicy

MakeRow = Callable[[int], RowState]  # from its place in the workload
LOOKED_AT = 64  # rows at the head of another batch's queue among which one that fits is looked for
FREE_SHARE = 8  # newcomers wait until one seat in so many is free: their prompts are then read together


class Waiting:
    def __init__(self, needs: Sequence[Need], policy: KVPolicy, make: MakeRow) -> None:
        self._needs = needs
        self._policy = policy
        self._make = make
        self._begun: dict[int, RowState] = {}  # rows that were seated and have not ended
        self._queues: list[deque[int]] = []
        self._slots: dict[Need, int] = {}

    def seat_in(self, planned: BlockPlan) -> None:
        """Puts all rows that have not ended into the queues of this block."""
        self._seats = [batch.seats for batch in planned.block.batches if batch.seats is not None]
        self._capacity = [occupancy.capacity for occupancy in planned.occupancy]
        self._queues = [deque(seats.queue) for seats in self._seats]

    def left(self, blocks: Iterable[BlockPlan]) -> Sequence[int]:
        """All rows that have not ended, in order; nobody has a seat any more."""
        self._begun = {place: row for place, row in self._begun.items() if not row.finished}
        for row in self._begun.values():
            row.start_anew()
        return sorted({*self._begun, *(place for queue in self._queues for place in queue)})

    def end(self, row: RowState) -> None:
        del self._begun[row.row]

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def take(self, batch: int, taken: int, seats: int) -> list[RowState]:
        """The rows that join a batch now, longest prompts first. Whoever waits does so until some seats are free, or all."""
        free = seats - taken
        if taken and free * FREE_SHARE < seats and free < len(self):
            return []
        rows = [self._row(place) for place in islice(self._places(batch), free)]
        return sorted(rows, key=lambda row: -row.prompt_len)

    def _row(self, place: int) -> RowState:
        if place not in self._begun:
            self._begun[place] = self._make(place)
        return self._begun[place]

    def _places(self, batch: int) -> Iterator[int]:
        """Takes from the batch's own queue, and then from that of others, the longest first."""
        own = self._queues[batch]
        while own:
            yield own.popleft()
        for queue in sorted(self._queues, key=len, reverse=True):
            while (place := self._fitting(batch, queue)) is not None:
                queue.remove(place)
                yield place

    def _fitting(self, batch: int, queue: Sequence[int]) -> int | None:
        return next((place for place in islice(queue, LOOKED_AT) if self._fits(batch, self._needs[place])), None)

    def _fits(self, batch: int, need: Need) -> bool:
        if need not in self._slots:
            self._slots[need] = self._policy.alone(need).capacity
        return self._slots[need] <= self._capacity[batch] and need.prompt_len <= self._seats[batch].longest_prompt
