"""What the processor takes to launch a decode step on a GPU, measured without one: Triton hands its kernels to a driver that
only counts them (pretended_driver.py), so that all is in it but the call of CUDA's own driver (about 1.5 us).

    python benchmarks/launches.py                   # a minute, of which most is compiling
    python benchmarks/launches.py --output benchmarks/results/launches.json

Calls: each kernel of a decode step at the sizes of OPT-6.7B, in microseconds of the processor for a call and for a launch, and
the tensors that a call makes. Visits: attention and MLP of a tiny model on a device with Triton's kernels, nothing recorded.
Operations of torch are in visits as a CPU does them on tiny values; on a GPU each is a launch of torch instead. Of a product of
torch there is but the memory of its outcome: a CPU takes tens of microseconds for a tiny one in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from benchmarks import host
from benchmarks.comparison.command import commit
from benchmarks.pretended_driver import PretendedDriver, pretend_a_gpu
from h2o_flexgen.core.files import write_text
from h2o_flexgen.engine.executor import Action
from h2o_flexgen.formats.grouped import TILE, Grouped, Tiled
from h2o_flexgen.formats.kernel_table import CUDA, HALVES, TRITON, Processor
from h2o_flexgen.formats.table import FORMATS, PLAIN
from h2o_flexgen.kernels import operations
from h2o_flexgen.kernels.append import RotationAngles
from h2o_flexgen.kernels.decode_attention import KVSlots
from h2o_flexgen.kernels.evict import Leaving, Newest, Notes
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.profiling.measure import describe_machine
from h2o_flexgen.sampling import sampler
from h2o_flexgen.schedule.ops import Task

ROWS, HEADS, SLOTS, DIM, WIDTH = 8, 32, 128, 128, 4096
CALLS, TURNS = 500, 5
AIM_OF_A_LAUNCH, AIM_OF_A_VISIT = 8.0, 150.0  # microseconds
PLANS = {
    "16 bits": {},
    "16 bits, h2o 20 %": {"kv_policy": "h2o", "kv_budget": 0.2},
    "4 bits": {"weight_codec": "group4", "kv_codec": "group4"},
    "4 bits, h2o 20 %": {"weight_codec": "group4", "kv_codec": "group4", "kv_policy": "h2o", "kv_budget": 0.2},
}
RESIDENT = (100, 0, 100, 0, 100, 0)


@dataclass(frozen=True)
class Call:
    name: str
    us: float
    launches: int
    tensors: int  # that are made

    @property
    def us_of_a_launch(self) -> float:
        return self.us / self.launches


class Made(TorchDispatchMode):
    """Counts what makes a tensor with memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.tensors += not func.is_view and "view" not in func.name()
        return func(*args, **(kwargs or {}))


# -- calls -----------------------------------------------------------------------------------------------------------------


def calls(driver: PretendedDriver) -> Iterator[Call]:
    for name, call in subjects():
        call()  # compiles
        before = driver.launched
        with Made() as made:
            call()
        launches = driver.launched - before
        yield Call(name, _us(call), launches, made.tensors)


def _us(call: Callable[[], object]) -> float:
    """Processor time of a call: the least of some turns, as others use the machine too."""
    turns = list[float]()
    for _ in range(TURNS):
        begun = time.thread_time()
        for _ in range(CALLS):
            call()
        turns.append((time.thread_time() - begun) / CALLS * 1e6)
    return min(turns)


