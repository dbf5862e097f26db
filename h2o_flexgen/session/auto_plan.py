"""AutoPlan: the plan of an LLM that was opened without one."""

from __future__ import annotations

from functools import reduce
from itertools import zip_longest

from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.head import LOGITS_AT_ONCE
from h2o_flexgen.engine.reports import OnStage
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanNeed, PlanRequirements
from h2o_flexgen.planning.workload_plan import DoesNotFit
from h2o_flexgen.session.loaded_model import LoadedModel
from h2o_flexgen.session.plan_finder import PlanFinder

LOGITS_BYTES = 32  # bytes per logit while texts are scored in one pass: the logit and what is made of it, generously


class AutoPlan:
    """The plan of an LLM that was opened without one: found for its first workload, and found anew for one that outgrows it. A
    new plan also has room for earlier needs: alternating calls of two kinds would otherwise load the weights each time."""

    def __init__(self, asked: PlanRequirements, model: LoadedModel) -> None:
        self._model = model
        self._finder = PlanFinder(asked, model, model.machines())
        self._found_for: tuple[PlanNeed, ...] = ()  # needs that the plan has room for, one at a time

    @property
    def has_plan(self) -> bool:
        return bool(self._found_for)

    def provide(self, workload: Workload, scores_texts: bool, on_stage: OnStage | None) -> None:
        """Finds a plan for the workload unless the model has one. Logits of many positions of a text take memory that a plan
        does not count, so it is held back."""
        need = PlanNeed(workload, LOGITS_AT_ONCE * LOGITS_BYTES if scores_texts else 0)
        if all(_outgrows(need, known, self._model.plan) for known in self._found_for):
            with self._model.replanned(on_stage):
                self._find(need)

    def _find(self, need: PlanNeed) -> None:
        known = self._found_for
        alike = [] if _is_running(need) else [one for one in known if not _is_running(one)]
        together = reduce(_together, alike, need)
        if together != need and self._has_plan_for_both(together):
            self._found_for = (together,)
            return
        self._finder.find(need)
        beside = alike if together != need else [one for one in known if _is_running(one)] if _is_running(need) else []
        self._found_for = (need, *(one for one in beside if self._finder.has_room(self._model.plan, one)))

    def _has_plan_for_both(self, together: PlanNeed) -> bool:
        """Whether the plan also has room for prompts of the one need with answers of the other."""
        try:
            self._finder.refuse_impossible(together)
        except ValueError:
            return False
        try:
            self._finder.find(together)
        except DoesNotFit:
            return False
        return self._finder.has_room(self._model.plan, together)


def _is_running(need: PlanNeed) -> bool:
    return need.workload.gen_lens is not None


def _outgrows(need: PlanNeed, known: PlanNeed, plan: Plan) -> bool:
    """Whether a workload exceeds a known need: by longer texts, or by more of them where the block held the whole workload."""
    if _is_running(need) != _is_running(known):
        return True  # what is best where rows come and go is not best where they stay
    new, old = need.workload, known.workload
    is_longer = max(new.prompt_lens) > max(old.prompt_lens) or new.gen_len > old.gen_len
    has_more_rows = new.num_prompts > old.num_prompts and plan.block_size >= old.num_prompts
    return is_longer or has_more_rows or need.held_back > known.held_back


def _together(one: PlanNeed, other: PlanNeed) -> PlanNeed:
    """The larger value of each."""
    lengths = (sorted(need.workload.prompt_lens, reverse=True) for need in (one, other))
    longest = tuple(max(pair) for pair in zip_longest(*lengths, fillvalue=0))
    gen_len = max(one.workload.gen_len, other.workload.gen_len)
    return PlanNeed(Workload(longest, gen_len), max(one.held_back, other.held_back))
