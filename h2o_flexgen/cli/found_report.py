"""The report of a search, in lines and as JSON: the plan, why it is the best, what to expect of it, and the runners-up."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from h2o_flexgen.cli.asked_problem import system_share
from h2o_flexgen.cli.plan_report import NAMES, PlanReport, Predicted
from h2o_flexgen.cli.plan_request import PlanRequest
from h2o_flexgen.cli.stored_weights import StoredWeights
from h2o_flexgen.cli.terminal import page_width, table
from h2o_flexgen.core.tiers import DEVICE, HOST, TIERS
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.formats.kernel_table import EXACT
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.kernels.native import processor
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.footprint import Footprint
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements
from h2o_flexgen.planning.predict import Prediction, sampled_steps, sum_of_steps
from h2o_flexgen.planning.pricing import SHARED_DISK, SHARED_MEMORY, Pricing
from h2o_flexgen.planning.search import Candidate, NoPlan, SearchProblem, SearchResult, rule_of, search
from h2o_flexgen.planning.workload_plan import WorkloadPlan

HEAD = ("block", "percent", "buffers", "weights, KV as", "all prefills s", "s/step", "tokens/s", "one block s")
SHARED = {SHARED_DISK: "reads and writes share the disk", SHARED_MEMORY: "all that moves shares the memory of the host"}
BINDS = 0.9  # share of a limit below which something else than memory holds a plan back
MORE = 0.1  # share of memory that is added to see its effect
WORTH_SAYING = 0.005
RUN = "python -m h2o_flexgen.run"


@dataclass(frozen=True)
class FoundReport:
    problem: SearchProblem
    found: SearchResult
    request: PlanRequest
    search_seconds: float
    stored: StoredWeights | None = None  # None: nothing was found but shapes

    @property
    def title(self) -> str:
        problem = self.problem
        return (
            f"{self.request.model.name} on {problem.machine.name}: prompts of {problem.prompt_len}, {problem.gen_len} generated"
        )

    @property
    def is_searched(self) -> bool:
        return isinstance(self.request.plan, PlanRequirements)

    @cached_property
    def planned(self) -> WorkloadPlan:
        return self.problem.planned(self.found.best.plan, self.problem.prompts(self.found.best.plan))

    @property
    def first(self) -> BlockPlan:
        return self.planned.blocks.first

    @cached_property
    def plan_report(self) -> PlanReport:
        request = self.request
        return PlanReport(
            model=request.model.name,
            dummy_weights=request.model.dummy_weights,
            requested=request.plan if isinstance(request.plan, Plan) else self.found.best.plan,
            planned=self.planned,
            limits=self.problem.limits,
            processor=processor(self.problem.machine.device) if request.machine is None else None,
            stored=self.stored,
        )

    @cached_property
    def why(self) -> Why:
        return Why(self.problem, self.found.best, self.first, self.planned.footprint)

    @cached_property
    def flags(self) -> list[str]:
        return self.request.run_flags(self.found.best.plan)

    # -- lines ---------------------------------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        return [self._machine(), *self.plan_report.lines(), "", *self._expected(), *self._others()]

    def _machine(self) -> str:
        left = system_share(self.request.machine, self.request.site)
        shares = " and ".join(f"{format_bytes(nbytes)} of {NAMES[tier]} memory" for tier, nbytes in left.items())
        return f"machine   {self.problem.machine.name}" + (f"; {shares} left to its system" if shares else "")

    def _expected(self) -> Iterator[str]:
        one, prediction = self.found.best, self.found.best.prediction
        yield from self.why.lines(with_more=self.is_searched)
        yield (
            f"expected  prefill {prediction.prefill_seconds:.3f} s {self._of_blocks}, "
            f"{prediction.step_seconds:.4f} s a decode step, {one.tokens_per_second:.3f} tokens/s, "
            f"{one.block_seconds:.3f} s until one block is over"
        )
        if (gpus := self.request.site.gpus) > 1:
            each = "each of them, beside the others; weights in CPU memory are held once"
            yield f"together  {gpus} processes: {gpus * one.tokens_per_second:.3f} tokens/s; all else is that of {each}"
        yield f"run       {RUN} {shlex.join(self.flags)}"

    @property
    def _of_blocks(self) -> str:
        count = len(self.planned.blocks)
        return "of the one block" if count == 1 else f"of all {count} blocks together"

    def _others(self) -> Iterator[str]:
        if not self.is_searched:
            return
        yield f"searched  {self.found.cases} sizes and codecs in {self.search_seconds:.1f} s"
        yield f"chosen    {rule_of(self.problem)}"
        equal, others = self.found.runners_up[: self.found.equals], self.found.runners_up[self.found.equals :]
        for title, candidates in (("counted as equal to it:", equal), ("next best:", others)):
            if candidates:
                yield from ("", title, *candidate_lines(candidates))
        yield from ("", "from the soonest end to most tokens per second:", *candidate_lines(self.found.front))

    # -- JSON ----------------------------------------------------------------------------------------------------------

    def as_json(self) -> dict[str, object]:
        why = self.why
        return {
            **self.plan_report.as_json(),
            "predicted": self._predicted(self.found.best.prediction),
            "busiest_lane": why.busiest_lane,
            "lane_seconds_per_step": {lane: round(seconds, 6) for lane, seconds in why.lane_seconds.items()},
            "binding_tier": why.binding_tier,
            "runners_up": [candidate_json(one) for one in self.found.runners_up],
            "front": [candidate_json(one) for one in self.found.front],
            "flags": self.flags,
            "machine": self.problem.machine.name,
            "left_to_system_bytes": dict(system_share(self.request.machine, self.request.site)),
            "cases": self.found.cases,
            "search_seconds": self.search_seconds,
        }

    def _predicted(self, one: Prediction) -> dict[str, object]:
        """The prediction under the names that the run command measures by. Steps change slowly, so their mean stands for the
        median."""
        return {
            **Predicted(one, self.problem.machine.name, self.problem.limits).as_json(),
            "generated_tokens": one.generated_tokens,
            "gpus": self.request.site.gpus,
            "step_seconds_median": round(one.step_seconds, 6),
            "block_seconds": round(self.found.best.block_seconds, 6),
            "lanes": {
                lane: {"busy_seconds": round(seconds, 6), "busy_share": round(min(1.0, seconds / one.total_seconds), 4)}
                for lane, seconds in one.lane_seconds.items()
            },
        }


def candidate_lines(candidates: Iterable[Candidate]) -> list[str]:
    return table([HEAD, *(_row(one) for one in candidates)], page_width())


def _row(one: Candidate) -> list[str]:
    plan, prediction = one.plan, one.prediction
    kept = "as they are" if plan.weight_codec == plan.kv_codec == PLAIN else f"{plan.weight_codec}, {plan.kv_codec}"
    products = "" if plan.compute == EXACT else f"; {plan.compute}"
    return [
        f"{plan.gpu_batch_size} x {plan.num_gpu_batches}",
        " ".join(f"{share:g}" for share in plan.percent),
        str(plan.buffers),
        kept + products,
        f"{prediction.prefill_seconds:.3f}",
        f"{prediction.step_seconds:.4f}",
        f"{one.tokens_per_second:.3f}",
        f"{one.block_seconds:.3f}",
    ]


def candidate_json(one: Candidate) -> dict[str, object]:
    plan, prediction = one.plan, one.prediction
    return {
        "gpu_batch_size": plan.gpu_batch_size,
        "num_gpu_batches": plan.num_gpu_batches,
        "percent": list(plan.percent),
        "slots": plan.buffers,
        "weight_codec": plan.weight_codec,
        "kv_codec": plan.kv_codec,
        "compute": plan.compute,
        "attend_on": plan.attend_on,
        "prefill_seconds": round(prediction.prefill_seconds, 6),
        "decode_seconds": round(prediction.decode_seconds, 6),
        "tokens_per_second": round(one.tokens_per_second, 3),
        "block_seconds": round(one.block_seconds, 6),
    }


# -- why ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Why:
    """The reasons for a plan's speed: the busiest lane of a step, and the tier with the fullest memory."""

    problem: SearchProblem
    best: Candidate
    first: BlockPlan
    needed: Footprint

    # -- lanes ---------------------------------------------------------------------------------------------------------

    @cached_property
    def pricing(self) -> Pricing:
        return Pricing(self.first, self.problem.machine, averaged=True)

    @cached_property
    def steps(self) -> list[int]:
        """The decode steps that stand for all; the prompts if only they are computed."""
        return sampled_steps(self.first) or [0]

    @property
    def step_seconds(self) -> float:
        return self.best.prediction.step_seconds or self.best.block_seconds

    @cached_property
    def lane_seconds(self) -> Mapping[str, float]:
        """Seconds per lane in an average step."""
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
        """What several lanes share, if it takes longer than any of them alone."""
        bounds = [self.pricing.bounds(step) for step in self.steps]
        seconds = {name: self._mean([one[name] for one in bounds]) for name in SHARED}
        name = max(seconds, key=lambda name: seconds[name])
        return name if seconds[name] > 1.001 * max(self.lane_seconds.values()) else None

    # -- memory --------------------------------------------------------------------------------------------------------

    @cached_property
    def fullness(self) -> Mapping[str, float]:
        """The share of its limit that each tier needs."""
        limits = {tier: limit for tier in TIERS if (limit := self.problem.limits.of(tier))}
        return {tier: self.problem.limits.needs(self.needed, tier) / limit for tier, limit in limits.items()}

    @property
    def binding_tier(self) -> str | None:
        return max(self.fullness, key=lambda tier: self.fullness[tier], default=None)

    @property
    def nothing_is_offloaded(self) -> bool:
        fastest, plan = DEVICE if self.problem.accelerator else HOST, self.best.plan
        return all(shares.of(fastest) == 1 for shares in (plan.weights, plan.kv, plan.hidden))

    @cached_property
    def with_more(self) -> float | None:
        """Tokens per second with more memory on the tier that binds, with as many batches per block and the same codecs and
        products."""
        tier = self.binding_tier
        if tier is None or self.fullness[tier] < BINDS:
            return None
        limit = self.problem.limits.of(tier)
        assert limit is not None
        more = replace(self.problem.limits, **{tier: int((1 + MORE) * limit)})
        batches = (self.best.plan.num_gpu_batches,)
        plan, attend_on = self.best.plan, (self.best.plan.attend_on,)
        try:
            same = replace(self.problem, plan=plan, codecs=(), computes=(), batches=batches, attend_on=attend_on)
            found = search(replace(same, limits=more))
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
        need, limit = self.problem.limits.needs(self.needed, tier), self.problem.limits.of(tier) or 0
        used = f"{NAMES[tier]} memory" if tier != "disk" else "the disk"
        used = f"{used} is fullest: {format_bytes(need)} of {format_bytes(limit)} ({100 * self.fullness[tier]:.0f} %)"
        if self.nothing_is_offloaded:
            return f"everything fits, nothing is offloaded; {used}"
        if not with_more or self.with_more is None:
            return used
        rate, now = self.with_more, self.best.tokens_per_second
        if rate < (1 + WORTH_SAYING) * now:
            return f"{used}; {100 * MORE:g} % more would change little"
        return f"{used}; with {100 * MORE:g} % more: {rate:.4g} tokens/s instead of {now:.4g}"
