"""The schedule as data: generators of Task(op, step, layer, batch, needs).

A *visit* is one COMPUTE: one layer on one batch at one step. Visits are numbered in compute order, so "the next" is always `+
1` and no wrap-around has to be treated. Data that does not live where it is computed with passes through *slots* (buffers
used in turn: visit number modulo their count), and a slot is used again only after a *declared* need.

Four readers share these objects: `check` proves them sound, `simulate` prices them, the executor runs them, the trace draws
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from h2o_flexgen.core.tiers import DEVICE, DISK, HOST


class Op(str, Enum):
    READ_W = "READ_W"  # a slice of a layer's weights, disk -> host
    LOAD_W = "LOAD_W"  # a slice of a layer's weights, host -> device
    READ_KV = "READ_KV"  # the KV of a visit, disk -> host
    LOAD_KV = "LOAD_KV"  # the KV of a visit, host -> device
    LOAD_H = "LOAD_H"  # the hidden state of a visit, from its home to where it is computed with
    COMPUTE = "COMPUTE"
    STORE_H = "STORE_H"  # the hidden state of a visit, to its home
    STORE_KV = "STORE_KV"  # what a visit changed of its KV, device -> host
    WRITE_KV = "WRITE_KV"  # what a visit changed of its KV, host -> disk

    def __str__(self) -> str:
        return self.value


COMPUTE_LANE = "compute"
LANES: Mapping[Op, str] = {
    Op.READ_W: "read",
    Op.READ_KV: "read",
    Op.LOAD_W: "load",
    Op.LOAD_KV: "load",
    Op.LOAD_H: "load",
    Op.COMPUTE: COMPUTE_LANE,
    Op.STORE_H: "store",
    Op.STORE_KV: "store",
    Op.WRITE_KV: "write",
}


# The tail of one disk read leaves readers idle that the next can use. In all other lanes one task ends before the next begins.
WORKERS: Mapping[str, int] = {**dict.fromkeys(LANES.values(), 1), "read": 2}


class Key(NamedTuple):
    """What names a task. For READ_W and LOAD_W `batch` is the slice when the schedule cuts layers, else the visit's batch."""

    op: Op
    step: int
    layer: int
    batch: int

    def __str__(self) -> str:
        return f"{self.op} {self.step}.{self.layer}.{self.batch}"


class Task(NamedTuple):
    op: Op
    step: int
    layer: int
    batch: int
    needs: tuple[Key, ...] = ()

    @property
    def key(self) -> Key:
        return Key(*self[:4])

    @property
    def visit(self) -> Visit:
        """That it belongs to."""
        return Visit(self.step, self.layer, self.batch)

    @property
    def lane(self) -> str:
        return LANES[self.op]

    def is_compute_of(self, layer: int) -> bool:
        return self.op is Op.COMPUTE and self.layer == layer

    def __str__(self) -> str:
        return str(self.key)


@dataclass(frozen=True)
class Traffic:
    """What a plan moves in one block: all that a schedule must know of it."""

    steps: int
    layers: int
    batches: int
    slots: int = 2
    accelerator: bool = False  # is there a device whose memory is not the host's
    weights_on_disk: frozenset[int] = frozenset()  # layers that have some
    weights_on_host: frozenset[int] = frozenset()
    kv: Mapping[tuple[int, int], str] = field(default_factory=dict)  # (layer, batch) -> tier, for layers that have KV
    hidden: tuple[str, ...] = ()  # tier of each batch's activations
    kv_before: bool = False  # is there KV of an earlier block before the first step
    kv_after: bool = False  # is it wanted when the last step is over
    attends_on_host: bool = False  # KV in host memory is attended there, and not fetched to the accelerator

    def __post_init__(self) -> None:
        if min(self.steps, self.layers, self.batches, self.slots) < 1:
            raise ValueError("steps, layers, batches and slots must be 1 or more")

    @property
    def visits(self) -> int:
        return self.steps * self.layers * self.batches

    def reads_weights(self, layer: int) -> bool:
        return layer in self.weights_on_disk

    def loads_weights(self, layer: int) -> bool:
        return self.accelerator and (layer in self.weights_on_disk or layer in self.weights_on_host)

    @property
    def links_kv(self) -> bool:
        """Does KV that is not on the accelerator cross the link to be computed with?"""
        return self.accelerator and not self.attends_on_host

    def moves_kv(self, layer: int, batch: int) -> bool:
        tier = self.kv.get((layer, batch), DEVICE)
        return tier == DISK or (self.links_kv and tier == HOST)

    def fetches_kv(self, visit: Visit) -> bool:
        """Does it have to be brought to where the visit computes?"""
        return self.moves_kv(visit.layer, visit.batch) and (visit.step > 0 or self.kv_before)

    def stores_kv(self, visit: Visit) -> bool:
        """Does it have to be brought home? Nobody reads that of the last step, unless it lives on."""
        return self.moves_kv(visit.layer, visit.batch) and (visit.step < self.steps - 1 or self.kv_after)

    def kv_on_disk(self, layer: int, batch: int) -> bool:
        return self.kv.get((layer, batch)) == DISK

    def moves_hidden(self, batch: int) -> bool:
        return bool(self.hidden) and (self.hidden[batch] == DISK or (self.accelerator and self.hidden[batch] == HOST))


