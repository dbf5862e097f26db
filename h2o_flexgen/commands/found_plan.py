"""A plan that is found for a model that is open, and its prompts."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from h2o_flexgen.commands.asked_problem import asked_problem
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.search import Found, search
from h2o_flexgen.planning.workload import Workload

if TYPE_CHECKING:
    from h2o_flexgen.llm import LLM


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


def find_plan(
    args: Namespace, llm: LLM, machine: Machine, workload: Workload | None, prompt_len: int, gen_len: int
) -> FoundPlan:
    """`workload`: of prompts that are given; without one as many will be made as the block takes."""
    problem = asked_problem(
        args,
        machine,
        model=lambda plan: llm.plain_spec.written_as(plan.weight_codec, plan.kv_codec),
        workload=workload,
        prompt_len=prompt_len,
        gen_len=gen_len,
        budgets=llm.budgets,
        writes_weights=llm.dummy_weights,
    )
    begun = time.perf_counter()
    found = search(problem)
    return FoundPlan(machine, found, time.perf_counter() - begun)
