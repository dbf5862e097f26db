"""The host's part of a decode step on a GPU: what Python and launches take beside the link, estimated without a GPU.

    python benchmarks/host.py                       # half a minute to two on one core
    python benchmarks/host.py --output benchmarks/results/host.json

Measured here, on this machine's processor: the executor's time for a task that does nothing; the engine's time for each op,
with a tiny model on a device that pretends to have memory of its own. Counted in the same runs: what a COMPUTE would launch
on a GPU. A call of a kernel of the table counts as stated below, any other operation of torch that is no view as one launch.
Then an ESTIMATE for every 4-bit plan of OPT-30B with weights that cross the link of a T4: the counted launches and tasks times
these seconds, slowed down to the host of such a GPU, beside what the link takes for the bytes of a step. What a launch takes
there, and how much slower its host is, are assumptions, and printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from benchmarks.comparison.command import commit
from h2o_flexgen.checkpoints.dummy import DummySource
from h2o_flexgen.core.files import write_text
from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.executor import Action, Executor
from h2o_flexgen.engine.head import Picker
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.formats.kernel_table import DECODE_ATTENTION, PRODUCT_OPS, TRITON, Kernel, kernels_of
from h2o_flexgen.kernels import operations
from h2o_flexgen.memory.device import Device, DeviceTier
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.models import create_model, known_config
from h2o_flexgen.planning.block_plan import BlockPlan, BlockPlans
from h2o_flexgen.planning.cost import Cost
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.profiling.measure import describe_machine
from h2o_flexgen.profiling.products import small_opt
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.sampling.sampler import Sampler
from h2o_flexgen.schedule.ops import Key, Op, Task
from h2o_flexgen.schedule.schedule import Schedule
from h2o_flexgen.text.tokenizer import ByteTokenizer

MODEL, PROMPT_LEN, GEN_LEN = "facebook/opt-30b", 512, 32
ROWS, BATCHES = 8, 4
TINY_WIDTH, TINY_BLOCKS, TINY_DTYPE = 64, 4, "bfloat16"
STEPS = 12  # of runs of the tiny model
RUNS = 3  # of an executor that does nothing
LAUNCHES_OF: Mapping[str, int] = {DECODE_ATTENTION: 2}  # parts of the slots side by side, and their sum; other kernels: 1
AIM = 0.2  # share of the link's time


@dataclass(frozen=True)
class GpuHost:
    """ASSUMPTIONS about the machine that is estimated."""

    name: str = "T4, 13 GB/s, beside 2 GHz Xeon cores"
    link_bytes_per_s: float = 13e9
    slower: float = 3.0  # how many times longer it takes for Python than the processor that was measured
    launch_us: float = 11.0  # of an operation of torch
    kernel_us: float = 25.0  # of a kernel compiled by Triton, launched from Python


PLANS: Mapping[str, Mapping[str, Any]] = {
    "4-bit weights": {"weight_codec": "group4"},
    "4-bit weights and KV": {"weight_codec": "group4", "kv_codec": "group4"},
    "4-bit weights, h2o 20 %": {"weight_codec": "group4", "kv_policy": "h2o", "kv_budget": 0.2},
    "4-bit both, h2o 20 %": {"weight_codec": "group4", "kv_codec": "group4", "kv_policy": "h2o", "kv_budget": 0.2},
}
PERCENTS = ((15, 85, 0, 100, 100, 0), (0, 100, 0, 100, 0, 100), (0, 100, 100, 0, 100, 0))


class Pretended(Device):
    """A device with memory of its own; its copies are over when the call returns."""

    accelerator = True

    def memory(self, host: HostTier) -> HostTier | DeviceTier:
        return DeviceTier(self.torch_device)


class Passed:
    """A marker that every thread has passed."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Marking(Pretended):
    """The same, where tasks are followed by markers as on a GPU; the driver's own time is not in them."""

    def mark(self, timed: bool = False, blocking: bool = False) -> Passed:
        return Passed()

    def seconds_between(self, start: object, end: object) -> float:
        return 0.0


