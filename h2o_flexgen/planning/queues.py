"""Queues: the rows of a running block that wait for a seat, and who of them joins when seats are free. Engine and prediction
ask the same queues, so that rows join in a run when it was foreseen."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from h2o_flexgen.core.seats import Need
from h2o_flexgen.planning.block_plan import BlockPlan

LOOKED_AT = 64  # rows at the head of another batch's queue among which one that fits is looked for
FREE_SHARE = 8  # newcomers wait until one seat in so many is free: their prompts are then read together
LEAST_FILLED = 0.75  # a prompt much shorter than the longest of a part begins a part of its own: pads are computed, too


class Queues:
    def __init__(self, planned: BlockPlan) -> None:
        self._policy = planned.plan.policy
        self._seats = [batch.seats for batch in planned.block.batches if batch.seats is not None]
        self._sizes = [batch.size for batch in planned.block.batches]
        self._capacity = [occupancy.capacity for occupancy in planned.occupancy]
        self._queues = [deque(seats.queue) for seats in self._seats]
        self._slots: dict[Need, int] = {}
        self.needs: Mapping[int, Need] = {place: need for seats in self._seats for place, need in zip(seats.queue, seats.needs)}

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[int]:
        """The places of all who wait."""
        return (place for queue in self._queues for place in queue)

    def take(self, batch: int, taken: int) -> list[int]:
        """Those who join a batch now, longest prompts first. Whoever waits does so until some seats are free, or all."""
        free = self._sizes[batch] - taken
        if taken and free * FREE_SHARE < self._sizes[batch] and free < len(self):
            return []
        return sorted(islice(self._places(batch), free), key=lambda place: -self.needs[place].prompt_len)

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
        return next((place for place in islice(queue, LOOKED_AT) if self._fits(batch, self.needs[place])), None)

    def _fits(self, batch: int, need: Need) -> bool:
        if need not in self._slots:
            self._slots[need] = self._policy.alone(need).capacity
        return self._slots[need] <= self._capacity[batch] and need.prompt_len <= self._seats[batch].longest_prompt


def read_together(lengths: Sequence[int], tokens: int) -> Iterator[slice]:
    """The parts in which the prompts of newcomers are read, the longest of whom stand first: as many tokens as a plan allows,
    pads included, but one whole prompt at least."""
    start = 0
    for place in range(1, len(lengths)):
        is_full = (place + 1 - start) * lengths[start] > tokens
        if is_full or lengths[place] < LEAST_FILLED * lengths[start]:
            yield slice(start, place)
            start = place
    if lengths:
        yield slice(start, len(lengths))
