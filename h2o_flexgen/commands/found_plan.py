"""A plan that is found: the machine as it was profiled, and the best that the search has for a model and its prompts."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from h2o_flexgen.commands.asked_problem import four_bits
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.search import Found, Problem, search
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
    from h2o_flexgen.kernels.native import kernel_threads  # imports torch, which is there by now

    if machine.has_accelerator != llm.device.accelerator:
        raise ValueError(
            f"machine {machine.name!r} computes on {machine.device}, but this run on {llm.device.kind}; "
            "leave --machine out, or choose another --device"
        )
    problem = Problem(
        model=lambda plan: llm.plain_spec.written_as(plan.weight_codec, plan.kv_codec),
        workload=workload,
        prompt_len=prompt_len,
        gen_len=gen_len,
        plan=args.plan,
        machine=machine,
        budgets=llm.budgets,
        kernel_threads=0 if llm.device.accelerator else kernel_threads(),
        writes_weights=llm.dummy_weights,
        codecs=four_bits(args.plan) if args.allow_4bit else (),
        batch_sizes=_given(args, "gpu_batch_size"),
        batches=_given(args, "num_gpu_batches"),
        latency_limit=args.latency_limit,
        prefer=args.prefer,
    )
    begun = time.perf_counter()
    found = search(problem)
    return FoundPlan(machine, found, time.perf_counter() - begun)


def _given(args: Namespace, name: str) -> tuple[int, ...]:
    return () if name in args.searched else (getattr(args, name),)
