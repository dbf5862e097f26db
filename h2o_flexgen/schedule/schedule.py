"""The schedule as data: an order of visits, and generators of Task(op, step, layer, batch, needs).

Visits are numbered in compute order, so "the next" is always `+ 1` and no wrap-around has to be treated. Data that does not
live where it is computed with passes through rings of *buffers* (the number of the visit, or of the user, modulo their count),
and a buffer is used again only after a *declared* need.

Four readers share these objects: `check` proves them sound, `simulate` prices them, the executor runs them, the trace draws
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from h2o_flexgen.schedule.ops import MOVED, OF_ROWS, Data, Key, Op, Task, Visit
from h2o_flexgen.schedule.traffic import Traffic


class Touch(NamedTuple):
    """A task's use of one buffer of a ring, on behalf of a user: the number of a visit, or of a pass over weights."""

    ring: str
    buffer: int
    user: int


@dataclass(frozen=True)
class Schedule(ABC):
    """An order of visits and the issue order of everything that serves them."""

    traffic: Traffic

    name = ""
    cuts_layers = False  # True if a layer's weights are fetched in slices, one per batch
    keeps_step = True  # whether all batches do one step before any does the next

    # -- numbering ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def visit(self, number: int) -> Visit: ...

    @abstractmethod
    def number(self, step: int, layer: int, batch: int) -> int: ...

    @abstractmethod
    def weight_number(self, step: int, layer: int, batch: int) -> int:
        """The number of the pass over a layer's weights to which this visit belongs."""

    @abstractmethod
    def weight_batch(self, batch: int) -> int:
        """The batch for which the weights that this batch uses are fetched."""

    @property
    def buffers(self) -> int:
        """Buffers for what moves in every visit."""
        return self.traffic.buffers

    @property
    def weight_buffers(self) -> int:
        return self.traffic.buffers

    @property
    def ahead(self) -> int:
        """Visits that may have tasks issued before an earlier COMPUTE is over: a transfer should wait for its needs, not for
        the issue order. With one buffer nothing overlaps."""
        return self.traffic.buffers - 1

    # -- tasks -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def tasks(self) -> Iterator[Task]: ...

    def begins_pass(self, batch: int) -> bool:
        """True if visits of this batch bring the weights, for themselves and for the next batches that use them."""
        return self.weight_batch(batch) == batch

    def transfers(self, visit: Visit) -> tuple[Op, ...]:
        """The transfers of a visit; weights come with the first visit that uses them."""
        return self.traffic.transfers(visit, self.begins_pass(visit.batch))

    def in_step(self, step: int) -> Iterator[Key]:
        """The COMPUTEs of a step and all their transfers, those of weights under the name of the first slice."""
        for layer in range(self.traffic.layers):
            for batch in range(self.traffic.batches):
                yield from self.of_visit(Visit(step, layer, batch))

    def of_visit(self, visit: Visit) -> Iterator[Key]:
        """The COMPUTE of a visit and all its transfers."""
        yield Key(Op.COMPUTE, *visit)
        yield from (Key(op, *visit) for op in self.transfers(visit))

    @property
    def slices(self) -> int:
        return self.traffic.batches if self.cuts_layers else 1

    def parts(self, op: Op) -> int:
        """The number of tasks that do one transfer."""
        return self.slices if op.data is Data.WEIGHTS else 1

    def keys(self, op: Op, visit: Visit) -> tuple[Key, ...]:
        """The tasks of a transfer. Slices of weights are named after the batches."""
        if self.parts(op) == 1:
            return (Key(op, *visit),)
        return tuple(Key(op, visit.step, visit.layer, part) for part in range(self.parts(op)))

    # -- what is where -----------------------------------------------------------------------------------------------

    def buffers_of(self, data: Data) -> int:
        """Buffers of each ring of a kind of data."""
        return self.weight_buffers if data is Data.WEIGHTS else self.buffers

    def buffer_of(self, data: Data, visit: Visit) -> int:
        """The buffer through which data of a visit passes, in each of its rings."""
        return self.weight_buffer(visit) if data is Data.WEIGHTS else self.number(*visit) % self.buffers

    def weight_buffer(self, visit: Visit) -> int:
        return self.weight_number(*visit) % self.weight_buffers

    def ways(self, *moved: Data, batches: int = 1) -> int:
        """The number of ways in which the buffers of these kinds of data meet in a layer, and in those of weights of the first
        batches. A layer meets all buffers of a ring only where their number and that of its users in a step have no common
        divisor."""
        first = {data: next(self.traffic.moved_places(data)) for data in moved if data in OF_ROWS}
        steps = range(min(self.traffic.steps, prod(map(self.buffers_of, moved))))
        visits = (Visit(step, 0, batch) for step in steps for batch in range(min(batches, self.traffic.batches)))

        def met(data: Data, visit: Visit) -> int:
            return self.buffer_of(data, Visit(visit.step, *first[data]) if data in first else visit)

        return len({tuple(met(data, visit) for data in moved) for visit in visits})

    def touches(self, task: Task | Key) -> list[Touch]:
        """The buffers that a task works in. A buffer has one user at a time: that is what `check` proves."""
        visit, touched = Visit(*task[1:4]), []
        computes = task.op is Op.COMPUTE or task.op.chooses
        for data in MOVED if computes else (task.op.data,):
            if task.op.chooses and data is Data.HIDDEN and not visit.layer:
                continue  # no states come to it, and it makes none
            number = self.weight_number if data is Data.WEIGHTS else self.number
            rings = self.traffic.rings(data, visit)
            own = self.traffic.computed_in(data, visit) if computes else task.op.works_in(rings)
            touched += [Touch(self._own(ring, visit.layer), self.buffer_of(data, visit), number(*visit)) for ring in own]
        return touched + list(self._places_of_passing(task.op, visit))

    def _own(self, ring: str, layer: int) -> str:
        """The name of a ring of a layer's device."""
        lanes = self.traffic.lanes
        return ring if lanes.devices == 1 else f"{ring} {lanes.device(layer)}"

    def _places_of_passing(self, op: Op, visit: Visit) -> Iterator[Touch]:
        """The places of hidden states that go from device to device, one of each batch on either: where they are put, and where
        they are found."""
        step, layer, batch = visit
        if op in (Op.COMPUTE, Op.PASS_H) and self.traffic.passes_on(layer, batch):
            yield Touch(self._own("hidden.left", layer), batch, step)
        if op is Op.PASS_H:
            yield Touch(self._own("hidden.found", layer + 1), batch, step)
        elif op is Op.COMPUTE and layer > 0 and self.traffic.passes_on(layer - 1, batch):
            yield Touch(self._own("hidden.found", layer), batch, step)


