"""Finds a plan for what an open model is to generate: by a search, or without one where the answer is known. The commands and
LLM both ask here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from h2o_flexgen.checkpoints.model_places import demo_folder
from h2o_flexgen.core.site import DEVICE, HOST
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.memory_limits import MemoryLimits
from h2o_flexgen.planning.plan import Plan, Shares
from h2o_flexgen.planning.plan_requirements import PlanRequirements
from h2o_flexgen.planning.search import MOST_ROWS, SearchProblem, SearchResult, refuse_what_never_fits, search
from h2o_flexgen.planning.workload_plan import WorkloadPlan

if TYPE_CHECKING:
    from h2o_flexgen.session.loaded_model import ModelUnderPlan

FASTEST = Shares(1.0, 0.0)
MOST_SEARCHES = 4  # with a limit of hundreds of MB, two left a tenth of a MB too little now and then


@dataclass(frozen=True)
class FoundPlan:
    machine: Machine
    found: SearchResult
    seconds: float  # seconds of the search

    @property
    def plan(self) -> Plan:
        return self.found.best.plan

    def lines(self) -> Iterator[str]:
        best = self.found.best
        yield f"machine   {self.machine.name}; its busiest part will be {best.prediction.busiest_lane}"
        yield f"found     in {self.seconds:.1f} s among {self.found.cases} sizes of batch and block"


@dataclass(frozen=True)
class PlanSearch:
    """What an open model is to generate under a plan that is still to be found."""

    asked: PlanRequirements
    llm: ModelUnderPlan
    workload: Workload | None  # the given prompts; None: as many will be made as the block takes
    prompt_len: int
    gen_len: int
    held_back: int = 0  # bytes of the fastest memory that the plan may not use

    def refuse_impossible(self) -> None:
        """Refuses what no machine could do, before this one is measured."""
        refuse_what_never_fits(self._problem(self.llm.machine_before_profile()))

    def find(self, machine: Machine) -> FoundPlan:
        """Finds a plan and gives it to the model. A search leaves something in memory: if the plan lacks room for just that,
        the search is repeated with what is left. Each repetition leaves less than the one before."""
        begun = time.perf_counter()
        for _ in range(MOST_SEARCHES):
            found = search(self._problem(machine))
            self.llm.adopt(found.best.plan)
            if self.is_granted_by(found.best.plan):
                break
        return FoundPlan(machine, found, time.perf_counter() - begun)

    def is_granted_by(self, plan: Plan) -> bool:
        """Whether the plan fits what may be held."""
        return self._planned(plan).fits(self._limits)

    @property
    def _limits(self) -> MemoryLimits:
        tier = DEVICE if self.llm.device.accelerator else HOST
        held = self.llm.limits.of(tier)
        return self.llm.limits if held is None else replace(self.llm.limits, **{tier: held - self.held_back})

    def _problem(self, machine: Machine) -> SearchProblem:
        llm = self.llm
        return self.asked.problem(
            machine,
            model=llm.spec_under,
            workload=self.workload,
            prompt_len=self.prompt_len,
            gen_len=self.gen_len,
            limits=self._limits,
            site=llm.site,
        )

    def _planned(self, plan: Plan) -> WorkloadPlan:
        workload = self.workload or Workload.uniform(plan.block_size, self.prompt_len, self.gen_len)
        return self.llm.planned(workload, plan)

    # -- without a search ------------------------------------------------------------------------------------------------

    def plan_with_room(self) -> Plan | None:
        """A plan with all prompts in one block and everything in the fastest memory, if that takes no more than half of it: no
        search finds a better plan, so the machine need not be measured. None otherwise, or if a plan is asked for more than
        speed."""
        asked = self.asked
        if not asked.is_only_speed:
            return None
        fastest = replace(asked.plan, weights=FASTEST, kv=FASTEST, hidden=FASTEST)
        if self.workload is not None:
            fastest = _in_one_block(fastest, self.workload.num_prompts, asked.batch_sizes, asked.batches)
        elif demo_folder(self.llm.name) is None:
            return None  # the search decides how many prompts make a good block
        return fastest if self._planned(fastest).fits(self._limits.with_half_free()) else None


def _in_one_block(plan: Plan, rows: int, sizes: tuple[int, ...], batches: tuple[int, ...]) -> Plan:
    """The plan with all rows in one block, in as few batches as allowed."""
    number = batches[0] if batches else -(-rows // (sizes[0] if sizes else MOST_ROWS))
    size = sizes[0] if sizes else min(MOST_ROWS, -(-rows // number))
    return replace(plan, gpu_batch_size=size, num_gpu_batches=number)
