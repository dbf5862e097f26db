"""PlanFinder: finds a plan for what a model is to generate, by a search, or without one where the answer is known. The
commands and LLM all ask here. AutoPlan is the plan of an LLM that has none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import zip_longest
from typing import Protocol

from h2o_flexgen.checkpoints.model_places import demo_folder
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.reports import OnStage
from h2o_flexgen.planning.footprint import MemoryLimits
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan, Shares
from h2o_flexgen.planning.plan_requirements import PlanNeed, PlanRequirements, PlanSubject
from h2o_flexgen.planning.search import (
    MOST_ROWS,
    Candidate,
    SearchProblem,
    SearchResult,
    refuse_what_never_fits,
    search,
    told_recall,
)
from h2o_flexgen.planning.working_space import LOGITS_AT_ONCE
from h2o_flexgen.planning.workload_plan import DoesNotFit
from h2o_flexgen.session.loaded_model import LoadedModel
from h2o_flexgen.session.machine_source import MachineSource

FASTEST = Shares(1.0, 0.0)
MOST_SEARCHES = 4  # with a limit of hundreds of MB, two left a tenth of a MB too little now and then
WITH_ROOM = "everything in the fastest memory, which has room to spare: nothing is searched, and no machine measured"


class PlannedModel(Protocol):
    """A model that plans are found for: it is open, or only its shapes are known."""

    @property
    def name(self) -> str: ...

    def subject_on(self, machine: Machine) -> PlanSubject: ...

    def adopt(self, plan: Plan) -> None: ...


@dataclass(frozen=True)
class PlanSearch:
    """A search that is done."""

    problem: SearchProblem
    result: SearchResult
    seconds: float

    def lines(self) -> Iterator[str]:
        machine, best = self.problem.machine, self.result.best
        yield f"machine   {machine.name}; its busiest part will be {best.prediction.busiest_lane}"
        yield f"found     in {self.seconds:.1f} s among {self.result.cases} sizes of batch and block"
        if recall := told_recall(self.problem, self.result):
            yield f"recall    {recall}"


@dataclass(frozen=True)
class FoundPlan:
    """A plan that a model has adopted."""

    search: PlanSearch | None  # None: nothing had to be searched, and no machine measured

    def lines(self) -> list[str]:
        return [f"plan      {WITH_ROOM}"] if self.search is None else [*self.search.lines()]


@dataclass(frozen=True)
class PlanFinder:
    asked: PlanRequirements
    model: PlannedModel
    machines: MachineSource

    def find(self, need: PlanNeed) -> FoundPlan:
        """Finds a plan and gives it to the model. What no machine could do is refused before this one is measured; it is not
        measured either where everything has room in the fastest memory."""
        with self._shown() as progress:
            plan = self._plan_with_room(self._possible(need), need) if self.machines.named is None else None
            if plan is None:
                return FoundPlan(self._searched(need, progress))
            self.model.adopt(plan)
            return FoundPlan(None)

    def search(self, need: PlanNeed) -> PlanSearch:
        """Searches in any case, for a caller that wants to know why a plan is the best."""
        with self._shown() as progress:
            self._possible(need)
            return self._searched(need, progress)

    def price(self, need: PlanNeed) -> PlanSearch:
        """The plan that is asked for, as if a search had found it."""
        with self._shown() as progress:
            self._refuse_what_does_not_fit(self._problem(need, self.machines.before_measuring()))
            problem = self._problem(need, self.machines.measured(progress))
            progress.stage("pricing the plan")
            begun = time.perf_counter()
            self._refuse_what_does_not_fit(problem)
            one = Candidate(problem.plan, problem.predict(problem.plan))
            return PlanSearch(problem, SearchResult(one, (), (one,), 0), time.perf_counter() - begun)

    def refuse_impossible(self, need: PlanNeed) -> None:
        """Refuses what no machine could do."""
        self._possible(need)

    def has_room(self, plan: Plan, need: PlanNeed) -> bool:
        """Whether a plan of the model fits what may be held."""
        return _fits(self._problem(need, self.machines.before_measuring()), plan)

    # -- steps -----------------------------------------------------------------------------------------------------------

    def _shown(self) -> Progress:
        return Progress(0, f"planning for {self.model.name}", late=True)

    def _problem(self, need: PlanNeed, machine: Machine) -> SearchProblem:
        return self.asked.problem(machine, self.model.subject_on(machine), need)

    def _possible(self, need: PlanNeed) -> SearchProblem:
        problem = self._problem(need, self.machines.before_measuring())
        refuse_what_never_fits(problem)
        return problem

    def _refuse_what_does_not_fit(self, problem: SearchProblem) -> None:
        problem.largest(problem.plan).refuse_what_does_not_fit(problem.limits)

    def _plan_with_room(self, problem: SearchProblem, need: PlanNeed) -> Plan | None:
        """A plan with all prompts in one block and everything in the fastest memory, if that takes no more than half of it: no
        search finds a better plan, so the machine need not be measured. None otherwise, or if a plan is asked for more than
        speed."""
        asked = self.asked
        if not asked.is_only_speed:
            return None
        fastest = replace(asked.plan, weights=FASTEST, kv=FASTEST, hidden=FASTEST)
        if not need.is_sample:
            fastest = _in_one_block(fastest, need.workload.num_prompts, asked.batch_sizes, asked.batches)
        elif demo_folder(self.model.name) is None:
            return None  # the search decides how many prompts make a good block
        return fastest if _fits(problem, fastest, problem.limits.with_half_free()) else None

    def _searched(self, need: PlanNeed, progress: Progress) -> PlanSearch:
        """A search leaves something in memory: if the plan lacks room for just that, the search is repeated with what is left.
        Each repetition leaves less than the one before."""
        machine = self.machines.measured(progress)
        progress.stage("searching")
        begun = time.perf_counter()
        for _ in range(MOST_SEARCHES):
            problem = self._problem(need, machine)
            found = search(problem)
            self.model.adopt(found.best.plan)
            if _fits(self._problem(need, machine), found.best.plan):
                break
        return PlanSearch(problem, found, time.perf_counter() - begun)


def _fits(problem: SearchProblem, plan: Plan, limits: MemoryLimits | None = None) -> bool:
    plan = plan.at(problem.site)
    return problem.planned(plan, problem.prompts(plan)).fits(limits or problem.limits)


def _in_one_block(plan: Plan, rows: int, sizes: tuple[int, ...], batches: tuple[int, ...]) -> Plan:
    """The plan with all rows in one block, in as few batches as allowed."""
    number = batches[0] if batches else -(-rows // (sizes[0] if sizes else MOST_ROWS))
    size = sizes[0] if sizes else min(MOST_ROWS, -(-rows // number))
    return replace(plan, gpu_batch_size=size, num_gpu_batches=number)


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