class Visit(NamedTuple):
    step: int
    layer: int
    batch: int


class Touch(NamedTuple):
    """A task works in this slot of this ring of buffers, on behalf of this user (a visit's number)."""

    ring: str
    slot: int
    user: int


@dataclass(frozen=True)
class Schedule(ABC):
    """An order of visits and the issue order of everything that serves them. Subclasses say `visits` and `tasks`."""

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
    def slices(self) -> int:
        return self.traffic.batches if self.cuts_layers else 1

    @property
    def slots(self) -> int:
        """Of KV and of hidden states."""
        return self.traffic.slots

    @property
    def weight_slots(self) -> int:
        return self.traffic.slots

    @property
    def ahead(self) -> int:
        """Visits whose tasks may be issued before an earlier COMPUTE is over. Needs, not the issue order, should be what a
        transfer waits for; with one slot nothing is to overlap."""
        return self.traffic.slots - 1

    # -- what is where -----------------------------------------------------------------------------------------------

    def slot(self, visit: Visit) -> int:
        return self.number(*visit) % self.slots

    def weight_slot(self, visit: Visit) -> int:
        return self.weight_number(*visit) % self.weight_slots

    def touches(self, task: Task | Key) -> list[Touch]:
        """The slots that a task works in. A slot has one user at a time: that is what `check` proves."""
        traffic, op, step, layer, batch = self.traffic, task.op, task.step, task.layer, task.batch
        if op in (Op.READ_W, Op.LOAD_W) or op is Op.COMPUTE:
            user = self.weight_number(step, layer, batch)
            host = Touch("weights.host", user % self.weight_slots, user)
            device = Touch("weights.device", user % self.weight_slots, user)
            in_host, on_device = traffic.reads_weights(layer), traffic.loads_weights(layer)
            if op is Op.READ_W:
                return [host]
            if op is Op.LOAD_W:
                return [device] + ([host] if in_host else [])
            touched = [device] if on_device else [host] if in_host else []
            user = self.number(step, layer, batch)
            if traffic.moves_kv(layer, batch):
                touched.append(Touch("kv.device" if traffic.links_kv else "kv.host", user % self.slots, user))
            if traffic.moves_hidden(batch):
                touched.append(Touch("hidden", user % self.slots, user))
            return touched
        user = self.number(step, layer, batch)
        slot = user % self.slots
        if op in (Op.LOAD_H, Op.STORE_H):
            return [Touch("hidden", slot, user)]
        touched = []
        if op in (Op.LOAD_KV, Op.STORE_KV):
            touched.append(Touch("kv.device", slot, user))
        if traffic.kv_on_disk(layer, batch):
            touched.append(Touch("kv.host", slot, user))
        return touched

    @abstractmethod
    def tasks(self) -> Iterator[Task]: ...


