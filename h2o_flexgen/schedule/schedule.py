"""The schedule as data: an order of visits, and generators of Task(op, step, layer, batch, needs); and the issuer, which makes
these tasks, with the tasks that each one needs, by chains.

Visits are numbered in compute order, so "the next" is always `+ 1` and no wrap-around has to be treated. Data that does not
live where it is computed with passes through rings of *buffers* (the number of the visit, or of the user, modulo their count),
and a buffer is used again only after a *declared* need.

Four readers share these objects: `check` proves them sound, `simulate` prices them, the executor runs them, the trace draws
them.

Data of one kind goes through a chain of tasks in every visit: the transfers that fetch it, the COMPUTE, and those that bring it
home. A task needs its source: the one before it in the chain, or the one that has brought the data home for it. The first of a
chain to work in a buffer also needs those that worked in it last for its former user.

KV that the host attends is fetched for its ATTEND, which comes after the COMPUTE that asks and before what is stored. The
COMPUTE itself waits for none of it.

Where a visit chooses what is fetched of its KV, it needs for that all that a COMPUTE needs, except this KV.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from math import prod
from typing import NamedTuple

from h2o_flexgen.schedule.ops import MOVED, OF_ROWS, Data, Key, Op, Task, Visit
from h2o_flexgen.schedule.traffic import Traffic


class Touch(NamedTuple):
    """A task's use of one buffer of a ring, on behalf of a user: the number of a visit, or of a pass over weights."""

    ring: str
    buffer: int
    user: int


class RingUsers(NamedTuple):
    """The visits that may use a ring of a device, where not all do."""

    places: tuple[int, ...]  # of these in a period of visits, which comes again and again
    period: int
    buffers: int

    @classmethod
    def of(cls, places: Collection[int], period: int, window: int, more: int, least: int = 1) -> RingUsers:
        """There is a buffer for each user among so many visits that follow each other, for `least` of them anyway, and as many
        `more`."""
        found = sorted(places)
        again = [*found, *(place + period for place in found)]
        at_once = max(bisect_left(again, place + window) - number for number, place in enumerate(found))
        return cls(tuple(found), period, max(at_once, least) + more)

    def before(self, visit: int) -> int:
        """The number of users before a visit."""
        periods, place = divmod(visit, self.period)
        return periods * len(self.places) + bisect_left(self.places, place)

    def buffer(self, visit: int) -> int:
        return self.before(visit) % self.buffers


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

    def own_number(self, visit: Visit) -> int:
        """The number of a visit among those of its device."""
        return self.number(*visit)

    @abstractmethod
    def own_period(self, device: int) -> int:
        """Visits of a device, after which the same layers come again in the same order."""

    @abstractmethod
    def rows_ahead(self, device: int = 0) -> int:
        """Visits of a device between the one for which KV and states are fetched and the one that is computed."""

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
    def chosen_at_once(self) -> int:
        """Visits that may have chosen what is fetched of their KV, and are not computed yet."""
        return 1

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

    def begins_layer(self, layer: int, batch: int) -> bool:
        """True if another layer was computed before: packed weights are decoded once for visits of a layer in a row. Choices of
        another layer that come between two visits are left out, on purpose: few plans decode weights for them again."""
        return self.begins_pass(batch)

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
        """Buffers of each ring of a kind of data; of several devices, of the one that has most."""
        if data is Data.WEIGHTS:
            return self.weight_buffers
        return max((users.buffers for (own, _), users in self._users.items() if own is data), default=self.buffers)

    def buffer_of(self, data: Data, visit: Visit) -> int:
        """The buffer through which data of a visit passes, in each of its rings."""
        if data is Data.WEIGHTS:
            return self.weight_buffer(visit)
        number, users = self.own_number(visit), self.users_of(data, self.traffic.lanes.device(visit.layer))
        return number % self.buffers if users is None else users.buffer(number)

    @cached_property
    def _users(self) -> Mapping[tuple[Data, int], RingUsers]:
        """The visits that have KV, and those that have states, on each device: others take no buffer for them. It is so in
        models with states, and where KV is chosen elsewhere. What rests counts as well, so that the number of buffers does not
        depend on shares."""
        traffic, lanes, found = self.traffic, self.traffic.lanes, defaultdict[tuple[Data, int], set[int]](set)
        homes = {Data.KV: traffic.kv, Data.STATE: traffic.state} if traffic.state or traffic.reads_chosen else {}
        for data, places in homes.items():
            for layer, batch in places:
                device = lanes.device(layer)
                found[data, device].add(self.own_number(Visit(0, layer, batch)) % self.own_period(device))
        for data, device in found:
            if not traffic.reads_chosen and (Data.STATE, device) not in found:
                found[data, device] = set(range(self.own_period(device)))
        return {(data, device): self._among(data, device, own) for (data, device), own in found.items()}

    def _among(self, data: Data, device: int, places: Collection[int]) -> RingUsers:
        """The users that can be fetched for and computed at once have a buffer each. There are as many more as where all
        visits are users."""
        window, least = self.rows_ahead(device) + 1, self.chosen_at_once if data is Data.KV else 1
        return RingUsers.of(places, self.own_period(device), window, self.buffers - window, least)

    def users_of(self, data: Data, device: int = 0) -> RingUsers | None:
        """The visits that take buffers for a kind of data; None: all do."""
        return self._users.get((data, device))

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


