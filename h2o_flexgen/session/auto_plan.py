"""AutoPlan: the plan of an LLM that was opened without one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest

from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.head import LOGITS_AT_ONCE
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.reports import OnStage
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements
from h2o_flexgen.planning.workload_plan import DoesNotFit
from h2o_flexgen.profiling.profile_cache import this_machine
from h2o_flexgen.session.loaded_model import ModelUnderPlan
from h2o_flexgen.session.plan_finder import PlanSearch

LOGITS_BYTES = 32  # bytes per logit while texts are scored in one pass: the logit and what is made of it, generously


@dataclass(frozen=True)
class PlanNeed:
    """What a plan must have room for."""

    workload: Workload
    held_back: int  # bytes of the fastest memory that the plan may not use

    @property
    def is_running(self) -> bool:
        return self.workload.gen_lens is not None

    def is_outgrown_by(self, other: PlanNeed, plan: Plan) -> bool:
        """Whether a workload exceeds this need: by longer texts, or by more of them where the block held the whole workload."""
        new, known = other.workload, self.workload
        if other.is_running != self.is_running:
            return True  # what is best where rows come and go is not best where they stay
        is_longer = max(new.prompt_lens) > max(known.prompt_lens) or new.gen_len > known.gen_len
        has_more_rows = new.num_prompts > known.num_prompts and plan.block_size >= known.num_prompts
        return is_longer or has_more_rows or other.held_back > self.held_back

    def together_with(self, other: PlanNeed) -> PlanNeed:
        """The larger value of each."""
        lengths = (sorted(one.workload.prompt_lens, reverse=True) for one in (self, other))
        longest = tuple(max(pair) for pair in zip_longest(*lengths, fillvalue=0))
        gen_len = max(self.workload.gen_len, other.workload.gen_len)
        return PlanNeed(Workload(longest, gen_len), max(self.held_back, other.held_back))


@dataclass
class AutoPlan:
    """The plan of an LLM that was opened without one: found for its first workload, and found anew for one that outgrows it. A
    new plan also has room for earlier needs: alternating calls of two kinds would otherwise load the weights each time."""

    asked: PlanRequirements
    dtype: str  # as it was asked for
    found_for: tuple[PlanNeed, ...] = ()  # needs that the plan has room for, one at a time
    _machine: Machine | None = None

    def provide(self, llm: ModelUnderPlan, workload: Workload, scores_texts: bool, on_stage: OnStage | None) -> None:
        """Finds a plan for the workload unless the model has one. Logits of many positions of a text take memory that a plan
        does not count, so it is held back."""
        need = PlanNeed(workload, LOGITS_AT_ONCE * LOGITS_BYTES if scores_texts else 0)
        if all(known.is_outgrown_by(need, llm.plan) for known in self.found_for):
            with llm.replanned(on_stage):
                self._find(llm, need)

    def _find(self, llm: ModelUnderPlan, need: PlanNeed) -> None:
        known = self.found_for
        alike = [] if need.is_running else [one for one in known if not one.is_running]
        together = reduce(PlanNeed.together_with, alike, need)
        if together != need and self._has_plan_for_both(llm, together):
            self.found_for = (together,)
            return
        wish = self._wish(llm, need)
        wish.refuse_impossible()
        self._adopt_best(wish)
        beside = alike if together != need else [one for one in known if one.is_running] if need.is_running else []
        others = (one for one in beside if self._wish(llm, one).is_granted_by(llm.plan))
        self.found_for = (need, *others)

    def _has_plan_for_both(self, llm: ModelUnderPlan, together: PlanNeed) -> bool:
        """Whether the plan also has room for prompts of the one need with answers of the other."""
        wish = self._wish(llm, together)
        try:
            wish.refuse_impossible()
        except ValueError:
            return False
        try:
            self._adopt_best(wish)
        except DoesNotFit:
            return False
        return wish.is_granted_by(llm.plan)

    def _wish(self, llm: ModelUnderPlan, need: PlanNeed) -> PlanSearch:
        workload = need.workload
        return PlanSearch(self.asked, llm, workload, max(workload.prompt_lens), workload.gen_len, need.held_back)

    def _adopt_best(self, wish: PlanSearch) -> None:
        llm = wish.llm
        if (known := wish.plan_with_room()) is not None:
            llm.adopt(known)
            return
        if self._machine is None:
            with Progress(0, "this machine", late=True) as progress:
                self._machine = this_machine(llm.device, llm.offload_folder, self.dtype, progress)
        with Progress(0, f"planning for {llm.name}", late=True):
            wish.find(self._machine)