class _Issuer:
    """Makes the tasks of one run of a schedule and remembers, per slot, which tasks must be over before it is used again."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.traffic = schedule.traffic
        self.freed_by: dict[tuple[str, int], tuple[Key, ...]] = {}

    def weights_read(self, step: int, layer: int, batch: int) -> Iterator[Task]:
        if self.traffic.reads_weights(layer):
            slot = self.schedule.weight_slot(Visit(step, layer, batch))
            yield Task(Op.READ_W, step, layer, batch, self._freed("weights.host", slot))

    def weights_loaded(self, step: int, layer: int, batch: int) -> Iterator[Task]:
        if not self.traffic.loads_weights(layer):
            return
        slot = self.schedule.weight_slot(Visit(step, layer, batch))
        needs = self._freed("weights.device", slot)
        if self.traffic.reads_weights(layer):
            needs += (Key(Op.READ_W, step, layer, batch),)
            self.freed_by["weights.host", slot] = self._slices(Op.LOAD_W, step, layer, batch)
        yield Task(Op.LOAD_W, step, layer, batch, needs)

    def kv_fetched(self, visit: Visit) -> Iterator[Task]:
        step, layer, batch = visit
        if not self.traffic.fetches_kv(visit):
            return
        slot, on_disk = self.schedule.slot(visit), self.traffic.kv_on_disk(layer, batch)
        came = (Key(Op.WRITE_KV if on_disk else Op.STORE_KV, step - 1, layer, batch),) if step else ()
        if on_disk:
            yield Task(Op.READ_KV, *visit, self._freed("kv.host", slot) + came)
            came = (Key(Op.READ_KV, *visit),)
        if self.traffic.links_kv:
            yield Task(Op.LOAD_KV, *visit, self._freed("kv.device", slot) + came)

    def first_kv_fetched(self, count: int) -> Iterator[Task]:
        """For the first visits, whose KV is of an earlier block."""
        for number in range(min(count, self.traffic.visits)):
            yield from self.kv_fetched(self.schedule.visit(number))

    def hidden_fetched(self, visit: Visit) -> Iterator[Task]:
        step, layer, batch = visit
        if layer > 0 and self.traffic.moves_hidden(batch):
            stored = (Key(Op.STORE_H, step, layer - 1, batch),)
            yield Task(Op.LOAD_H, *visit, self._freed("hidden", self.schedule.slot(visit)) + stored)

    def computed(self, visit: Visit) -> Iterator[Task]:
        _, layer, batch = visit
        needs = self._previous(visit) + self._weights_needed(visit)
        if self.traffic.fetches_kv(visit):
            needs += (Key(Op.LOAD_KV if self.traffic.links_kv else Op.READ_KV, *visit),)
        elif self.traffic.moves_kv(layer, batch):
            needs += self._freed("kv.device" if self.traffic.links_kv else "kv.host", self.schedule.slot(visit))
        if self.traffic.moves_hidden(batch):
            needs += (Key(Op.LOAD_H, *visit),) if layer else self._freed("hidden", self.schedule.slot(visit))
        yield Task(Op.COMPUTE, *visit, needs)
        self._free_after_compute(visit)

    def stored(self, visit: Visit) -> Iterator[Task]:
        _, layer, batch = visit
        ready = (Key(Op.COMPUTE, *visit),)
        if self.traffic.moves_hidden(batch) and layer < self.traffic.layers - 1:
            yield Task(Op.STORE_H, *visit, ready)
        if not self.traffic.stores_kv(visit):
            return
        slot, on_disk = self.schedule.slot(visit), self.traffic.kv_on_disk(layer, batch)
        if self.traffic.links_kv:
            free = self._freed("kv.host", slot) if on_disk and not self.traffic.fetches_kv(visit) else ()
            yield Task(Op.STORE_KV, *visit, ready + free)
            ready = (Key(Op.STORE_KV, *visit),)
        if on_disk:
            self.freed_by["kv.host", slot] = (Key(Op.WRITE_KV, *visit),)
            yield Task(Op.WRITE_KV, *visit, ready)

    # -- needs -------------------------------------------------------------------------------------------------------

    def _freed(self, ring: str, slot: int) -> tuple[Key, ...]:
        return self.freed_by.get((ring, slot), ())

    def _slices(self, op: Op, step: int, layer: int, batch: int) -> tuple[Key, ...]:
        """All the tasks that bring the weights which this visit uses."""
        if self.schedule.cuts_layers:
            return tuple(Key(op, step, layer, part) for part in range(self.schedule.slices))
        return (Key(op, step, layer, self.schedule.weight_batch(batch)),)

    def _previous(self, visit: Visit) -> tuple[Key, ...]:
        step, layer, batch = visit
        if layer > 0:
            return (Key(Op.COMPUTE, step, layer - 1, batch),)
        return (Key(Op.COMPUTE, step - 1, self.traffic.layers - 1, batch),) if step else ()

    def _weights_needed(self, visit: Visit) -> tuple[Key, ...]:
        if self.schedule.weight_batch(visit.batch) != visit.batch:
            return ()  # the first batch of the layer has waited for them already
        if self.traffic.loads_weights(visit.layer):
            return self._slices(Op.LOAD_W, *visit)
        return self._slices(Op.READ_W, *visit) if self.traffic.reads_weights(visit.layer) else ()

    def _free_after_compute(self, visit: Visit) -> None:
        """Whatever this COMPUTE was the last to use is free after it, or after the tasks that carry its results away."""
        _, layer, batch = visit
        key, slot, traffic = (Key(Op.COMPUTE, *visit),), self.schedule.slot(visit), self.traffic
        if traffic.loads_weights(layer):
            self.freed_by["weights.device", self.schedule.weight_slot(visit)] = key
        elif traffic.reads_weights(layer):
            self.freed_by["weights.host", self.schedule.weight_slot(visit)] = key
        if traffic.moves_kv(layer, batch):
            stored = traffic.stores_kv(visit)
            if traffic.links_kv:
                self.freed_by["kv.device", slot] = (Key(Op.STORE_KV, *visit),) if stored else key
                if traffic.fetches_kv(visit) and not stored and traffic.kv_on_disk(layer, batch):
                    self.freed_by["kv.host", slot] = (Key(Op.LOAD_KV, *visit),)
            else:
                self.freed_by["kv.host", slot] = (Key(Op.WRITE_KV, *visit),) if stored else key
        if traffic.moves_hidden(batch):
            self.freed_by["hidden", slot] = key if layer == traffic.layers - 1 else (Key(Op.STORE_H, *visit),)


class _BlockOrder(Schedule):
    """step, then layer, then batch: all batches of a block use a layer's weights before the next layer comes."""

    def visit(self, number: int) -> Visit:
        rest, batch = divmod(number, self.traffic.batches)
        return Visit(*divmod(rest, self.traffic.layers), batch)

    def number(self, step: int, layer: int, batch: int) -> int:
        return (step * self.traffic.layers + layer) * self.traffic.batches + batch

    def weight_number(self, step: int, layer: int, batch: int) -> int:
        return step * self.traffic.layers + layer

    def weight_batch(self, batch: int) -> int:
        return 0

    def weight_pass(self, number: int) -> tuple[int, int] | None:
        """Step and layer of a pass over weights, or None behind the last."""
        step, layer = divmod(number, self.traffic.layers)
        return (step, layer) if step < self.traffic.steps else None


