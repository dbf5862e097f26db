"""Waiting: the rows of a job that have no seat yet, queue by queue. A row is made when its turn comes, and is forgotten when it
has ended, so that a job may be longer than memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from h2o_flexgen.core.prefixes import SharedPrefix
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

    def need(self, row: RowState) -> Need:
        return self._needs[row.row]

    def take(self, batch: int, taken: int, seats: int, shared: Iterable[SharedPrefix | None] = ()) -> list[RowState]:
        """The rows that join a batch now, longest prompts first. Whoever waits does so until some seats are free, or all, and
        until there is room for the prefix that the row shares with others; `shared`: the prefixes of those who have a seat."""
        free = seats - taken
        if taken and free * FREE_SHARE < seats and free < len(self):
            return []
        held = _Held.of(shared, self._seats[batch].prefixes.of_batch)
        rows = [self._row(place) for place in islice(self._places(batch, held), free)]
        return sorted(rows, key=lambda row: -self.need(row).read)

    def _row(self, place: int) -> RowState:
        if place not in self._begun:
            self._begun[place] = self._make(place)
        return self._begun[place]

    def _places(self, batch: int, held: _Held) -> Iterator[int]:
        """Takes from the batch's own queue, and then from that of others, the longest first."""
        own = self._queues[batch]
        for queue in (own, *sorted(self._queues, key=len, reverse=True)):
            while (place := self._fitting(batch, queue, held)) is not None:
                queue.remove(place)
                held.add(self._needs[place].prefix)
                yield place

    def _fitting(self, batch: int, queue: Sequence[int], held: _Held) -> int | None:
        """The first row that fits, of those at the head of a queue."""
        return next((place for place in islice(queue, LOOKED_AT) if self._fits(batch, self._needs[place], held)), None)

    def _fits(self, batch: int, need: Need, held: _Held) -> bool:
        slots = self._slots.get(need.alone)
        if slots is None:
            slots = self._slots[need.alone] = self._policy.alone(need).capacity
        seats = self._seats[batch]
        return slots <= self._capacity[batch] and need.read <= seats.longest_prompt and held.has_room_for(need.prefix)


@dataclass
class _Held:
    """The prefixes that the rows of a batch share, and the room for them."""

    room: int  # in tokens
    prefixes: set[SharedPrefix] = field(default_factory=set)

    @classmethod
    def of(cls, prefixes: Iterable[SharedPrefix | None], room: int) -> _Held:
        held = cls(room)
        for prefix in prefixes:
            held.add(prefix)
        return held

    def add(self, prefix: SharedPrefix | None) -> None:
        if prefix is not None and prefix not in self.prefixes:
            self.prefixes.add(prefix)
            self.room -= prefix.room

    def has_room_for(self, prefix: SharedPrefix | None) -> bool:
        return prefix is None or prefix in self.prefixes or prefix.room <= self.room
