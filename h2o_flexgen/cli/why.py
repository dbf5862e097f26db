"""Why a plan is as fast as it is: the lane that is busiest in a step, and the tier whose memory is nearest to its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from h2o_flexgen.cli.plan_report import NAMES
from h2o_flexgen.core.tiers import DEVICE, HOST, TIERS
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.budgets import Budgets
from h2o_flexgen.planning.footprint import Footprint
from h2o_flexgen.planning.predict import sampled_steps, sum_of_steps
from h2o_flexgen.planning.pricing import SHARED_DISK, SHARED_MEMORY, Pricing
from h2o_flexgen.planning.search import Candidate, NoPlan, Problem, search

SHARED = {SHARED_DISK: "reads and writes share the disk", SHARED_MEMORY: "all that moves shares the memory of the host"}
BINDS = 0.9  # of a budget: below it something else than memory is what holds a plan back
MORE = 0.1  # memory, to see what it would change
WORTH_SAYING = 0.005


@dataclass(frozen=True)
class Why:
    problem: Problem
    best: Candidate
    first: BlockPlan
    needed: Footprint

    # -- lanes ---------------------------------------------------------------------------------------------------------

    @cached_property
    def pricing(self) -> Pricing:
        return Pricing(self.first, self.problem.machine, averaged=True)

    @cached_property
    def steps(self) -> list[int]:
        """Decode steps that stand for all of them; the prompts, where nothing more is generated."""
        return sampled_steps(self.first) or [0]

    @property
    def step_seconds(self) -> float:
        return self.best.prediction.step_seconds or self.best.block_seconds

    @cached_property
    def lane_seconds(self) -> Mapping[str, float]:
        """In a step, on average."""
        each = [self.pricing.lane_seconds(step) for step in self.steps]
        return {
            lane: self._mean([one.get(lane, 0.0) for one in each])
            for lane in dict.fromkeys(lane for one in each for lane in one)
        }

    def _mean(self, seconds: list[float]) -> float:
        return sum_of_steps(self.steps, seconds) / sum_of_steps(self.steps, [1.0] * len(seconds))

    @property
    def busiest_lane(self) -> str:
        return max(self.lane_seconds, key=lambda lane: self.lane_seconds[lane])

    @property
    def shared(self) -> str | None:
        """What several lanes share, where it takes longer than any of them alone."""
        bounds = [self.pricing.bounds(step) for step in self.steps]
        seconds = {name: self._mean([one[name] for one in bounds]) for name in SHARED}
        name = max(seconds, key=lambda name: seconds[name])
        return name if seconds[name] > 1.001 * max(self.lane_seconds.values()) else None

    # -- memory --------------------------------------------------------------------------------------------------------

    @property
    def budgets(self) -> Budgets:
        return self.problem.budgets

    @cached_property
    def fullness(self) -> Mapping[str, float]:
        """tier -> the share of its budget that is needed."""
        budgets = {tier: budget for tier in TIERS if (budget := self.budgets.of(tier))}
        return {tier: self.budgets.needs(self.needed, tier) / budget for tier, budget in budgets.items()}

    @property
    def binding_tier(self) -> str | None:
        return max(self.fullness, key=lambda tier: self.fullness[tier], default=None)

    @property
    def nothing_is_offloaded(self) -> bool:
        fastest, plan = DEVICE if self.problem.accelerator else HOST, self.best.plan
        return all(shares.of(fastest) == 1 for shares in (plan.weights, plan.kv, plan.hidden))

    @cached_property
    def with_more(self) -> float | None:
        """Tokens per second with more memory on the tier that binds: of blocks with as many batches, and the same codecs."""
        tier = self.binding_tier
        if tier is None or self.fullness[tier] < BINDS:
            return None
        budget = self.budgets.of(tier)
        assert budget is not None
        more = replace(self.budgets, **{tier: int((1 + MORE) * budget)})
        batches = (self.best.plan.num_gpu_batches,)
        plan, attend_on = self.best.plan, (self.best.plan.attend_on,)
        try:
            found = search(replace(self.problem, budgets=more, plan=plan, codecs=(), batches=batches, attend_on=attend_on))
        except NoPlan:
            return None
        return max(found.best.tokens_per_second, self.best.tokens_per_second)

    # -- in words ------------------------------------------------------------------------------------------------------

    def lines(self, with_more: bool) -> Iterator[str]:
        yield f"why       {self._lane_line()}"
        yield f"          {self._memory_line(with_more)}"

    def _lane_line(self) -> str:
        lane, step = self.busiest_lane, "decode step" if self.steps != [0] else "prefill"
        seconds = self.lane_seconds[lane]
        share = f"{100 * min(1.0, seconds / self.step_seconds):.0f} %"
        busy = f"{lane} is the busiest lane: {seconds:.3g} s of a {step}'s {self.step_seconds:.3g} s ({share})"
        return busy if self.shared is None else f"{busy}; {SHARED[self.shared]}"

    def _memory_line(self, with_more: bool) -> str:
        tier = self.binding_tier
        if tier is None:
            return "no memory has a limit"
        need, budget = self.budgets.needs(self.needed, tier), self.budgets.of(tier) or 0
        used = f"{NAMES[tier]} memory" if tier != "disk" else "the disk"
        used = f"{used} is fullest: {format_bytes(need)} of {format_bytes(budget)} ({100 * self.fullness[tier]:.0f} %)"
        if self.nothing_is_offloaded:
            return f"everything fits, nothing is offloaded; {used}"
        if not with_more or self.with_more is None:
            return used
        rate, now = self.with_more, self.best.tokens_per_second
        if rate < (1 + WORTH_SAYING) * now:
            return f"{used}; {100 * MORE:g} % more would change little"
        return f"{used}; with {100 * MORE:g} % more: {rate:.4g} tokens/s instead of {now:.4g}"