@dataclass(frozen=True)
class Zigzag(_BlockOrder):
    """The block schedule: while a layer's batches compute, the weights of a later layer arrive slice by slice."""

    name = "zigzag"
    cuts_layers = True

    @property
    def slots(self) -> int:
        """With overlap one more than for weights: what was computed is still being stored while the next is fetched."""
        return self.traffic.slots + 1 if self.traffic.slots > 1 else 1

    @property
    def ahead(self) -> int:
        """A whole layer: or a short fetch behind a long compute would be issued too late to keep its lane busy."""
        return self.load_ahead * self.traffic.batches

    @property
    def load_ahead(self) -> int:
        """Layers between the one whose weights are loaded and the one that is computed."""
        return self.traffic.slots - 1

    @property
    def read_ahead(self) -> int:
        """With an accelerator the disk runs one layer before the link, so that no load waits for a read issued with it."""
        return self.load_ahead + (1 if self.traffic.accelerator and self.load_ahead else 0)

    def tasks(self) -> Iterator[Task]:
        traffic, issue = self.traffic, _Issuer(self)
        kv_ahead = (
            min(traffic.slots, traffic.layers * traffic.batches) - 1
        )  # any further and a fetch would overtake its own store
        hidden_ahead = min(traffic.slots, traffic.batches) - 1
        every = tuple(range(traffic.batches))

        for at in range(self.read_ahead):
            yield from self._fetch(issue.weights_read, at, every)
            if at < self.load_ahead:
                yield from self._fetch(issue.weights_loaded, at, every)
        yield from issue.first_kv_fetched(kv_ahead)
        for number in range(traffic.visits):
            visit = self.visit(number)
            at = self.weight_number(*visit)
            # with one slot nothing is fetched beside a compute: all slices come before the layer starts
            slices = (visit.batch,) if self.load_ahead else every if visit.batch == 0 else ()
            yield from self._fetch(issue.weights_read, at + self.read_ahead, slices)
            yield from self._fetch(issue.weights_loaded, at + self.load_ahead, slices)
            if number + kv_ahead < traffic.visits:
                yield from issue.kv_fetched(self.visit(number + kv_ahead))
            if number + hidden_ahead < traffic.visits:
                yield from issue.hidden_fetched(self.visit(number + hidden_ahead))
            yield from issue.computed(visit)
            yield from issue.stored(visit)

    def _fetch(self, fetch: Callable[[int, int, int], Iterator[Task]], at: int, slices: tuple[int, ...]) -> Iterator[Task]:
        if weights := self.weight_pass(at):
            for part in slices:
                yield from fetch(*weights, part)


