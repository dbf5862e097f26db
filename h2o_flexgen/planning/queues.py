"""Queues: the rows of a running block that wait for a seat, and which of them join when seats are free. Engine and prediction
use the same queues, so that rows join in a run exactly when the prediction said."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from h2o_flexgen.core.prefix_groups import SharedPrefix
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.planning.block_plan import BlockPlan

LOOKED_AT = 64  # rows at the head of another batch's queue among which one that fits is looked for
FREE_SHARE = 8  # new rows wait until one seat in so many is free: their prompts are then read together
LEAST_FILLED = 0.75  # a prompt much shorter than the longest of a part begins a part of its own: pads are computed, too


class Queues:
    def __init__(self, planned: BlockPlan) -> None:
        self._policies = [level.policy for level in planned.levels]
        self._seats = [batch.seats for batch in planned.block.batches if batch.seats is not None]
        self._sizes = [batch.size for batch in planned.block.batches]
        self._capacity = [*zip(*([one.capacity for one in level] for level in planned.kv.occupancies))]  # of each level
        self._queues = [deque(seats.queue) for seats in self._seats]
        self._slots: dict[SeatNeed, tuple[int, ...]] = {}  # at each level
        self.needs: dict[int, SeatNeed] = {
            place: need for seats in self._seats for place, need in zip(seats.queue, seats.needs)
        }

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[int]:
        """The places of all rows that wait."""
        return (place for queue in self._queues for place in queue)

    def take(self, batch: int, taken: int, seated: Iterable[SharedPrefix | None] = ()) -> list[int]:
        """Rows that join a batch now, longest prompts first; `taken` is its number of rows with a seat, and `seated` has their
        prefixes. A row waits until some seats are free, or all, and until there is room for the prefix that it shares."""
        free = self._sizes[batch] - taken
        if not free:
            return []
        if taken and free * FREE_SHARE < self._sizes[batch] and free < len(self):
            return []
        held = _Held.of(seated, self._seats[batch].prefixes.of_batch)
        return sorted(islice(self._places(batch, held), free), key=lambda place: -self.needs[place].read)

    def _places(self, batch: int, held: _Held) -> Iterator[int]:
        """Takes from the batch's own queue, and then from that of others, the longest first."""
        own = self._queues[batch]
        for queue in (own, *sorted(self._queues, key=len, reverse=True)):
            while (place := self._fitting(batch, queue, held)) is not None:
                queue.remove(place)
                held.add(self.needs[place].prefix)
                yield place

    def _fitting(self, batch: int, queue: Sequence[int], held: _Held) -> int | None:
        """The first row that fits, of those at the head of a queue."""
        return next((place for place in islice(queue, LOOKED_AT) if self._fits(batch, self.needs[place], held)), None)

    def _fits(self, batch: int, need: SeatNeed, held: _Held) -> bool:
        slots = self._slots.get(need.alone)
        if slots is None:
            slots = self._slots[need.alone] = tuple(policy.alone(need).capacity for policy in self._policies)
        seats = self._seats[batch]
        has_slots = all(one <= room for one, room in zip(slots, self._capacity[batch]))
        return has_slots and need.read <= seats.longest_prompt and held.has_room_for(need.prefix)


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


def read_together(lengths: Sequence[int], tokens: int, echoes: bool = False) -> Iterator[slice]:
    """The parts in which the prompts of new rows are read, which come longest first: as many tokens as a plan allows,
    with pads and echoes, but at least one whole prompt."""
    start, readings = 0, 2 if echoes else 1
    for place in range(1, len(lengths)):
        is_full = readings * (place + 1 - start) * lengths[start] > tokens
        if is_full or lengths[place] < LEAST_FILLED * lengths[start]:
            yield slice(start, place)
            start = place
    if lengths:
        yield slice(start, len(lengths))