# -- measuring -------------------------------------------------------------------------------------------------------------


def executor_us(schedule: Schedule) -> float:
    """Processor time of all threads for a task that does nothing, its making included: the median of some runs, as the
    first one makes things that stay, and threads get into each other's way in some."""
    return median(_one_run_us(schedule) for _ in range(RUNS))


def _one_run_us(schedule: Schedule) -> float:
    tasks = sum(1 for _ in schedule.tasks())
    executor = Executor(dict.fromkeys(Op, lambda task: 0), Marking(), schedule.ahead, times_all=False)
    begun = time.process_time()
    executor.run(schedule.tasks())
    return (time.process_time() - begun) / tasks * 1e6


class Counting(TorchDispatchMode):
    """Counts what would be launched."""

    def __init__(self) -> None:
        super().__init__()
        self.torch_launches = self.kernel_launches = self.inside = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.torch_launches += not self.inside and not func.is_view and "empty" not in str(func)
        return func(*args, **(kwargs or {}))

    def call(self, function: Callable[..., Any], launches: int, given: Sequence[Any]) -> Any:
        """Calls a kernel of the table."""
        self.inside += 1
        try:
            return function(*given)
        finally:
            self.inside -= 1
            self.kernel_launches += launches


class Timing:
    """Adds up what kernels of the table take here: on a GPU they take what a launch does."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def call(self, function: Callable[..., Any], launches: int, given: Sequence[Any]) -> Any:
        begun = time.thread_time()
        try:
            return function(*given)
        finally:
            self.seconds += time.thread_time() - begun


class Here(threading.local):
    """The watcher of the kernels that this thread calls."""

    watching: Counting | Timing | None = None


@contextmanager
def kernels_counted(here: Here) -> Iterator[None]:
    """A context in which calls of the table's kernels are counted by the watchers of their threads. The choice of kernels is
    time of the engine."""
    function_of = operations.function_of

    @cache
    def watched(kernel: Kernel) -> Callable[..., Any]:
        others = kernels_of(kernel.op, kernel.format)
        has_kernel = kernel.op in PRODUCT_OPS or any(TRITON in other.libraries for other in others)
        if not has_kernel:  # a GPU has the twin, whose launches are torch's
            return function_of(next((other for other in others if not other.libraries), kernel))
        function, launches = function_of(kernel), LAUNCHES_OF.get(kernel.op, 1)

        def call(*values: Any) -> Any:
            watching = here.watching
            return function(*values) if watching is None else watching.call(function, launches, values)

        return call

    with patch.object(operations, "function_of", watched):
        yield


@dataclass(frozen=True)
class Visit:
    """An op, or a COMPUTE of one kind of layer: medians over decode steps."""

    us: float  # without the table's kernels, with torch's operations on tiny values
    torch_launches: float
    kernel_launches: float


class Measured(Engine):
    """An engine that measures its actions: `counts` makes counts of launches, which takes time, instead of times."""

    counts = False
    watches = True  # calls of kernels, which takes time
    here = Here()

    def _actions(self, schedule: Schedule, state: Any) -> dict[Op, Action]:
        self.samples: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
        return {op: self._measured(action) for op, action in super()._actions(schedule, state).items()}

    def _measured(self, action: Action) -> Action:
        def timed(task: Task) -> int:
            self.here.watching = kernels = Timing()
            begun = time.thread_time()
            moved = action(task)
            self._keep(task, (time.thread_time() - begun - kernels.seconds, 0.0, 0.0))
            return moved

        def counted(task: Task) -> int:
            with Counting() as mode:
                self.here.watching = mode
                moved = action(task)
                self.here.watching = None
            self._keep(task, (0.0, mode.torch_launches, mode.kernel_launches))
            return moved

        return counted if self.counts else timed

    def _keep(self, task: Task, sample: tuple[float, float, float]) -> None:
        if task.step > 2:
            self.samples[kind_of(self._spec.layers, task)].append(sample)


def kind_of(layers: Sequence[Any], task: Task | Key) -> str:
    """The kind of a task: its op, or of a COMPUTE that of the layer."""
    layer = layers[task.layer]
    if task.op is not Op.COMPUTE:
        return str(task.op)
    return "embed" if layer.takes_tokens else "head" if layer.makes_logits else "attention" if layer.has_kv else "mlp"


class Counted(Measured):
    counts = True


def of_engine(plan: Plan) -> dict[str, Visit]:
    """Each kind of task of a plan, with a tiny model under it."""
    timed, counted = samples_of(Measured, plan), launches_of(plan)
    return {kind: Visit(_middle(timed[kind], 0) * 1e6, *counted[kind]) for kind in timed}


def launches_of(plan: Plan) -> dict[str, tuple[float, float]]:
    """Launches of torch and of kernels in each kind of task of a plan."""
    return {kind: (_middle(samples, 1), _middle(samples, 2)) for kind, samples in samples_of(Counted, plan).items()}


def samples_of(engine: type[Measured], plan: Plan) -> Mapping[str, Sequence[tuple[float, float, float]]]:
    """Seconds, launches of torch and of kernels, of all tasks of decode steps, by their kind."""
    model = small_opt(TINY_DTYPE, TINY_WIDTH, TINY_BLOCKS)
    model.spec = model.spec.written_as(plan.weight_codec, plan.kv_codec, plan.compute)
    workload = Workload.uniform(plan.block_size, 16, STEPS)
    planned = BlockPlans.of(model.spec, plan, workload, Site(accelerator=True)).first
    params, tokenizer = SamplingParams(max_tokens=STEPS, ignore_eos=True), ByteTokenizer(model.spec.vocab)
    rows = [RowState(row, [row % 50] * 16, params, tokenizer) for row in range(plan.block_size)]
    with tempfile.TemporaryDirectory() as folder:
        opened, source = Memories(Pretended(), Path(folder) / "o"), DummySource(0, TINY_DTYPE, Path(folder))
        with closing(opened) as memories, closing(source):
            made = engine(model, source, plan, memories)
            with kernels_counted(made.here) if engine.watches else nullcontext():
                made.run(planned, rows, Picker(Sampler(0)))
    return made.samples


def _middle(samples: Sequence[tuple[float, ...]], at: int) -> float:
    return sorted(one[at] for one in samples)[len(samples) // 2]


# -- estimating ------------------------------------------------------------------------------------------------------------


def planned_at_size(plan: Plan) -> BlockPlan:
    config = known_config(MODEL)
    assert config is not None
    spec = create_model(config, "float16", True, MODEL).spec.written_as(plan.weight_codec, plan.kv_codec, plan.compute)
    return BlockPlans.of(spec, plan, Workload.uniform(plan.block_size, PROMPT_LEN, GEN_LEN), Site(accelerator=True)).first


def estimate(planned: BlockPlan, task_us: float, visits: Mapping[str, Visit], host: GpuHost) -> dict[str, float]:
    """Seconds of a decode step in the middle: link and host, and what is launched in it."""
    cost, step = Cost(planned), GEN_LEN // 2
    moved: Counter[str] = Counter()
    seconds = torch_launches = kernel_launches = tasks = 0.0
    for key in planned.schedule.in_step(step):
        visit, parts = visits[kind_of(planned.spec.layers, key)], planned.schedule.parts(key.op)
        moved[key.op.lane] += cost.transfer_bytes(key)
        tasks += parts
        torch_launches += parts * visit.torch_launches
        kernel_launches += parts * visit.kernel_launches
        seconds += parts * (task_us + visit.us) * 1e-6 * host.slower
    launching = (torch_launches * host.launch_us + kernel_launches * host.kernel_us) * 1e-6
    link = max(moved["load"], moved["store"]) / host.link_bytes_per_s
    return {
        "link_seconds": link,
        "tasks": tasks,
        "host_seconds": seconds,
        "torch_launches": torch_launches,
        "kernel_launches": kernel_launches,
        "launch_seconds": launching,
        "share_of_link": (seconds + launching) / link,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="also write a JSON document here")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    host, result = GpuHost(), list[dict[str, Any]]()
    for name, options in PLANS.items():
        plan = Plan.create(gpu_batch_size=ROWS, num_gpu_batches=BATCHES, pin_weight=False, **options)
        visits: dict[str, Visit] = {}
        for percent in PERCENTS:
            visits = of_engine(plan.with_percent((0, 100, *percent[2:])))
            planned = planned_at_size(plan.with_percent(percent))
            task_us = executor_us(planned.schedule)
            figures = estimate(planned, task_us, visits, host)
            of_kinds = {kind: asdict(visit) for kind, visit in visits.items()}
            result.append({"plan": name, "percent": percent, "executor_us": task_us, **figures, "kinds": of_kinds})
    document = as_json(result, host)
    print_tables(document)
    if args.output:
        write_text(args.output, json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))
    return 0


def as_json(plans: Sequence[Mapping[str, Any]], host: GpuHost) -> dict[str, Any]:
    kinds = ", ".join(f"{kind} {one['us']:.0f}" for kind, one in plans[0]["kinds"].items())
    return {
        "benchmark": "host",
        "title": f"ESTIMATED: the host's part of a decode step of {MODEL}, {ROWS} rows x {BATCHES}, {PROMPT_LEN} + {GEN_LEN} "
        f"tokens, beside the link of a {host.name}",
        "command": "python benchmarks/host.py --output benchmarks/results/host.json",
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": describe_machine(Pretended()),
        "unit": "seconds per decode step",
        "ceiling": f"the link's seconds at {host.link_bytes_per_s / 1e9:g} GB/s; the aim is a share of {AIM:.0%}",
        "simulated": True,
        "assumed": asdict(host),
        "notes": "Measured on the processor that is named: microseconds of a task with a tiny model, for the first plan "
        f"{kinds}; executor us. Assumed: a host {host.slower:g} times as slow, {host.launch_us:g} us for a launch of torch and "
        f"{host.kernel_us:g} us for one of a kernel. Launches (of torch + of kernels) are counted. No GPU has run this.",
        "columns": ["plan", "percent", "executor us", "tasks", "launches", "link s", "host s", "launching s", "share"],
        "cells": [cells_of(one) for one in plans],
        "plans": list(plans),
    }


def cells_of(one: Mapping[str, Any]) -> list[str]:
    return [
        str(one["plan"]),
        " ".join(map(str, one["percent"])),
        f"{one['executor_us']:.0f}",
        f"{one['tasks']:.0f}",
        f"{one['torch_launches']:.0f} + {one['kernel_launches']:.0f}",
        f"{one['link_seconds']:.2f}",
        f"{one['host_seconds']:.3f}",
        f"{one['launch_seconds']:.3f}",
        f"{one['share_of_link']:.0%}",
    ]


def print_tables(document: Mapping[str, Any]) -> None:
    print(f"measured on {document['machine']['cpu']}, one thread of torch; estimated for {document['assumed']}\n")
    print("| kind of task | host us | launches of torch | of kernels |\n|---|--:|--:|--:|")
    for kind, one in document["plans"][0]["kinds"].items():
        print(f"| {kind} | {one['us']:.0f} | {one['torch_launches']:.0f} | {one['kernel_launches']:.0f} |")
    print(f"\n{document['title']}; the aim is {AIM:.0%}")
    print("| " + " | ".join(document["columns"]) + " |\n|---|---|" + "--:|" * 7)
    for row in document["cells"]:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    raise SystemExit(main())