@dataclass(frozen=True)
class FlexGenBarrier(_BlockOrder):
    """The original's block loop: a whole layer's weights come with the first batch of the layer before, and a barrier after
    every visit makes the next one wait for all that was under way. Hidden states are copied in the stream of the computation,
    in front of it. So a compute beside which weights are loaded begins only behind them: the link is held by their copy."""

    name = "flexgen_barrier"

    @property
    def slots(self) -> int:
        return 3  # one being fetched, one computed with, one stored: the original has a buffer for each

    @property
    def weight_slots(self) -> int:
        return 2

    def tasks(self) -> Iterator[Task]:
        issue = _Issuer(self)
        before = [*self._weights(issue, 0), *issue.first_kv_fetched(self._kv_ahead)]
        yield from before
        for number in range(self.traffic.visits):
            barrier = tuple(task.key for task in before)
            before = list(self._iteration(issue, number))
            for task in before:
                yield task._replace(needs=tuple(dict.fromkeys(task.needs + barrier)))
        yield from issue.stored(self.visit(self.traffic.visits - 1))

    def _iteration(self, issue: _Issuer, number: int) -> Iterator[Task]:
        visit, beside = self.visit(number), list(self._beside(issue, number))
        yield from beside
        copied_before = tuple(task.key for task in beside if task.op in (Op.LOAD_H, Op.STORE_H))
        for task in issue.computed(visit):
            yield task._replace(needs=task.needs + copied_before)

    def _beside(self, issue: _Issuer, number: int) -> Iterator[Task]:
        traffic, visit = self.traffic, self.visit(number)
        if number > 0:
            yield from issue.stored(self.visit(number - 1))
        if visit.batch == 0:
            yield from self._weights(issue, self.weight_number(*visit) + 1)
        kv, hidden = number + self._kv_ahead, number + min(1, traffic.batches - 1)
        if kv < traffic.visits:
            yield from issue.kv_fetched(self.visit(kv))
        if hidden < traffic.visits:
            yield from issue.hidden_fetched(self.visit(hidden))

    @property
    def _kv_ahead(self) -> int:
        return min(1, self.traffic.layers * self.traffic.batches - 1)

    def _weights(self, issue: _Issuer, at: int) -> Iterator[Task]:
        if weights := self.weight_pass(at):
            yield from issue.weights_read(*weights, 0)
            yield from issue.weights_loaded(*weights, 0)


@dataclass(frozen=True)
class RowByRow(Schedule):
    """batch, then step, then layer: every batch is generated to its end before the next one starts, and each reads all the
    weights anew. With two slots the next layer is fetched meanwhile (ZeRO-Inference), with one it is not (Accelerate)."""

    name = "row_by_row"

    def visit(self, number: int) -> Visit:
        rest, layer = divmod(number, self.traffic.layers)
        batch, step = divmod(rest, self.traffic.steps)
        return Visit(step, layer, batch)

    def number(self, step: int, layer: int, batch: int) -> int:
        return (batch * self.traffic.steps + step) * self.traffic.layers + layer

    def weight_number(self, step: int, layer: int, batch: int) -> int:
        return self.number(step, layer, batch)

    def weight_batch(self, batch: int) -> int:
        return batch

    def tasks(self) -> Iterator[Task]:
        traffic, issue = self.traffic, _Issuer(self)
        ahead = traffic.slots - 1
        kv_ahead = min(ahead, traffic.layers - 1)
        for number in range(min(ahead, traffic.visits)):
            yield from self._weights(issue, number)
        yield from issue.first_kv_fetched(kv_ahead)
        for number in range(traffic.visits):
            visit = self.visit(number)
            if number + ahead < traffic.visits:
                yield from self._weights(issue, number + ahead)
            if number + kv_ahead < traffic.visits:
                yield from issue.kv_fetched(self.visit(number + kv_ahead))
            yield from issue.hidden_fetched(visit)
            yield from issue.computed(visit)
            yield from issue.stored(visit)

    def _weights(self, issue: _Issuer, number: int) -> Iterator[Task]:
        yield from issue.weights_read(*self.visit(number))
        yield from issue.weights_loaded(*self.visit(number))


SCHEDULES: Mapping[str, type[Schedule]] = {schedule.name: schedule for schedule in (Zigzag, FlexGenBarrier, RowByRow)}
