"""The blocks of a workload as they will run under a plan: what lies where, in which order it is done, what each task costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from h2o_flexgen.planning.cost import Cost
from h2o_flexgen.planning.model_spec import ModelSpec
from h2o_flexgen.planning.placement import Placement, moves, place, placed_shares
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.schedule import COMPUTE_LANE, SCHEDULES, Schedule, Task
from h2o_flexgen.planning.workload import Block, Workload

Until = Callable[[Task], bool]


@dataclass(frozen=True)
class PlannedBlock:
    spec: ModelSpec
    plan: Plan
    block: Block
    placement: Placement
    schedule: Schedule

    @cached_property
    def cost(self) -> Cost:
        return Cost(self.spec, self.plan, self.block, self.placement, self.schedule)

    @cached_property
    def placed_percent(self) -> tuple[float, ...]:
        return placed_shares(self.spec, self.plan, self.block, self.placement)

    @property
    def shape(self) -> tuple[tuple[int, ...], ...]:
        """Blocks of one shape cost the same."""
        return tuple(batch.lengths for batch in self.block.batches)

    def tasks(self, until: Until | None = None) -> Iterator[Task]:
        return takewhile(lambda task: until is None or not until(task), self.schedule.tasks())

    def lane_bytes(self, until: Until | None = None) -> Counter[str]:
        moved: Counter[str] = Counter()
        for task in self.tasks(until):
            moved[task.lane] += self.cost.nbytes(task)  # type: ignore[assignment]
        return Counter({lane: round(nbytes) for lane, nbytes in moved.items()})


def plan_blocks(spec: ModelSpec, plan: Plan, workload: Workload, accelerator: bool) -> tuple[PlannedBlock, ...]:
    return tuple(
        _plan_block(spec, plan, block, accelerator) for block in workload.blocks(plan.gpu_batch_size, plan.num_gpu_batches)
    )


def _plan_block(spec: ModelSpec, plan: Plan, block: Block, accelerator: bool) -> PlannedBlock:
    placement = place(spec, plan, block)
    schedule = SCHEDULES[plan.schedule](moves(spec, plan, block, placement, accelerator))
    return PlannedBlock(spec, plan, block, placement, schedule)


def predicted_bytes(blocks: Sequence[PlannedBlock], until: Until | None = None) -> dict[str, int]:
    """What a run in which nobody finishes early moves, lane by lane."""
    alike = Counter(block.shape for block in blocks)
    one_of = {block.shape: block for block in blocks}
    total: Counter[str] = Counter()
    for shape, count in alike.items():
        total.update({lane: nbytes * count for lane, nbytes in one_of[shape].lane_bytes(until).items()})
    return {lane: nbytes for lane, nbytes in total.items() if lane != COMPUTE_LANE}