@dataclass(frozen=True)
class BlockOrder(Schedule):
    def own_period(self, device: int) -> int:
        return self.traffic.layers * self.traffic.batches

    def visit(self, number: int) -> Visit:
        rest, batch = divmod(number, self.traffic.batches)
        return Visit(*divmod(rest, self.traffic.layers), batch)

    def number(self, step: int, layer: int, batch: int) -> int:
        return (step * self.traffic.layers + layer) * self.traffic.batches + batch

    def weight_number(self, step: int, layer: int, batch: int) -> int:
        return step * self.traffic.layers + layer

    def weight_batch(self, batch: int) -> int:
        return 0


# -- the issuer of tasks ---------------------------------------------------------------------------------------------------

HOME_AGO = {Data.KV: (1, 0), Data.STATE: (1, 0), Data.HIDDEN: (0, 1)}  # steps and layers since the visit that brought data home
Rings = tuple[tuple[str, ...], tuple[str, ...]]  # those that data passes through, and those that it is computed with in


class ChainLink(NamedTuple):
    """A task of a chain."""

    op: Op
    data: Data
    source: Op | None
    ago: tuple[int, int]  # steps and layers between the visit of the source and this one
    takes: list[str]  # rings in which it is the first to work, in one buffer of each
    leaves: list[str]  # rings in which it is the last


class Chains(NamedTuple):
    """The links of a visit, in the order in which they are issued."""

    fetches: Mapping[Data, list[ChainLink]]
    computes: list[ChainLink]
    attends: list[ChainLink]
    stores: list[ChainLink]


@cache
def chains(transfers: tuple[Op, ...], rings: tuple[Rings, ...], begins_pass: bool, stored_before: bool) -> Chains:
    """`rings` are those of weights, KV, states and hidden states; `stored_before`: the step before has stored KV of prompts."""
    links = {data: list(_chain(data, transfers, own, begins_pass, stored_before)) for data, own in zip(MOVED, rings)}
    fetches = {data: [link for link in own if link.op.fetches] for data, own in links.items()}
    computes = [link for own in links.values() for link in own if link.op is Op.COMPUTE]
    # hidden states before KV: they are fetched again for the next layer
    attends = [link for link in links[Data.KV] if link.op is Op.ATTEND]
    return Chains(fetches, computes, attends, [link for data in reversed(MOVED) for link in links[data] if link.op.stores])


