"""What rows keep on a device from step to step: their KV, and their states.

KV has a store for each level of KV heads, behind the interface of one. All levels of a (layer, batch) are on the same tier,
each with slots, buffers and a journal of its own, and are moved one after the other. Where all heads keep the same number of
tokens there is one store, which serves all calls.

States have a home for every (layer, batch) on the tier where the placement puts it, and buffers through which those from other
tiers pass while they are computed with. A state lies as it is computed with, on every tier, row by row. So the living rows of a
batch, which come first, are one range. Each step reads all of it and writes all of it. At rest in the memory that computes, a
state is used in place. Where no later visit needs it, all layers and batches have one home there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from h2o_flexgen.core.site import DISK, HOST
from h2o_flexgen.engine.executor import MovedInParts
from h2o_flexgen.engine.rows import BatchRows
from h2o_flexgen.engine.stores.host_attention_exchange import HOST_MEMORY
from h2o_flexgen.engine.stores.kv import KVStore
from h2o_flexgen.engine.stores.layer_judges import Judges, judges_by_level
from h2o_flexgen.engine.stores.states_of_visits import States, states_over
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.layer_cache import HeadsOfLayer, LayerByPart, LayerCache, heads_by_layer
from h2o_flexgen.kv.slots import Guesses
from h2o_flexgen.memory.disk import DiskRegion
from h2o_flexgen.memory.memories import Memories, Ring
from h2o_flexgen.planning.block_plan import BlockPlan, StateRooms
from h2o_flexgen.planning.placement import Place
from h2o_flexgen.schedule.ops import READ, Data, Task, Visit

# -- states ----------------------------------------------------------------------------------------------------------------


class OpenStates(NamedTuple):
    """The states of the rows of a visit."""

    by_name: States
    memory: Sequence[Tensor]  # that they lie in
    notes: Mapping[str, Sequence[Tensor]]  # by state: what tokens on trial have brought to it
    replays: Sequence[int] = ()  # of each row, how many of these tokens stay


NO_STATES = OpenStates({}, (), {})


@dataclass
class StatesAtHome:
    """The states of one (layer, batch), as they lie at home."""

    rows: int = 0  # in it
    generation: int = 0  # how often its rows were filled up
    behind: list[int] = field(default_factory=list)  # of each row, the tokens of its text that have passed them


class StateStore:
    def __init__(self, planned: BlockPlan, memories: Memories) -> None:
        self._schedule, self._layouts, self._memories = planned.schedule, planned.states, memories
        self._units = {place: StatesAtHome() for place in self._layouts}
        self._in_memory: dict[Place, Tensor] = {}  # homes on device or host
        self._on_disk: dict[Place, DiskRegion] = {}
        self._views: dict[tuple[int, Place, int], OpenStates] = {}  # by the region that they lie in, and their number of rows
        with ExitStack() as held:  # if a reservation fails, e.g. on a full disk, earlier ones are released
            if planned.block.only_reads:
                self._allocate_one_home(held)
            else:
                self._allocate_homes(held)
            self._allocate_rings(held, StateRooms.of(planned))
            self._held = held.pop_all()

    def prepare(self, planned: BlockPlan) -> None:
        """Prepares the next block of a conversation: the rows are those of the first."""
        self._schedule = planned.schedule
        for unit in self._units.values():
            unit.generation = 0

    def _allocate_one_home(self, held: ExitStack) -> None:
        """One home for all layers and batches: each of them is over before the next one begins."""
        if not self._layouts:
            return
        memory = self._memories.compute
        home = memory.alloc(max(layout.nbytes for layout in self._layouts.values()))
        held.callback(memory.free, home)
        self._in_memory.update(dict.fromkeys(self._layouts, home))

    def _allocate_homes(self, held: ExitStack) -> None:
        traffic, memories = self._schedule.traffic, self._memories
        for place, layout in self._layouts.items():
            tier = traffic.state[place]
            if tier == DISK:
                self._on_disk[place] = memories.disk.alloc(layout.nbytes)
                held.callback(memories.disk.free, self._on_disk[place])
            else:
                memory = memories.host if tier == HOST else memories.compute
                self._in_memory[place] = memory.alloc(layout.nbytes)
                held.callback(memory.free, self._in_memory[place])

    def _allocate_rings(self, held: ExitStack, rooms: StateRooms) -> None:
        memories = self._memories
        self._host_ring = Ring(memories.host, self._schedule.buffers_of(Data.STATE), rooms.on_host)
        held.callback(self._host_ring.free)
        self._device_ring = Ring(memories.compute, self._schedule.buffers_of(Data.STATE), rooms.on_device)
        held.callback(self._device_ring.free)

    def close(self) -> None:
        self._held.close()
        for kept in (self._units, self._in_memory, self._on_disk, self._views):
            kept.clear()  # so that a reference to the store keeps no memory alive

    # -- actions -------------------------------------------------------------------------------------------------------

    def open(self, task: Task, rows: BatchRows) -> OpenStates:
        """The states for a COMPUTE, with the rows that are still alive. Those of rows that begin are zero."""
        place, region = (task.layer, task.batch), self._working_region(task)
        unit, row_bytes = self._units[place], self._layouts[place].row_bytes
        by_row = region[: self._layouts[place].nbytes].view(-1, row_bytes)
        if unit.generation != rows.generation:
            for now, before in enumerate(rows.places_before):
                if now != before:
                    by_row[now] = by_row[before]
            unit.behind = [unit.behind[before] for before in rows.places_before if unit.behind]
        if rows.beginning is not None:
            by_row[rows.beginning].zero_()
        unit.rows, unit.generation = rows.size, rows.generation
        opened = self._over(region, place, rows.size)
        return opened._replace(replays=_replayed(unit, rows)) if opened.notes else opened

    def _over(self, region: Tensor, place: Place, rows: int) -> OpenStates:
        """Views of a region: both stay as long as this store."""
        known = id(region), place, rows
        if known not in self._views:
            layout = replace(self._layouts[place], rows=rows)
            of_all, tensors = states_over(region, layout), layout.tensors
            own = {one.name: of_all[one.name] for one in tensors if one.notes is None}
            notes = {name: [of_all[one.name] for one in tensors if one.notes == name] for name in own}
            noted = {name: each for name, each in notes.items() if each}
            self._views[known] = OpenStates(own, (region[: layout.nbytes],), noted)
        return self._views[known]

    def buffer(self, visit: Visit) -> int:
        """The buffer through which the states of a visit come; the same number for all steps if they are not moved."""
        is_moved = self._schedule.traffic.moves_state(visit.layer, visit.batch)
        return self._schedule.buffer_of(Data.STATE, visit) if is_moved else 0

    def _working_region(self, task: Task) -> Tensor:
        if not self._schedule.traffic.moves_state(task.layer, task.batch):
            return self._in_memory[task.layer, task.batch]
        return (self._device_ring or self._host_ring)[self.buffer(task.visit)]

    def _on_host(self, task: Task) -> Tensor:
        place = task.layer, task.batch
        return self._host_ring[self.buffer(task.visit)] if place in self._on_disk else self._in_memory[place]

    def load(self, task: Task) -> int:
        """Host -> device."""
        return self._copy(self._on_host(task), self._working_region(task), self._nbytes(task))

    def store(self, task: Task) -> int:
        """Device -> host."""
        return self._copy(self._working_region(task), self._on_host(task), self._nbytes(task))

    def _copy(self, source: Tensor, target: Tensor, nbytes: int) -> int:
        target[:nbytes].copy_(source[:nbytes], non_blocking=True)
        return nbytes

    def _nbytes(self, task: Task) -> int:
        place = task.layer, task.batch
        return self._units[place].rows * self._layouts[place].row_bytes

    def read(self, task: Task) -> int:
        """Disk -> host, in parts that the disk threads work on in parallel."""
        home, region, disk = self._on_disk[task.layer, task.batch], self._on_host(task), self._memories.disk
        self._memories.files.each(lambda part: disk.read_into(home, part.start, region[part]), self._cuts(task))
        return self._nbytes(task)

    def write(self, task: Task) -> int:
        home, region, disk = self._on_disk[task.layer, task.batch], self._on_host(task), self._memories.disk
        self._memories.files.each(lambda part: disk.write_from(home, part.start, region[part]), self._cuts(task))
        return self._nbytes(task)

    def _cuts(self, task: Task) -> list[slice]:
        place = task.layer, task.batch
        return [*self._layouts[place].cuts(self._units[place].rows)]


def _replayed(unit: StatesAtHome, rows: BatchRows) -> Sequence[int]:
    """Returns how many of each row's tokens that were on trial stay: its text has gone on behind them. None of a text that
    begins, or where the step before had none on trial; it may have been recorded, and then nothing is known of it here. Notes
    in the unit how many tokens of each text have passed the states once this step is over."""
    replayed, unit.behind = [0] * unit.rows, [*unit.behind, *[0] * unit.rows][: unit.rows]
    for part in rows.parts:
        slots, places = part.now.slots, range(unit.rows)[part.rows]
        for place, seen, new, begins in zip(places, slots.seen, slots.new, slots.begins):
            replayed[place] = seen - unit.behind[place] if rows.follows_trial and not begins else 0
            unit.behind[place] = seen + (0 if part.ahead else new)
    return replayed


# -- both, and KV of all levels --------------------------------------------------------------------------------------------


class _Guessed(NamedTuple):
    """A pass over a batch, and what its guesses changed."""

    rows: BatchRows
    step: int
    guesses: Guesses


class KVLevels:
    def __init__(self, planned: BlockPlan, memories: Memories, judges: Judges) -> None:
        device, layers = memories.device, planned.spec.kv_layers
        self._schedule = planned.schedule
        self._heads = dict(zip(layers, heads_by_layer(planned.levels, device.torch_device, device.upload)))
        self._heads_on_host = dict(zip(layers, heads_by_layer(planned.levels, HOST_MEMORY)))
        with ExitStack() as held:  # if one cannot be made, those before it are closed
            own = enumerate(judges_by_level(judges, planned.levels, self._heads))
            stores = [held.enter_context(closing(KVStore(planned, level, memories, of_level))) for level, of_level in own]
            self._held = held.pop_all()
        self._stores: Sequence[KVStore] = stores
        self._of_layer = {layer: [stores[level] for level, _ in heads] for layer, heads in self._heads.items()}
        self._guessed: dict[int, _Guessed] = {}  # by the batch

    def buffer(self, visit: Visit) -> int:
        """The buffer through which the KV of a visit comes; the same number for all steps if it is not moved."""
        return self._schedule.buffer_of(Data.KV, visit) if self._schedule.traffic.moves_kv(visit.layer, visit.batch) else 0

    def prepare(self, planned: BlockPlan) -> None:
        """Prepares the next block of a conversation."""
        self._schedule = planned.schedule
        if not any(any(batch.seen) for batch in planned.block.batches):
            self._guessed.clear()  # the text begins again, perhaps as a pass broke
        for store in self._stores:
            store.prepare(planned)

    def close(self) -> None:
        self._guessed.clear()
        self._held.close()

    def is_attended_beside(self, visit: Visit) -> bool:
        return self._schedule.traffic.attends_beside(visit)

    def chooses(self, visit: Visit) -> bool:
        """Whether a visit chooses what is read of its KV. Its attention then finds other slots in each step."""
        return self._schedule.traffic.chooses(visit)

    # -- actions -------------------------------------------------------------------------------------------------------

    def take_back(self, task: Task, rows: BatchRows) -> None:
        """Takes back what wrong guesses of the pass before have changed in all layers, now that they are judged. This comes
        before any layer of this pass is computed, as a chain that begins with a layer without KV computes others that have
        KV. It also comes before rows move up."""
        known = self._guessed.get(task.batch)
        if known is not None and (known.rows is not rows or known.step != task.step):
            known.guesses.take_back(known.rows.staying)
            del self._guessed[task.batch]

    def open(self, task: Task, rows: BatchRows) -> LayerCache:
        """The cache for a COMPUTE."""
        if self._schedule.traffic.passes_parts_of(task.visit):
            return self._by_part(task, rows)
        guesses = self._guesses_of(task, rows)
        return self._opened(task, self._heads, lambda store: store.open(task, rows), guesses)

    def _guesses_of(self, task: Task, rows: BatchRows) -> Guesses:
        """Returns where it is noted what guesses of this pass change."""
        self.take_back(task, rows)
        if task.batch not in self._guessed:
            self._guessed[task.batch] = _Guessed(rows, task.step, Guesses())
        return self._guessed[task.batch].guesses

    def _by_part(self, task: Task, rows: BatchRows) -> LayerCache:
        stores = self._of_layer[task.layer]
        for store in stores:
            store.begin_parts(task, rows)
        cache = LayerByPart(self._heads[task.layer], lambda part: [store.open_part(task, part) for store in stores])
        return cache if len(rows.parts) > 1 else cache.part(slice(0, rows.size))

    def open_beside(self, task: Task, rows: BatchRows) -> LayerCache:
        """The cache on the host for an ATTEND."""
        return self._opened(task, self._heads_on_host, lambda store: store.open_beside(task, rows))

    def _opened(
        self,
        task: Task,
        heads: Mapping[int, HeadsOfLayer],
        opened: Callable[[KVStore], KVCache],
        guesses: Guesses | None = None,
    ) -> LayerCache:
        return LayerCache(heads[task.layer], [opened(store) for store in self._of_layer[task.layer]], guesses)

    def load(self, task: Task) -> int:
        return sum(store.load(task) for store in self._of_layer[task.layer])

    def store(self, task: Task) -> int | MovedInParts:
        stores = self._of_layer[task.layer]
        if not self._schedule.traffic.passes_parts_of(task.visit):
            return sum(store.store(task) for store in stores)
        moved, before = zip(*(store.store_parts(task) for store in stores))
        return MovedInParts(sum(moved), [*chain(*before)])

    def read(self, task: Task) -> int:
        return sum(store.read(task) for store in self._of_layer[task.layer])

    @property
    def skipped_bytes(self) -> Counter[str]:
        """The bytes of tokens that several heads chose, and that came once, or that were there, by lane."""
        return Counter({READ: sum(store.spared_bytes for store in self._stores)})

    def write(self, task: Task) -> int:
        return sum(store.write(task) for store in self._of_layer[task.layer])


class RowStores(NamedTuple):
    kv: KVLevels
    states: StateStore

    @classmethod
    def on(cls, planned: BlockPlan, memories: Memories, judges: Judges) -> RowStores:
        with ExitStack() as held:  # if the second cannot be made, the first is closed
            kv = held.enter_context(closing(KVLevels(planned, memories, judges)))
            made = cls(kv, StateStore(planned, memories))
            held.pop_all()
        return made

    def prepare(self, planned: BlockPlan) -> None:
        """Prepares the next block of a conversation."""
        self.kv.prepare(planned)
        self.states.prepare(planned)

    def close(self) -> None:
        with closing(self.kv):
            self.states.close()