class RingUsers(NamedTuple):
    """The visits of a step that may use a ring, where not all do."""

    numbers: Mapping[tuple[int, int], int]  # of their layers and batches, in the order of visits
    buffers: int

    def buffer(self, visit: Visit) -> int:
        return (visit.step * len(self.numbers) + self.numbers[visit.layer, visit.batch]) % self.buffers


@dataclass(frozen=True)
class BlockOrder(Schedule):
    @property
    @abstractmethod
    def rows_ahead(self) -> int:
        """Visits between the one for which KV and states are fetched and the one that is computed."""

    def buffers_of(self, data: Data) -> int:
        return self._of_states.buffers if data is Data.STATE else super().buffers_of(data)

    def buffer_of(self, data: Data, visit: Visit) -> int:
        return self._of_states.buffer(visit) if data is Data.STATE else super().buffer_of(data, visit)

    @cached_property
    def _of_states(self) -> RingUsers:
        """Visits of layers without states take no buffer. There is one for each visit with states that can be fetched for and
        computed at once, and as many more as where all visits have some. What rests in memory counts as well, so that the
        number does not depend on shares."""
        traffic, window = self.traffic, self.rows_ahead + 1
        places = sorted(traffic.state)
        visits = [layer * traffic.batches + batch for layer, batch in places]
        again = [*visits, *(number + traffic.layers * traffic.batches for number in visits)]  # the next step follows
        at_once = max((bisect_left(again, number + window) - at for at, number in enumerate(visits)), default=window)
        return RingUsers({place: number for number, place in enumerate(places)}, at_once + self.buffers - window)

    def visit(self, number: int) -> Visit:
        rest, batch = divmod(number, self.traffic.batches)
        return Visit(*divmod(rest, self.traffic.layers), batch)

    def number(self, step: int, layer: int, batch: int) -> int:
        return (step * self.traffic.layers + layer) * self.traffic.batches + batch

    def weight_number(self, step: int, layer: int, batch: int) -> int:
        return step * self.traffic.layers + layer

    def weight_batch(self, batch: int) -> int:
        return 0
