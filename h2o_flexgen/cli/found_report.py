"""What a search has found, in lines and as JSON: the plan, why it is the best, what is to be expected, and what came next."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from h2o_flexgen.cli.asked_problem import system_share
from h2o_flexgen.cli.choose_model import ChosenModel
from h2o_flexgen.cli.page import page_width, table
from h2o_flexgen.cli.plan_flags import as_line, run_flags
from h2o_flexgen.cli.plan_report import NAMES, PlanReport
from h2o_flexgen.cli.predicted import Predicted
from h2o_flexgen.cli.why import Why
from h2o_flexgen.core.tiers import HOST
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.predict import Prediction
from h2o_flexgen.planning.search import NEAR, Candidate, Found, Problem
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.quant.codec import PLAIN

HEAD = ("block", "percent", "weights, KV as", "prefill s", "s/step", "tokens/s", "latency s")
RUN = "python -m h2o_flexgen.run"


@dataclass(frozen=True)
class FoundReport:
    problem: Problem
    found: Found
    args: Namespace
    chosen: ChosenModel
    search_seconds: float

    @property
    def best(self) -> Candidate:
        return self.found.best

    @property
    def title(self) -> str:
        problem = self.problem
        return f"{self.chosen.name} on {problem.machine.name}: prompts of {problem.prompt_len}, {problem.gen_len} generated"

    @cached_property
    def planned(self) -> WorkloadPlan:
        return self.problem.planned(self.best.plan, self.problem.prompts(self.best.plan))

    @property
    def first(self) -> BlockPlan:
        return self.planned.blocks.first

    @cached_property
    def plan_report(self) -> PlanReport:
        from h2o_flexgen.kernels.native import in_use  # imports torch, which is there by now

        problem = self.problem
        return PlanReport(
            model=self.chosen.name,
            dummy_weights=self.chosen.dummy_weights,
            requested=self.args.plan if self.args.evaluate else self.best.plan,
            planned=self.planned,
            budgets=problem.budgets,
            kernels=in_use(),
        )

    @cached_property
    def why(self) -> Why:
        return Why(self.problem, self.best, self.first, self.planned.footprint)

    @cached_property
    def flags(self) -> list[str]:
        return run_flags(self.best.plan, self.args)

    # -- lines ---------------------------------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        return [self._machine(), *self.plan_report.lines(), "", *self._expected(), *self._others()]

    def _machine(self) -> str:
        left = system_share(self.args, self.problem.machine)
        shares = " and ".join(f"{format_bytes(nbytes)} of {NAMES[tier]} memory" for tier, nbytes in left.items())
        return f"machine   {self.problem.machine.name}" + (f"; {shares} left to its system" if shares else "")

    def _expected(self) -> Iterator[str]:
        one, prediction = self.best, self.best.prediction
        yield from self.why.lines(with_more=not self.args.evaluate)
        yield (
            f"expected  prefill {prediction.prefill_seconds:.3f} s, {prediction.step_seconds:.4f} s a decode step, "
            f"{one.tokens_per_second:.3f} tokens/s, {one.block_seconds:.3f} s until a block is over"
        )
        yield f"run       {RUN} {as_line(self.flags)}"
        if one.plan.attend_on == HOST:
            yield "          with --cpu-cache-compute, which can be priced, but which the run command refuses"

    def _others(self) -> Iterator[str]:
        if self.args.evaluate:
            return
        yield f"searched  {self.found.cases} sizes and codecs in {self.search_seconds:.1f} s"
        if self.found.runners_up:
            near = f"next best (of what is within {NEAR:.0%} of each other, the soonest end has won):"
            yield from ("", near, *candidate_lines(self.found.runners_up))
        yield from ("", "from the soonest end to most tokens per second:", *candidate_lines(self.found.front))

    # -- JSON ----------------------------------------------------------------------------------------------------------

    def as_json(self) -> dict[str, object]:
        why = self.why
        return {
            **self.plan_report.as_json(),
            "predicted": self._predicted(self.best.prediction),
            "busiest_lane": why.busiest_lane,
            "lane_seconds_per_step": {lane: round(seconds, 6) for lane, seconds in why.lane_seconds.items()},
            "binding_tier": why.binding_tier,
            "runners_up": [candidate_json(one) for one in self.found.runners_up],
            "front": [candidate_json(one) for one in self.found.front],
            "flags": self.flags,
            "machine": self.problem.machine.name,
            "left_to_system_bytes": dict(system_share(self.args, self.problem.machine)),
            "cases": self.found.cases,
            "search_seconds": self.search_seconds,
        }

    def _predicted(self, one: Prediction) -> dict[str, object]:
        """As the run command has it, and beside that what it measures under the names that it gives it. Steps change slowly, so
        that their mean stands for the median."""
        return {
            **Predicted(one, self.problem.machine.name, self.problem.budgets).as_json(),
            "generated_tokens": one.generated_tokens,
            "step_seconds_median": round(one.step_seconds, 6),
            "block_seconds": round(self.best.block_seconds, 6),
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
    return [
        f"{plan.gpu_batch_size} x {plan.num_gpu_batches}",
        " ".join(f"{share:g}" for share in plan.percent),
        kept,
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
        "weight_codec": plan.weight_codec,
        "kv_codec": plan.kv_codec,
        "attend_on": plan.attend_on,
        "prefill_seconds": round(prediction.prefill_seconds, 6),
        "decode_seconds": round(prediction.decode_seconds, 6),
        "tokens_per_second": round(one.tokens_per_second, 3),
        "block_seconds": round(one.block_seconds, 6),
    }
