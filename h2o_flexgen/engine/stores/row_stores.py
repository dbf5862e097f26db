"""What rows keep on a device from step to step: their KV, and their states."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import NamedTuple

from h2o_flexgen.engine.stores.kv_levels import KVLevels
from h2o_flexgen.engine.stores.layer_judges import Judges
from h2o_flexgen.engine.stores.row_states import StateStore
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.planning.block_plan import BlockPlan


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
