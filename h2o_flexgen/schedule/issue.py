"""The issuer: makes the tasks that a schedule yields, with the tasks that each one needs, by chains.

Data of one kind goes through a chain of tasks in every visit: the transfers that fetch it, the COMPUTE, and those that bring it
home. A task needs its source: the one before it in the chain, or the one that has brought the data home for it. The first of a
chain to work in a buffer also needs those that worked in it last for its former user.

KV that the host attends is fetched for its ATTEND, which comes after the COMPUTE that asks and before what is stored. The
COMPUTE itself waits for none of it.

Where a visit chooses what is fetched of its KV, it needs for that all that a COMPUTE needs, except this KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from typing import NamedTuple

from h2o_flexgen.schedule.ops import MOVED, OF_ROWS, Data, Key, Op, Task, Visit
from h2o_flexgen.schedule.schedule import Schedule

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
    used = [list(computed_in) if op is Op.COMPUTE else op.works_in(passed) for op in ops]
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
