"""A plan that is found for a model that is open, and its prompts: searched, or known without a search."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from h2o_flexgen.commands.asked_problem import asked_problem, machine_before_profile
from h2o_flexgen.demo import demo_folder
from h2o_flexgen.planning.footprint import Request
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan, Shares
from h2o_flexgen.planning.search import MOST_ROWS, THROUGHPUT, Found, Problem, refuse_what_never_fits, search
from h2o_flexgen.planning.workload import Workload

if TYPE_CHECKING:
    from h2o_flexgen.llm import LLM

FASTEST = Shares(1.0, 0.0)


@dataclass(frozen=True)
class FoundPlan:
    machine: Machine
    found: Found
    seconds: float  # of searching

    @property
    def plan(self) -> Plan:
        return self.found.best.plan

    def lines(self) -> Iterator[str]:
        best = self.found.best
        yield f"machine   {self.machine.name}; its busiest part will be {best.prediction.busiest_lane}"
        yield f"found     in {self.seconds:.1f} s among {self.found.cases} sizes of batch and block"


@dataclass(frozen=True)
class Wish:
    """What is to be generated under a plan that is to be found."""

    args: Namespace
    llm: LLM
    workload: Workload | None  # of prompts that are given; without one as many will be made as the block takes
    prompt_len: int
    gen_len: int

    def refuse_impossible(self) -> None:
        """What no machine could do is refused before this one is measured."""
        refuse_what_never_fits(self._problem(machine_before_profile(self.args)))

    def find(self, machine: Machine) -> FoundPlan:
        """The plan is the model's when this returns. A search leaves something in memory: where that is what the plan has no
        room for, it is searched once more, with what is left."""
        begun = time.perf_counter()
        for is_last in (False, True):
            found = search(self._problem(machine))
            self.llm.adopt(found.best.plan)
            if is_last or self._fits(found.best.plan):
                break
        return FoundPlan(machine, found, time.perf_counter() - begun)

    def _fits(self, plan: Plan) -> bool:
        return self._request(plan).fits(self.llm.budgets)

    def _problem(self, machine: Machine) -> Problem:
        llm = self.llm
        return asked_problem(
            self.args,
            machine,
            model=llm.spec_under,
            workload=self.workload,
            prompt_len=self.prompt_len,
            gen_len=self.gen_len,
            budgets=llm.budgets,
            writes_weights=llm.dummy_weights,
        )

    def _request(self, plan: Plan) -> Request:
        workload = self.workload or Workload.uniform(plan.block_size, self.prompt_len, self.gen_len)
        return self.llm.request(workload, plan)

    # -- without a search ------------------------------------------------------------------------------------------------

    def plan_with_room(self) -> Plan | None:
        """All prompts in one block and everything in the fastest memory, where no more than half of it is needed for that: no
        search finds a better plan, so the machine need not be measured. None where it is not so, or where more is asked of a
        plan than to be fast."""
        args, usual = self.args, self.llm.requested
        if args.machine is not None or args.allow_4bit or args.latency_limit is not None or args.prefer != THROUGHPUT:
            return None
        fastest = replace(usual, weights=FASTEST, kv=FASTEST, hidden=FASTEST)
        if self.workload is not None:
            fastest = _in_one_block(fastest, self.workload.num_prompts, args.batch_sizes, args.batches)
        elif demo_folder(self.llm.name) is None:
            return None  # how many prompts make a good block is what is asked
        return fastest if self._request(fastest).fits(self.llm.budgets.with_half_free()) else None


def _in_one_block(plan: Plan, rows: int, sizes: tuple[int, ...], batches: tuple[int, ...]) -> Plan:
    """As few batches as there can be, where nobody says otherwise."""
    number = batches[0] if batches else -(-rows // (sizes[0] if sizes else MOST_ROWS))
    size = sizes[0] if sizes else min(MOST_ROWS, -(-rows // number))
    return replace(plan, gpu_batch_size=size, num_gpu_batches=number)
