"""HeldKV: the KV of a block, in levels of heads that keep the same number of tokens. It says what each level holds in which
layer. The size of a layer is found here, as a whole or level by level.

Without head budgets there is one level, of all heads in all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from h2o_flexgen.core.buffer_layout import KVLayout
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.workload import Block
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.levels import Level
from h2o_flexgen.policies.occupancy import Occupancy

Place = tuple[int, int]  # layer of the schedule, batch


@dataclass(frozen=True)
class HeldKV:
    spec: ModelSpec
    levels: tuple[Level, ...]  # the one that keeps most comes first
    block: Block

    @classmethod
    def of(cls, spec: ModelSpec, plan: Plan, block: Block) -> HeldKV:
        return cls(spec, plan.levels(spec), block)

    def only(self, spec: ModelSpec, is_kept: Callable[[int], bool]) -> HeldKV:
        """The same of a part of the model, which has only those layers with KV that are kept."""
        places = [place for place, layer in enumerate(self.spec.kv_layers) if is_kept(layer)]
        return replace(self, spec=spec, levels=tuple(level.only(places) for level in self.levels))

    @cached_property
    def occupancies(self) -> tuple[tuple[Occupancy, ...], ...]:
        """The occupancy of each level, in each batch."""
        batches, gen_len = self.block.batches, self.block.gen_len
        return tuple(tuple(level.policy.occupancy(batch, gen_len) for batch in batches) for level in self.levels)

    @cached_property
    def _heads(self) -> Mapping[int, tuple[int, ...]]:
        by_level = zip(*(map(len, level.heads) for level in self.levels))
        return dict(zip(self.spec.kv_layers, by_level))

    def heads(self, layer: int) -> tuple[int, ...]:
        """How many KV heads of a layer each level has; nothing of a layer without KV."""
        return self._heads.get(layer, ())

    def most_heads(self, level: int) -> int:
        """KV heads that a level has in the layer where it has most."""
        return max((heads[level] for heads in self._heads.values()), default=0)

    def layouts(self, layer: int, batch: int) -> tuple[KVLayout | None, ...]:
        """How the KV of a batch lies in one layer, of each level; nothing of those that have none of the layer's heads."""
        heads = self._heads[layer]
        return tuple(each[batch].layout(self.spec, own) if own else None for each, own in zip(self.occupancies, heads))

    def image_bytes(self, layer: int, batch: int) -> int:
        """Bytes of the KV of a batch in one layer, in memory."""
        return sum(layout.image_bytes for layout in self.layouts(layer, batch) if layout is not None)
