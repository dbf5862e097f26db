"""PlanRequirements: what is asked of a plan that is to be found, and the problem that a search makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from h2o_flexgen.core.allowed_values import Bounds, Choice
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.option import check_options, option
from h2o_flexgen.core.site import DEVICE, HOST, Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.formats.kernel_table import EXACT
from h2o_flexgen.planning.footprint import MemoryLimits
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.positions import check_positions, check_rolling
from h2o_flexgen.planning.search import PREFERENCES, THROUGHPUT, SearchProblem

SECONDS = Bounds(0, 1e9, is_whole=False, without_least=True)


def refuse_to_search_pipelines(plan: Plan) -> None:
    if plan.pipeline > 1:
        asked = f"a pipeline of {plan.pipeline} devices"
        raise ValueError(f"{asked} is for a plan that is given, and none is searched for it; give six numbers as percent")


@dataclass(frozen=True)
class PlanNeed:
    """What a plan must have room for."""

    workload: Workload
    held_back: int = 0  # bytes of the fastest memory that the plan may not use
    is_sample: bool = False  # the workload is one prompt; the search decides how many of them make a block

    @property
    def prompt_len(self) -> int:
        return max(self.workload.prompt_lens)


@dataclass(frozen=True)
class PlanSubject:
    """What a plan is for: a model's sizes, and the memory and the site that it has."""

    model: Callable[[Plan], ModelSpec]  # its sizes under a plan
    limits: MemoryLimits
    site: Site

    def limits_less(self, held_back: int) -> MemoryLimits:
        """The limits with so many bytes less of the fastest memory."""
        tier = DEVICE if self.site.accelerator else HOST
        held = self.limits.of(tier)
        return self.limits if held is None else self.limits.with_limit(tier, held - held_back)


@dataclass(frozen=True)
class PlanRequirements:
    """The requirements of a plan, whatever the model, the prompts and the machine."""

    plan: Plan  # everything that is not searched: schedule, KV policy and its budget, buffers, codecs
    batch_sizes: tuple[int, ...] = ()  # the only sizes to choose from; empty: all
    batches: tuple[int, ...] = ()
    codecs: tuple[tuple[str, str], ...] = ()  # codecs of weights and KV that may replace the plan's
    computes: tuple[str, ...] = ()  # products that may replace the plan's where weights are packed
    recalls: tuple[float, ...] = ()  # shares of what is kept that decode steps may attend instead of the plan's
    buffers: tuple[int, ...] = ()  # numbers of buffers that may replace the plan's
    attend_on: tuple[str, ...] = (DEVICE, HOST)  # processors that may attend KV outside an accelerator in decode
    latency_limit: float | None = option(
        None, SECONDS, "SECONDS", "from the first prompt of a block to its last token (default: no limit)"
    )
    prefer: str = option(
        THROUGHPUT,
        Choice(PREFERENCES),
        text="what is best: most tokens per second, or the block that is over soonest",
    )

    def __post_init__(self) -> None:
        check_options(self, PlanRequirements)

    @property
    def may_change_answers(self) -> bool:
        return bool(self.codecs or self.computes or self.recalls)

    @property
    def is_only_speed(self) -> bool:
        return not self.may_change_answers and self.latency_limit is None and self.prefer == THROUGHPUT

    @property
    def first_plan(self) -> Plan:
        """The plan that a model is opened under until one is found. Of its products only some codecs may be capable."""
        return replace(self.plan, compute=EXACT) if self.codecs else self.plan

    def problem(self, machine: Machine, subject: PlanSubject, need: PlanNeed) -> SearchProblem:
        """The problem to search. What is visibly wrong without a search is refused here."""
        plan, workload = self.plan.at(subject.site), need.workload
        spec = self._checked(plan, subject.model)
        machine.flop_rate(spec.dtype, 1)  # refuses a type that was not measured there
        check_rolling(spec, plan)
        if workload.gen_lens is not None:
            for row, (length, grown) in enumerate(zip(workload.prompt_lens, workload.gen_lens)):
                check_positions(spec, plan, row, length, grown)
        else:
            for length, row in workload.first_of_length.items():
                check_positions(spec, plan, row, length, workload.gen_len)
        return SearchProblem(
            model=subject.model,
            workload=None if need.is_sample else workload,
            prompt_len=need.prompt_len,
            gen_len=workload.gen_len,
            plan=plan,
            machine=machine,
            limits=subject.limits_less(need.held_back),
            site=subject.site,
            codecs=tuple(pair for pair in self.codecs if spec.can_keep(pair[1])),
            computes=self.computes,
            recalls=self.recalls,
            buffers=() if plan.buffers == 1 or plan.has_own_buffers else self.buffers,  # without overlap there is one
            attend_on=self._attending(plan, spec),
            batch_sizes=self.batch_sizes,
            batches=self.batches,
            latency_limit=self.latency_limit,
            prefer=self.prefer,
        )

    def _attending(self, plan: Plan, spec: ModelSpec) -> tuple[str, ...]:
        """The allowed processors that can attend. Where the host attends under the plan, layers are cut there already."""
        if HOST not in self.attend_on or plan.attend_on == HOST or spec.can_attend_on_host:
            return self.attend_on
        return tuple(where for where in self.attend_on if where != HOST) or self.attend_on

    def _checked(self, plan: Plan, model: Callable[[Plan], ModelSpec]) -> ModelSpec:
        """The model's sizes under the plan. Products that none of the allowed codecs can have are refused."""
        codecs = dict.fromkeys((plan.weight_codec, *(weights for weights, _ in self.codecs)))
        specs = [model(replace(plan, weight_codec=codec, compute=EXACT)) for codec in codecs]
        for compute in (plan.compute, *self.computes):
            if not any(spec.can_compute(compute) for spec in specs):
                specs[0].refuse_to_compute(compute)
        return specs[0]
