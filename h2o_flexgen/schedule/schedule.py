"""The schedule as data: an order of visits, and generators of Task(op, step, layer, batch, needs).

Visits are numbered in compute order, so "the next" is always `+ 1` and no wrap-around has to be treated. Data that does not
live where it is computed with passes through rings of *buffers* (visit number modulo their count), and a buffer is used again
only after a *declared* need.

Four readers share these objects: `check` proves them sound, `simulate` prices them, the executor runs them, the trace draws
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from h2o_flexgen.schedule.ops import MOVED, Data, Op
from h2o_flexgen.schedule.task import Key, Task, Visit
from h2o_flexgen.schedule.traffic import Traffic


class Touch(NamedTuple):
    """A task works in this buffer of this ring, on behalf of this user: a visit's number, or that of a pass over weights."""

    ring: str
    buffer: int
    user: int


@dataclass(frozen=True)
class Schedule(ABC):
    """An order of visits and the issue order of everything that serves them."""

    traffic: Traffic

    name = ""
    cuts_layers = False  # are a layer's weights fetched in slices, one per batch

    # -- numbering ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def visit(self, number: int) -> Visit: ...

    @abstractmethod
    def number(self, step: int, layer: int, batch: int) -> int: ...

    @abstractmethod
    def weight_number(self, step: int, layer: int, batch: int) -> int:
        """Number of the pass over a layer's weights that this visit belongs to."""

    @abstractmethod
    def weight_batch(self, batch: int) -> int:
        """The batch in whose name the weights that this batch uses are fetched."""

    @property
    def buffers(self) -> int:
        """Of KV and of hidden states."""
        return self.traffic.slots

    @property
    def weight_buffers(self) -> int:
        return self.traffic.slots

    @property
    def ahead(self) -> int:
        """Visits whose tasks may be issued before an earlier COMPUTE is over. Needs, not the issue order, should be what a
        transfer waits for; with one slot nothing is to overlap."""
        return self.traffic.slots - 1

    # -- tasks -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def tasks(self) -> Iterator[Task]: ...

    def begins_pass(self, batch: int) -> bool:
        """Do visits of this batch bring the weights, for themselves and for the batches that use them next?"""
        return self.weight_batch(batch) == batch

    def transfers(self, visit: Visit) -> tuple[Op, ...]:
        """What is moved for a visit; weights with the first visit that uses them."""
        return self.traffic.transfers(visit, self.begins_pass(visit.batch))

    def in_step(self, step: int) -> Iterator[Key]:
        """The COMPUTEs of a step and all their transfers, those of weights under the name of the first slice."""
        for layer in range(self.traffic.layers):
            for batch in range(self.traffic.batches):
                visit = Visit(step, layer, batch)
                yield Key(Op.COMPUTE, *visit)
                yield from (Key(op, *visit) for op in self.transfers(visit))

    @property
    def slices(self) -> int:
        return self.traffic.batches if self.cuts_layers else 1

    def parts(self, op: Op) -> int:
        """Tasks that do one transfer."""
        return self.slices if op.data is Data.WEIGHTS else 1

    def keys(self, op: Op, visit: Visit) -> tuple[Key, ...]:
        """The tasks of a transfer. Slices of weights are named after the batches."""
        if self.parts(op) == 1:
            return (Key(op, *visit),)
        return tuple(Key(op, visit.step, visit.layer, part) for part in range(self.parts(op)))

    # -- what is where -----------------------------------------------------------------------------------------------

    def buffer(self, visit: Visit) -> int:
        return self.number(*visit) % self.buffers

    def weight_buffer(self, visit: Visit) -> int:
        return self.weight_number(*visit) % self.weight_buffers

    def touches(self, task: Task | Key) -> list[Touch]:
        """The buffers that a task works in. A buffer has one user at a time: that is what `check` proves."""
        visit, touched = Visit(*task[1:4]), []
        for data in MOVED if task.op is Op.COMPUTE else (task.op.data,):
            number, count = (self.weight_number, self.weight_buffers) if data is Data.WEIGHTS else (self.number, self.buffers)
            rings = task.op.works_in(self.traffic.rings(data, visit.layer, visit.batch))
            touched += [Touch(ring, number(*visit) % count, number(*visit)) for ring in rings]
        return touched