def _chain(data: Data, transfers: tuple[Op, ...], rings: Rings, begins_pass: bool, stored_before: bool) -> Iterator[ChainLink]:
    moved, (passed, computed_in) = [op for op in transfers if op.data is data], rings
    fetches = [op for op in moved if op.fetches]
    ops = [*fetches, Op.COMPUTE, *(op for op in moved if op is Op.ATTEND), *(op for op in moved if op.stores)]
    computes = Op.COMPUTE, Op.CHOOSE  # a choice puts the newest token where the others come to
    used = [list(computed_in if op in computes else op.works_in(passed)) for op in ops]
    held = data is Data.WEIGHTS and not begins_pass  # the first visit of a pass has taken the buffer for all others
    for at, op in enumerate(ops):
        brought_by = fetches[1] if op.chooses else op  # what is chosen is brought by the next task
        source, ago = (ops[at - 1], (0, 0)) if at else (brought_by.reverse, HOME_AGO.get(data, (0, 0)))
        if Op.ATTEND in ops and op is Op.COMPUTE:
            source = None
        elif op is Op.ATTEND:
            source, ago = _source_of_attending(fetches, stored_before)
        takes = [ring for ring in used[at] if not held and ring not in chain(*used[:at])]
        leaves = [ring for ring in used[at] if ring not in chain(*used[at + 1 :])]
        yield ChainLink(op, data, source, ago, takes, leaves)


def _source_of_attending(fetches: list[Op], stored_before: bool) -> tuple[Op | None, tuple[int, int]]:
    """What has brought the KV to where it is attended. The COMPUTE that asks is needed as well."""
    if fetches:
        return fetches[-1], (0, 0)
    return (Op.STORE_KV, HOME_AGO[Data.KV]) if stored_before else (None, (0, 0))


