"""h2o_flexgen itself, under the plan that the request's options give."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.baselines.installed import versions_of
from benchmarks.baselines.made_up import is_made_up
from benchmarks.baselines.process import bytes_read, bytes_written, disk_seconds
from benchmarks.baselines.request import Answer, Ready, Request
from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.core.site import HOST
from h2o_flexgen.core.workload import Batch, Workload
from h2o_flexgen.formats.kernel_table import TORCH
from h2o_flexgen.kernels.native import in_use
from h2o_flexgen.planning.cost import Cost
from h2o_flexgen.planning.plan import Plan, Shares
from h2o_flexgen.planning.workload_plan import DoesNotFit, largest
from h2o_flexgen.schedule.ops import LOAD, Op, Task
from h2o_flexgen.text.given_texts import made_up_prompts

MOST_ROWS = 4096
ROWS_AT_ONCE = 256  # of a batch, where the options do not say
TILE = 32  # rows: products of 266 ran at 0.89 of the rate of 256
WARM_LAYERS, WARM_ROWS = (
    3,
    16,
)  # of each kind of layer one; Triton compiles anew only where 16 divide one number and not another
KEPT_FREE = 0.02  # of the cap, for what the kernel counts for the process besides its memory: page tables, files


@dataclass(frozen=True)
class System:
    loads_within_cap = True

    def missing(self, request: Request) -> str | None:
        if request.device == "cuda" and not torch.cuda.is_available():
            return "there is no CUDA device"
        if request.options.get("attend_on") == HOST and in_use() == TORCH:
            return "the processor attends too slowly without kernels in C: python setup.py build_ext --inplace makes them"
        return None

    def most_rows(self, request: Request) -> int:
        """By its own planner: nothing is loaded."""
        most = largest(partial(_fits, request), MOST_ROWS)
        return most if most < 2 * TILE else most // TILE * TILE

    def run(self, request: Request, ready: Ready) -> Answer:
        if "percent" not in request.options:
            with ProcessPoolExecutor(1, get_context("spawn")) as another:  # for what is left of many plans would take memory
                request = another.submit(with_residents, request).result()
        begun = time.perf_counter()
        with _opened(request, request.rows) as llm:
            for workload in workloads(llm.plan, request, request.rows):
                llm.check(workload)
            llm.generate(_prompts(llm, 1, request.prompt_len), _all(request.gen_len), stop_at=lambda _: True)  # only loads
            loaded = time.perf_counter() - begun
            if llm.device.accelerator:  # what a GPU's kernels are compiled for once is not what a run costs
                warm = _prompts(llm, llm.plan.gpu_batch_size % WARM_ROWS or WARM_ROWS, request.prompt_len)
                llm.generate(warm, _all(request.gen_len), stop_at=lambda task: task.layer > WARM_LAYERS, may_shrink=False)
            ready()
            prompts = steps = _Run.of(llm, request, request.prompt_len, request.gen_len)
            notes = ""
            if request.steps is not None and not _is_steady(llm.plan, request):
                steps = _Run.of(llm, request, request.middle, _behind_middle(request))
                notes = f"steps behind prompts of {request.middle} tokens"
            assert llm.stats is not None
            return Answer(
                versions={**versions_of(("h2o_flexgen", "torch")), "kernels": in_use()},
                placement=_placement(llm, request),
                load_seconds=loaded,
                prefill_seconds=prompts.prefill_seconds,
                step_seconds=steps.step_seconds,
                peak_host_bytes=llm.stats.peak_bytes["host"],
                read_bytes_per_step=steps.read_bytes / max(1, len(steps.step_seconds)),
                written_bytes_per_step=steps.written_bytes / max(1, len(steps.step_seconds)),
                notes=notes,
                disk_busy=steps.disk_busy,
                link_bytes_per_step=_link_bytes(llm, workloads(llm.plan, request, request.rows)[-1]),
            )


@dataclass(frozen=True)
class _Run:
    prefill_seconds: float
    step_seconds: tuple[float, ...]
    read_bytes: int  # in all steps
    written_bytes: int
    disk_busy: float | None  # a share of their time

    @classmethod
    def of(cls, llm: LLM, request: Request, prompt_len: int, gen_len: int) -> _Run:
        prompts = _prompts(llm, request.rows, prompt_len)
        wanted = gen_len - 1 if request.steps is None else 1 + request.steps  # the first is not timed, as for the peers
        begun: list[_Counts] = []

        def note(task: Task, _: int) -> None:
            if task.step == (1 if request.steps is None else 2) and not begun:
                begun.append(_Counts.now(request))

        def is_behind(task: Task) -> bool:
            return task.op is Op.COMPUTE and task.step > wanted

        stop_at = None if wanted == gen_len - 1 else is_behind
        llm.generate(prompts, _all(gen_len), on_visit=note, stop_at=stop_at, may_shrink=False)
        assert llm.stats is not None
        read, written, busy = _Counts.now(request).since(begun[0]) if begun else (0, 0, None)
        untimed = 0 if request.steps is None else 1
        return cls(llm.stats.prefill_seconds, llm.stats.step_seconds[untimed:wanted], read, written, busy)


class _Counts(NamedTuple):
    at: float
    read_bytes: int
    written_bytes: int
    disk_seconds: float | None

    @classmethod
    def now(cls, request: Request) -> _Counts:
        return cls(time.perf_counter(), bytes_read(), bytes_written(), disk_seconds(Path(request.checkpoint)))

    def since(self, begun: _Counts) -> tuple[int, int, float | None]:
        """The bytes that were read and written, and the share of the time in which the disk was busy."""
        read, written = self.read_bytes - begun.read_bytes, self.written_bytes - begun.written_bytes
        if self.disk_seconds is None or begun.disk_seconds is None:
            return read, written, None
        return read, written, (self.disk_seconds - begun.disk_seconds) / (self.at - begun.at)


def _link_bytes(llm: LLM, workload: Workload) -> float:
    """What has to be loaded to an accelerator in the first decode step, as planned."""
    if not llm.device.accelerator:
        return 0.0
    cost = Cost(llm.planned(workload).blocks.first)
    begun = takewhile(lambda task: not (task.op is Op.COMPUTE and task.step > 1), cost.schedule.tasks())
    return sum(cost.nbytes(task) for task in begun if task.lane == LOAD and task.step == 1)


def _prompts(llm: LLM, rows: int, length: int) -> list[list[int]]:
    return made_up_prompts(rows, length, llm.tokenizer, llm.spec.vocab)


def _all(gen_len: int) -> SamplingParams:
    return SamplingParams(max_tokens=gen_len, ignore_eos=True)


def plan_options(request: Request, rows: int) -> dict[str, Any]:
    """The options of a plan for so many rows."""
    options: dict[str, Any] = dict(request.options)
    at_once = min(rows, options.pop("rows_at_once", ROWS_AT_ONCE))
    batches = -(-rows // at_once)
    return {**options, "gpu_batch_size": -(-rows // batches), "num_gpu_batches": batches}


def _opened(request: Request, rows: int) -> LLM:
    host = None if request.host_bytes is None else int(request.host_bytes * (1 - KEPT_FREE))
    memory = {"cpu_mem": host, "gpu_mem": request.device_bytes, "offload_dir": Path(request.scratch)}
    named = {"dtype": request.dtype, "device": request.device, "dummy_weights": is_made_up(request.checkpoint)}
    return LLM(request.checkpoint, **named, **memory, **plan_options(request, rows))


def with_residents(request: Request) -> Request:
    """The request with as many whole percent of the weights in memory as fit beside the rest, where no placement is given. If
    rows have a state, as much of it comes first: a step reads and writes it, and weights are only read."""
    if "percent" in request.options:
        return request

    def with_shares(share: int, states: int | None) -> Request:
        state = {} if states is None else {"state": Shares(0.0, states / 100)}
        return replace(request, options={**request.options, **state, "percent": (0, share, 0, 100, 0, 100)})

    states = None
    if "state" not in request.options and _have_states(with_shares(0, None)):
        states = largest(lambda share: _fits(with_shares(0, share), request.rows), 100)
    return with_shares(largest(lambda share: _fits(with_shares(share, states), request.rows), 100), states)


def _have_states(request: Request) -> bool:
    with _opened(request, request.rows) as llm:
        return bool(llm.spec.state_layers)


def _fits(request: Request, rows: int) -> bool:
    with _opened(request, rows) as llm:
        try:
            for workload in workloads(llm.plan, request, rows):
                llm.check(workload)
        except DoesNotFit:
            return False
    return True


def workloads(plan: Plan, request: Request, rows: int) -> list[Workload]:
    """What is run: a shortened run may need the prompts of the middle of the text besides."""
    asked = [Workload.uniform(rows, request.prompt_len, request.gen_len)]
    if request.steps is not None and not _is_steady(plan, request):
        asked.append(Workload.uniform(rows, request.middle, _behind_middle(request)))
    return asked


def _behind_middle(request: Request) -> int:
    return request.gen_len - request.gen_len // 2


def _is_steady(plan: Plan, request: Request) -> bool:
    """Is as much held in the first decode step as in the last?"""
    batch = Batch((0,), (request.prompt_len,))
    occupancy = plan.policy.occupancy(batch, request.gen_len)
    return occupancy.held(1) == occupancy.held(request.gen_len - 1)


def _placement(llm: LLM, request: Request) -> str:
    shares = " ".join(f"{share:g}" for share in llm.plan.percent)
    plan = llm.plan
    graphs = ", graphs" if llm.device.accelerator and llm.stats is not None and llm.stats.replayed else ""
    batches = f"{plan.num_gpu_batches} x {plan.gpu_batch_size} rows"
    return f"--percent {shares}, {batches}, {plan.schedule}, {plan.buffers} buffers{graphs}"
