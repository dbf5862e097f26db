"""What rows keep on a device from step to step: their KV, and their states.

KV has a store for each level of KV heads, behind the interface of one. All levels of a (layer, batch) are on the same tier,
each with slots, buffers and a journal of its own, and are moved one after the other. Where all heads keep the same number of
tokens there is one store, which serves all calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from typing import NamedTuple

from h2o_flexgen.engine.executor import MovedInParts
from h2o_flexgen.engine.rows import BatchRows
from h2o_flexgen.engine.stores.host_attention_exchange import HOST_MEMORY
from h2o_flexgen.engine.stores.kv import KVStore
from h2o_flexgen.engine.stores.layer_judges import Judges, judges_by_level
from h2o_flexgen.engine.stores.row_states import StateStore
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.kv.layer_cache import HeadsOfLayer, LayerByPart, LayerCache, heads_by_layer
from h2o_flexgen.kv.slots import Guesses
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.schedule.ops import READ, Data, Task, Visit


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
        return self._guessed.setdefault(task.batch, _Guessed(rows, task.step, Guesses())).guesses

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