def subjects() -> Iterator[tuple[str, Callable[[], object]]]:
    from h2o_flexgen.kernels.gpu import functions as gpu

    kernels = gpu.FUNCTIONS
    heads, x = empty(ROWS, 1, HEADS, DIM), empty(ROWS, WIDTH)
    numbers, places = empty(ROWS, dtype=torch.long), empty(ROWS, 1, 1, dtype=torch.long)
    newest, leaving = Newest(numbers, numbers, numbers, numbers[:, None]), Leaving(places, places, places)
    positions, noted = empty(ROWS, HEADS, SLOTS, dtype=torch.int32), empty(ROWS, HEADS, SLOTS, dtype=torch.float32)
    turn = RotationAngles(*(empty(ROWS, 1, 1, DIM // 2) for _ in range(2)))
    q = heads.view(ROWS, HEADS, 1, DIM)
    for codec in (PLAIN, "group8", "group4"):
        image = slots(codec)
        kept = [KVSlots(half, codec) for half in image]
        yield f"attention and sums, {codec} KV", lambda kept=kept: kernels["decode_attention"](q, *kept, numbers, noted)
    image, notes = slots(PLAIN), Notes(positions, noted)
    yield "newest token, rotated", lambda: kernels["append"](image, newest, heads, heads, heads, turn, notes)
    coded = slots("group4")
    yield (
        "newest token, rotated, in 4 bits",
        lambda: kernels["append_coded"](coded, newest, heads, heads, heads, turn, notes, None, Grouped(4)),
    )
    yield "eviction", lambda: kernels["evict"](image, notes, newest, leaving, noted, 1.0)
    yield "rotation", lambda: kernels["rotate"](heads, turn)
    four, rows = Grouped(4), heads.view(-1, DIM)
    coded = empty(len(rows), four.nbytes((DIM,), 2), dtype=torch.uint8)
    yield "4-bit KV encoded", lambda: kernels["group_encode"](four, rows, coded)
    yield "RMS norm", lambda: kernels["rms_norm"](x, x[0], 1e-6)
    tiles, data = Tiled(4), empty(WIDTH // TILE, Tiled(4).tile_bytes(WIDTH), dtype=torch.uint8)
    yield "product of 4-bit tiles", lambda: kernels["tile_product"](tiles, Factor(x), data, WIDTH, x[0])
    yield "three products of 4-bit tiles", lambda: kernels["tile_products"](tiles, Factor(x), [(data, WIDTH, x[0])] * 3)
    stored = FORMATS["q4_K"]
    blocks = empty(WIDTH, stored.nbytes((WIDTH, WIDTH), 2) // WIDTH, dtype=torch.uint8)
    yield "product of a checkpoint's q4_K", lambda: kernels["stored_product"](stored, Factor(x), blocks, WIDTH, x[0])


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def slots(codec: str) -> Tensor:
    """An image as it lies beside an accelerator: (2, rows, heads, slots, width)"""
    kind = torch.float16 if codec == PLAIN else torch.uint8
    width = FORMATS[codec].nbytes((DIM,), 2) // kind.itemsize
    return empty(SLOTS, 2, ROWS, HEADS, width, dtype=kind).permute(1, 2, 3, 0, 4)


# -- visits ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Visit:
    """A visit of a decode step: medians."""

    us: float
    kernels: float
    torch: float  # operations


def visits() -> dict[str, dict[str, Visit]]:
    """The visits of each plan, by their kind."""
    found = dict[str, dict[str, Visit]]()
    there = Processor(CUDA, TRITON, HALVES)
    as_a_gpu = patch.object(operations, "processor", lambda _: there)
    with as_a_gpu, patch.object(sampler, "_refuse_broken"):  # nothing is computed, so that logits are what lay there
        for name, options in PLANS.items():
            plan = Plan.create(gpu_batch_size=ROWS, num_gpu_batches=1, graphs="off", **options).with_percent(RESIDENT)
            with patch.object(functional, "linear", of_a_product):
                timed = host.samples_of(Visited, plan)
            counted = host.launches_of(plan)
            found[name] = {
                kind: Visit(median(us for us, *_ in timed[kind]) * 1e6, counted[kind][1], counted[kind][0])
                for kind in ("attention", "mlp")
            }
    return found


def of_a_product(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """The memory of its outcome."""
    return x.new_empty(*x.shape[:-1], matrix.shape[0])


class Visited(host.Measured):
    """An engine that measures its actions, with all launches."""

    watches = False

    def _measured(self, action: Action) -> Action:
        def timed(task: Task) -> Any:
            begun = time.thread_time()
            outcome = action(task)
            self._keep(task, (time.thread_time() - begun, 0.0, 0.0))
            return outcome

        return timed


# -- report ----------------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, help="of the GPU that is pretended")
    parser.add_argument("--output", help="also write a JSON document here")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        driver = pretend_a_gpu(Path(folder), args.capability)
        of_calls, of_visits = [*calls(driver)], visits()
    document = as_json(of_calls, of_visits)
    print_tables(document)
    if args.output:
        write_text(args.output, json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))
    return 0


def as_json(of_calls: Sequence[Call], of_visits: Mapping[str, Mapping[str, Visit]]) -> dict[str, Any]:
    cells = [[one.name, f"{one.us:.1f}", str(one.launches), f"{one.us_of_a_launch:.1f}", str(one.tensors)] for one in of_calls]
    cells += [
        [f"{kind} visit, {plan}", f"{visit.us:.0f}", f"{visit.kernels:.0f} + {visit.torch:.0f} of torch", "-", "-"]
        for plan, kinds in of_visits.items()
        for kind, visit in kinds.items()
    ]
    return {
        "benchmark": "launches",
        "title": f"The processor's time to launch a decode step of {ROWS} rows, without the call of CUDA's driver",
        "command": "python benchmarks/launches.py --output benchmarks/results/launches.json",
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": describe_machine(host.Pretended()) | {"triton": version("triton")},
        "unit": "microseconds of the processor",
        "ceiling": f"aims: {AIM_OF_A_LAUNCH:g} us for a launch, {AIM_OF_A_VISIT:g} us for a visit",
        "notes": "No GPU: kernels are compiled for one, and handed to a driver that counts them. Operations of torch are those "
        "of a CPU on tiny values, and its products only make their outcomes' memory.",
        "columns": ["what", "us", "launches", "us a launch", "tensors made"],
        "cells": cells,
        "calls": [asdict(one) for one in of_calls],
        "visits": {plan: {kind: asdict(visit) for kind, visit in kinds.items()} for plan, kinds in of_visits.items()},
    }


def print_tables(document: Mapping[str, Any]) -> None:
    print(f"{document['title']}; {document['ceiling']}")
    print("| " + " | ".join(document["columns"]) + " |\n|---|" + "--:|" * 4)
    for row in document["cells"]:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    raise SystemExit(main())
