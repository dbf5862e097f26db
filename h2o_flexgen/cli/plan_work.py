"""The work of the plan command: searches for the fastest plan, or prices a given one, and reports. The report of a search, in
lines and as JSON: the plan, why it is the best, what to expect of it, and the runners-up."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from h2o_flexgen.cli.pictures import draw_front, draw_timelines, two_steps
from h2o_flexgen.cli.plan_request import PlanRequest, plan_flags
from h2o_flexgen.cli.report import Entry, document_of, entry, lines_of, noted, table_of, told
from h2o_flexgen.cli.report.arithmetic import StoredWeights
from h2o_flexgen.cli.report.plan_report import PlanReport, Predicted, placed_bytes
from h2o_flexgen.cli.slow import buffers_reason, compute_reason, plan_reasons, say_slow
from h2o_flexgen.cli.terminal import say, say_document
from h2o_flexgen.core.site import DEVICE, DISK, HOST, TIER_NAMES, TIERS
from h2o_flexgen.core.units import format_bytes, format_seconds
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.resources import set_threads
from h2o_flexgen.kernels.native import processor
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.footprint import Footprint
from h2o_flexgen.planning.machine import BORROWED
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanNeed, PlanRequirements
from h2o_flexgen.planning.predict import BlockPrediction, Prediction, sampled_steps, sum_of_steps
from h2o_flexgen.planning.pricing import CHOSEN_LINK_PACE, SHARED_DISK, SHARED_MEMORY, Pricing
from h2o_flexgen.planning.search import Candidate, NoPlan, SearchProblem, SearchResult, rule_of, search, told_recall
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.schedule.ops import COMPUTE_LANE
from h2o_flexgen.session.machine_source import MachineSource
from h2o_flexgen.session.opened_model import ModelShapes, system_share
from h2o_flexgen.session.plan_finder import PlanFinder


def work(request: PlanRequest) -> None:
    set_threads(request.site.of_each.threads)  # measurements and the memory of kernels depend on their number
    machines = MachineSource.at_site(request.machine, request.site, request.model.dtype)
    shapes = ModelShapes(request.model, request.site, request.machine)
    if isinstance(plan := request.plan, Plan):
        found = PlanFinder(PlanRequirements(plan, attend_on=(plan.attend_on,)), shapes, machines).price(need_of(request))
    else:
        found = PlanFinder(plan, shapes, machines).search(need_of(request))
    found.result.best.plan.refuse_graphs(found.problem.site)  # a run would
    with Progress(0, f"planning for {request.model.name}", late=True) as progress:
        progress.stage("reporting")
        stored = StoredWeights.of(shapes.opened_on(found.problem.machine))
        beyond = [*request.site.beyond(machines.memory)]
        report = FoundReport(found.problem, found.result, request, round(found.seconds, 3), stored, beyond)
        lines, document = report.lines(), report.as_json()
        _draw(report)
    say(lines)
    say_slow(plan_reasons(report.planned, report.plan_report.arithmetic))
    say_slow(compute_reason(report.first, report.problem.machine))
    if not report.is_searched:
        say_slow(buffers_reason(report.planned, report.problem.machine, report.problem.limits))
    say_document(document)


def need_of(request: PlanRequest) -> PlanNeed:
    """What the process with most to do needs."""
    number = 1 if request.num_prompts is None else -(-request.num_prompts // request.site.gpus)
    workload = Workload.uniform(number, request.prompt_len, request.gen_len)
    return PlanNeed(workload, is_sample=request.num_prompts is None)


def _draw(report: FoundReport) -> None:
    request = report.request
    if request.plot is not None:
        draw_front(report.found, request.plot, report.title)
    if request.timeline is not None:
        trace = BlockPrediction.of(report.first, report.problem.machine).trace
        draw_timelines({"predicted": two_steps(trace)}, request.timeline, report.title, report.first.spec.layer_names)


# -- the report ------------------------------------------------------------------------------------------------------------

SMALL_RATES = dict(zip(BORROWED, ("small reads", "small writes"), strict=True))
SHARED = {SHARED_DISK: "reads and writes share the disk", SHARED_MEMORY: "all that moves shares CPU memory"}
BINDS = 0.9  # share of a limit below which something else than memory holds a plan back
MORE = 0.1  # share of memory that is added to see its effect
WORTH_SAYING = 0.005
MOST = 0.5  # share of a lane's time from which something else than its name says takes it
RUN = "python -m h2o_flexgen.run"


@dataclass(frozen=True)
class FoundReport:
    problem: SearchProblem
    found: SearchResult
    request: PlanRequest
    search_seconds: float
    stored: StoredWeights | None = None  # None: nothing was found but shapes
    beyond: Sequence[str] = ()  # lines on limits that are above what the machine has

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
            is_noise=request.model.dummy_weights,
            adapters=request.model.adapter,
            requested=request.plan if isinstance(request.plan, Plan) else self.found.best.plan,
            planned=self.planned,
            limits=self.problem.limits,
            processor=processor(self.problem.machine.device) if request.machine is None else None,
            named="" if request.machine is None else request.machine.name,
            stored=self.stored,
            measures_heads=request.model.measures_heads,
            beyond=self.beyond,
        )

    @cached_property
    def why(self) -> Why:
        return Why(self.problem, self.found.best, self.first, self.planned.footprint)

    @cached_property
    def flags(self) -> list[str]:
        return self.request.run_flags(self.found.best.plan)

    def lines(self) -> list[str]:
        return lines_of(self.entries())

    def as_json(self) -> dict[str, object]:
        return document_of(self.entries())

    def entries(self) -> Iterator[Entry]:
        yield self._of_machine()
        yield from self.plan_report.entries()
        yield from self._uncounted()
        yield told("")
        yield from self.why.entries(with_more=self.is_searched)
        yield from self._assumed()
        yield from self._expected()
        yield from self._searched()

    def _of_machine(self) -> Entry:
        name, left = self.problem.machine.name, dict(system_share(self.request.machine, self.request.site))
        shares = " and ".join(f"{format_bytes(nbytes)} of {TIER_NAMES[tier]} memory" for tier, nbytes in left.items())
        words = f"{name}; {shares} left to its system" if shares else name
        return entry("machine", words, machine=name, left_to_system_bytes=left)

    def _uncounted(self) -> Iterator[Entry]:
        """What a limit on the disk does not count, if one was given: weights, which lie there already, or in a copy that later
        runs find. Random ones are written for each run, so that it counts them."""
        on_disk = placed_bytes(self.first)["weights"][DISK]
        limit = self.request.site.disk_mem
        if limit is not None and on_disk and not self.problem.site.writes_weights:
            uncounted = f"--disk-mem {limit} does not count {format_bytes(on_disk)} of weights"
            copied = "of .bin files and of weights that no file has as the plan keeps them"
            copy = f"a copy in the cache, which is made once, {copied}, and takes room of its own"
            yield told(f"{uncounted}: they are read from the checkpoint's own files, or from {copy}")

    def _assumed(self) -> Iterator[Entry]:
        """What seconds of this plan are taken from another machine, or were measured on none."""
        machine, traffic = self.problem.machine, self.first.schedule.traffic
        if traffic.accelerator and traffic.reads_chosen:
            pace = f"chosen KV crosses the link at {CHOSEN_LINK_PACE:g} of its rate"
            yield entry("assumed", f"{pace}: no machine has figures of that")
        if machine.borrowed and any(traffic.in_pages(*place) for place in traffic.kv):
            rates = (f"{getattr(machine, name):,.0f} {SMALL_RATES[name]}" for name in machine.borrowed)
            lacking = f"{machine.name} has no {'figure' if len(machine.borrowed) == 1 else 'figures'} of its own"
            yield entry("assumed", f"{' and '.join(rates)} a second of the disk, as one machine has: {lacking}")

    def _expected(self) -> Iterator[Entry]:
        one, prediction, gpus = self.found.best, self.found.best.prediction, self.request.site.gpus
        yield entry(
            "expected",
            f"prefill {prediction.prefill_seconds:.3f} s {self._of_blocks}, "
            f"{prediction.step_seconds:.4f} s a decode step, {one.tokens_per_second:.3f} tokens/s, "
            f"{one.block_seconds:.3f} s until one block is over",
            predicted=self._predicted(prediction),
        )
        if gpus > 1:
            each = "each of them, beside the others; weights in CPU memory are held once"
            together = f"{gpus * one.tokens_per_second:.3f} tokens/s; all else is that of {each}"
            yield entry("together", f"{gpus} processes: {together}")
        yield entry("run", f"{RUN} {shlex.join(self.flags)}", flags=self.flags)

    @property
    def _of_blocks(self) -> str:
        count = len(self.planned.blocks)
        return "of the one block" if count == 1 else f"of all {count} blocks together"

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

    def _searched(self) -> Iterator[Entry]:
        """What else was found; nothing is told of it where a plan was given."""
        found, seconds = self.found, self.search_seconds
        equal, others = found.runners_up[: found.equals], found.runners_up[found.equals :]
        entries = [
            entry("searched", f"{found.cases} sizes and codecs in {seconds:.1f} s", cases=found.cases, search_seconds=seconds),
            entry("chosen", rule_of(self.problem)),
            *([entry("recall", recall)] if (recall := told_recall(self.problem, found)) else []),
            *self._table("counted as equal to it:", equal),
            *self._table("next best:", others),
            noted(runners_up=[*map(self._as_row, found.runners_up)]),
            *self._table("from the soonest end to most tokens per second:", found.front),
            noted(front=[*map(self._as_row, found.front)]),
        ]
        yield from entries if self.is_searched else (noted(**document_of(entries)),)

    def _as_row(self, one: Candidate) -> dict[str, object]:
        return {**document_of(candidate_entries(one)), "flags": self.request.run_flags(one.plan)}

    def _table(self, title: str, candidates: Sequence[Candidate]) -> Iterator[Entry]:
        if candidates:
            yield told("", title, *table_of([candidate_entries(one) for one in candidates]))


def candidate_entries(one: Candidate) -> list[Entry]:
    """A row of a table of plans; the labels are its head. The last column is what is typed to have the plan."""
    plan, prediction = one.plan, one.prediction
    prefill, block, rate = prediction.prefill_seconds, one.block_seconds, one.tokens_per_second
    return [
        entry("all prefills s", f"{prefill:.3f}", prefill_seconds=round(prefill, 6)),
        entry("s/step", f"{prediction.step_seconds:.4f}", decode_seconds=round(prediction.decode_seconds, 6)),
        entry("tokens/s", f"{rate:.3f}", tokens_per_second=round(rate, 3)),
        entry("one block s", f"{block:.3f}", block_seconds=round(block, 6)),
        noted(gpu_batch_size=plan.gpu_batch_size, num_gpu_batches=plan.num_gpu_batches, percent=list(plan.percent)),
        noted(slots=plan.buffers, prefill_tokens=plan.prefill_tokens, attend_on=plan.attend_on),
        noted(weight_codec=plan.weight_codec, kv_codec=plan.kv_codec, compute=plan.compute),
        entry("flags of the plan", shlex.join(plan_flags(plan))),
    ]


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

    @property
    def visits_share(self) -> float:
        """The share of the time for computing that is no arithmetic: what visits cost, whatever their rows."""
        return self._mean([self.pricing.visits_share(step) for step in self.steps])

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
        more = self.problem.limits.with_limit(tier, int((1 + MORE) * limit))
        batches = (self.best.plan.num_gpu_batches,)
        plan, attend_on = self.best.plan, (self.best.plan.attend_on,)
        try:
            same = replace(self.problem, plan=plan, codecs=(), computes=(), recalls=(), batches=batches, attend_on=attend_on)
            found = search(replace(same, limits=more, with_front=False))
        except NoPlan:
            return None
        return max(found.best.tokens_per_second, self.best.tokens_per_second)

    # -- in words ------------------------------------------------------------------------------------------------------

    def entries(self, with_more: bool) -> Iterator[Entry]:
        seconds = {lane: round(seconds, 6) for lane, seconds in self.lane_seconds.items()}
        words = (self._lane_line(), *self._prompt_lines(), self._memory_line(with_more))
        yield entry("why", words, busiest_lane=self.busiest_lane, lane_seconds_per_step=seconds, binding_tier=self.binding_tier)

    def _lane_line(self) -> str:
        lane, step = self.busiest_lane, "decode step" if self.steps != [0] else "prefill"
        seconds = self.lane_seconds[lane]
        share = f"{100 * min(1.0, seconds / self.step_seconds):.0f} %"
        busy = (
            f"{lane} is the busiest lane: {format_seconds(seconds)} of a {step}'s {format_seconds(self.step_seconds)} ({share})"
        )
        if lane == COMPUTE_LANE and self.visits_share > MOST:
            beside = f"{100 * self.visits_share:.0f} % of it is the cost of visits (a layer for a batch)"
            busy += f"; {beside}, the same for more rows in a batch"
        return busy if self.shared is None else f"{busy}; {SHARED[self.shared]}"

    def _prompt_lines(self) -> Iterator[str]:
        """What the prompts take, where that is most of the time: another lane may be the busiest one then."""
        prefill, total = self.best.prediction.prefill_seconds, self.best.prediction.total_seconds
        if self.steps != [0] and prefill > total / 2:
            lanes = self.pricing.lane_seconds(0)
            busiest = max(lanes, key=lambda lane: lanes[lane])
            takes = f"prompts take {format_seconds(prefill)} of all {format_seconds(total)}"
            yield f"{takes}, and {busiest} is the busiest lane there"

    def _memory_line(self, with_more: bool) -> str:
        tier = self.binding_tier
        if tier is None:
            return "no memory has a limit"
        need, limit = self.problem.limits.needs(self.needed, tier), self.problem.limits.of(tier) or 0
        used = f"{TIER_NAMES[tier]} memory" if tier != DISK else "the disk"
        used = f"{used} is fullest: {format_bytes(need)} of {format_bytes(limit)} ({100 * self.fullness[tier]:.0f} %)"
        if self.nothing_is_offloaded:
            return f"everything fits, nothing is offloaded; {used}"
        if not with_more or self.with_more is None:
            return used
        rate, now = self.with_more, self.best.tokens_per_second
        if rate < (1 + WORTH_SAYING) * now:
            return f"{used}; {100 * MORE:g} % more would change little"
        return f"{used}; with {100 * MORE:g} % more: {rate:.4g} tokens/s instead of {now:.4g}"
