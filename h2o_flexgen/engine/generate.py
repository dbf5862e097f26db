"""Generation: prepared rows run block after block, and a completion comes out when the block it ends in is over."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from h2o_flexgen.engine.engine import BlockRun, Engine, OnVisit, Until
from h2o_flexgen.engine.head import AtHead
from h2o_flexgen.engine.row_state import RowState, completions_of
from h2o_flexgen.engine.shrink import OnShrink, Shrink, run_blocks
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.sampling.output import Completion


@dataclass(frozen=True)
class Prepared:
    """Rows that can be run: their tokens are known, and their workload is planned and fits."""

    rows: Sequence[RowState]
    planned: WorkloadPlan

    def for_use_under(self, plan: Plan, *given: object) -> Prepared:
        if self.planned.plan != plan:
            raise ValueError("these prompts were prepared under another plan; prepare them again")
        if any(one is not None for one in given):
            raise ValueError("prompts that are prepared have their sampling_params; give these to prepare")
        if any(row.num_generated or row.finished for row in self.rows):
            raise ValueError("these prompts were generated from already; prepare them again")
        return self


@dataclass(frozen=True)
class Running:
    """How blocks run, whatever happens to them at the head of the model; and the runs that are done."""

    engine: Engine
    at_head: AtHead
    on_visit: OnVisit | None = None
    on_shrink: OnShrink | None = None
    may_shrink: bool = True
    stop_at: Until | None = None
    done: list[BlockRun] = field(default_factory=list)  # a long job has many blocks: only the last one keeps its trace

    def blocks(self, prepared: Prepared) -> Iterator[BlockRun]:
        def run(block: BlockPlan, may_run_out: bool) -> BlockRun:
            may_run_out = may_run_out and self.may_shrink
            return self.engine.run(block, prepared.rows, self.at_head, self.on_visit, self.stop_at, may_run_out=may_run_out)

        self.engine.trim()
        for one in run_blocks(prepared.planned, prepared.rows, run, self.on_shrink or _warn):
            if self.done:
                self.done[-1] = self.done[-1].without_trace()
            self.done.append(one)
            yield one

    def to_the_end(self, each: Iterable[Prepared]) -> None:
        for prepared in each:
            deque(self.blocks(prepared), maxlen=0)

    def completions(self, prepared: Prepared) -> Iterator[Completion]:
        """Yields one completion for each prompt whose rows all end."""
        rows, of_prompt = prepared.rows, defaultdict[int, list[RowState]](list)
        for row in rows:
            of_prompt[row.index].append(row)
        waiting = Counter(row.index for row in rows if not row.finished)
        counted: set[int] = set()
        for run in self.blocks(prepared):
            for place in run.block.rows:  # also for a block that memory ran out in: its other rows come again
                row = rows[place]
                if row.finished and place not in counted:
                    counted.add(place)
                    waiting[row.index] -= 1
                    if not waiting[row.index]:
                        yield from completions_of(of_prompt.pop(row.index))


def _warn(shrink: Shrink) -> None:
    """Warns callers without a listener: a smaller block is slower, and nobody should wonder why."""
    warnings.warn(f"{shrink} ({shrink.shortage.reason})", RuntimeWarning, stacklevel=2)
