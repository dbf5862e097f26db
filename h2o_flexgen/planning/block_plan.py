"""BlockPlan: a block under a plan, with all that follows from the two: what lies where, and in which order it is done.

Engine, footprint, cost, command line and benchmarks start from this one object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.workload import Block, Workload
from h2o_flexgen.planning.placement import Placement, place, place_weights, placed_shares, traffic
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.occupancy import Occupancy
from h2o_flexgen.schedule.schedule import SCHEDULES, Schedule


@dataclass(frozen=True)
class BlockPlan:
    spec: ModelSpec
    plan: Plan
    block: Block
    placement: Placement
    schedule: Schedule

    @classmethod
    def of(
        cls, spec: ModelSpec, plan: Plan, block: Block, accelerator: bool, weights: Mapping[str, str] | None = None
    ) -> BlockPlan:
        placement = place(spec, plan, block, weights)
        schedule = SCHEDULES[plan.schedule](traffic(spec, plan, block, placement, accelerator))
        return cls(spec, plan, block, placement, schedule)

    @cached_property
    def placed_percent(self) -> tuple[float, ...]:
        return placed_shares(self.spec, self.plan, self.block, self.placement)

    @cached_property
    def slots(self) -> tuple[Occupancy, ...]:
        """Of each batch."""
        return tuple(self.plan.policy.slots(batch, self.block.gen_len) for batch in self.block.batches)

    @property
    def shape(self) -> tuple[tuple[int, ...], ...]:
        """Blocks of one shape cost the same."""
        return shape_of(self.block)


def shape_of(block: Block) -> tuple[tuple[int, ...], ...]:
    return tuple((*batch.lengths, *batch.seen) for batch in block.batches)


def plan_blocks(spec: ModelSpec, plan: Plan, workload: Workload, accelerator: bool) -> Iterator[BlockPlan]:
    """Blocks of one shape lie alike: each shape is placed once, for there may be thousands."""
    met = {one.shape: one for one in plan_distinct_blocks(spec, plan, workload, accelerator)}
    for block in workload.blocks(plan.gpu_batch_size, plan.num_gpu_batches):
        yield replace(met[shape_of(block)], block=block)


def plan_distinct_blocks(spec: ModelSpec, plan: Plan, workload: Workload, accelerator: bool) -> Iterator[BlockPlan]:
    """The first block of each shape. All have the same weights."""
    weights = place_weights(spec, plan)
    for block in workload.distinct_blocks(plan.gpu_batch_size, plan.num_gpu_batches):
        yield BlockPlan.of(spec, plan, block, accelerator, weights)