class Issuer:
    """Serves one run of a schedule, and remembers for each buffer the tasks that must end before it is used again. Visits are
    named by their numbers; nothing is issued after the last."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._traffic = schedule.traffic
        self._visits = schedule.traffic.visits
        self._freed_by: dict[tuple[str, int, int], tuple[Key, ...]] = {}
        self._known: dict[object, Chains] = {}
        self._chosen: set[Visit] = set()  # visits that have their KV chosen and fetched, before they are computed

    def computes(self) -> Iterator[Task]:
        """All tasks where nothing moves, block by block."""
        before: dict[int, tuple[Key, ...]] = {}
        for number in range(self._visits):
            visit = self._schedule.visit(number)
            yield Task(Op.COMPUTE, *visit, before.get(visit.batch, ()))
            before[visit.batch] = (Key(Op.COMPUTE, *visit),)

    def fetched(self, data: Data, *numbers: int) -> Iterator[Task]:
        for number in numbers:
            if number < self._visits:
                visit = self._schedule.visit(number)
                for link in self._chains(visit).fetches[data]:
                    yield self._moved(link, visit)

    def of_rows(self, *numbers: int) -> Iterator[Task]:
        """Fetches what rows have in a layer from step to step. What a visit chooses of its KV comes later."""
        chooses = self._traffic.chooses
        for data in OF_ROWS:
            asked = (at for at in numbers if data is not Data.KV or at >= self._visits or not chooses(self._schedule.visit(at)))
            yield from self.fetched(data, *asked)

    def chosen(self, number: int) -> Iterator[Task]:
        """Chooses what is fetched of the KV of a visit, and fetches it. It is done right before the COMPUTE if not earlier."""
        if number >= self._visits or (visit := self._schedule.visit(number)) in self._chosen:
            return
        if not self._traffic.chooses(visit):
            return
        self._chosen.add(visit)
        links = self._chains(visit)
        for link in links.fetches[Data.KV]:
            task = self._moved(link, visit)
            yield task._replace(needs=self._inputs(visit) + task.needs) if link.op.chooses else task

    def sliced(self, op: Op, number: int, slices: Iterable[int]) -> Iterator[Task]:
        """Issues these slices of the weights that come with a visit."""
        if number < self._visits:
            visit = self._schedule.visit(number)
            for link in self._chains(visit).fetches[op.data]:
                if link.op is op:
                    yield from (self._moved(link, visit, part) for part in slices)

    def computed(self, number: int) -> Iterator[Task]:
        """A COMPUTE, and what the host attends for it."""
        yield from self.chosen(number)
        visit = self._schedule.visit(number)
        self._chosen.discard(visit)
        links, needs = self._chains(visit).computes, self._computed_before(visit)
        for link in links:
            needs += self._schedule.keys(link.source, visit) if link.source else self._freed(link, visit)
        yield Task(Op.COMPUTE, *visit, needs)
        for link in links:
            self._leave(link, visit)
        for link in self._chains(visit).attends:
            task = self._moved(link, visit)
            yield task._replace(needs=(Key(Op.COMPUTE, *visit), *task.needs))

    def stored(self, number: int) -> Iterator[Task]:
        visit = self._schedule.visit(number)
        for link in self._chains(visit).stores:
            yield self._moved(link, visit)

    def _moved(self, link: ChainLink, visit: Visit, part: int = 0) -> Task:
        op, (step, layer, batch) = link.op, visit
        source: tuple[Key, ...] = ()
        if link.source is not None and step >= link.ago[0]:  # data from before the first step was stored long ago
            source = (Key(link.source, step - link.ago[0], layer - link.ago[1], batch + part),)
        freed = self._freed(link, visit)
        if link.leaves and part == self._schedule.parts(op) - 1:
            self._leave(link, visit)
        return Task(op, step, layer, batch + part, freed + source if op.fetches else source + freed)

    def _computed_before(self, visit: Visit) -> tuple[Key, ...]:
        """The COMPUTE that this one continues: that of the layer before, or of the step before. What the host attends for the
        layer before is used in this one."""
        step, layer, batch = visit
        if layer == step == 0:
            return ()
        before = Visit(step, layer - 1, batch) if layer else Visit(step - 1, self._traffic.layers - 1, batch)
        passed = (Key(Op.PASS_H, *before),) if self._traffic.passes_on(before.layer, batch) else ()
        attended = (Key(Op.ATTEND, *before),) if self._traffic.attends_beside(before) else ()
        return (Key(Op.COMPUTE, *before), *passed, *attended)

    def _inputs(self, visit: Visit) -> tuple[Key, ...]:
        """What a visit computes with, beside its KV. Weights came for the first visit of their pass, which may come later."""
        needs, first = self._computed_before(visit), visit._replace(batch=self._schedule.weight_batch(visit.batch))
        for at, of_weights in ((first, True), (visit, False)):
            for link in self._chains(at).computes:
                if link.source is not None and link.data is not Data.KV and (link.data is Data.WEIGHTS) == of_weights:
                    needs += self._schedule.keys(link.source, at)
        return needs

    # -- buffers -----------------------------------------------------------------------------------------------------

    def _freed(self, link: ChainLink, visit: Visit) -> tuple[Key, ...]:
        freed: tuple[Key, ...] = ()
        for ring in link.takes:
            freed += self._freed_by.get(self._buffer(ring, link, visit), ())
        return freed

    def _leave(self, link: ChainLink, visit: Visit) -> None:
        for ring in link.leaves:
            self._freed_by[self._buffer(ring, link, visit)] = self._schedule.keys(link.op, visit)

    def _buffer(self, ring: str, link: ChainLink, visit: Visit) -> tuple[str, int, int]:
        """A buffer of a ring. Every device has rings of its own."""
        return ring, self._traffic.lanes.device(visit.layer), self._schedule.buffer_of(link.data, visit)

    def _chains(self, visit: Visit) -> Chains:
        """The chains of a visit, which for a layer and batch are the same in all steps but the first two and the last."""
        step, layer, batch = visit
        kind = min(step, 2), step == self._traffic.steps - 1, layer, batch
        if kind not in self._known:
            rings = tuple((self._traffic.rings(data, visit), self._traffic.computed_in(data, visit)) for data in MOVED)
            stored = step > 0 and self._traffic.reads_prompts(step - 1)
            self._known[kind] = chains(self._schedule.transfers(visit), rings, self._schedule.begins_pass(batch), stored)
        return self._known[kind]
