"""The cost model beside figures that others published: FlexGen and H2O on a T4, priced under their own plans and loop.

    python benchmarks/published.py                         # the table
    python benchmarks/published.py --output benchmarks/results/published-t4.json
    python benchmarks/published.py --gpus --output benchmarks/results/published-gpus.json

Nothing is run, and no constant belongs to a single row: all rates are in configs/machines/t4-gcp.yaml, all plans are the flags
that were published. Most of the published runs did not go to their end: they projected a decode from its first steps. What is
compared is then the same projection, and the whole run stands beside it. Then the same plans in this engine's schedule.

With --gpus: three of the plans on a T4 and on other GPUs, priced with this engine's kernels at their stated shares and with
counted launches (benchmarks/stated.py). These are ESTIMATES, and their assumptions are printed with them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from benchmarks.comparison.command import commit
from benchmarks.stated import LaunchCost, Launches, counted_launches, quick_host, slow_host, stated_shares, with_kernels
from h2o_flexgen.core.files import write_text
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.site import DEVICE, DISK, HOST, TIERS, Site
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.core.workload import MOST_TOKENS, Workload
from h2o_flexgen.models import create_model, known_config
from h2o_flexgen.planning.footprint import MemoryLimits, left_to_system
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.predict import Prediction, predict
from h2o_flexgen.planning.workload_plan import WorkloadPlan

MACHINES = Path(__file__).resolve().parents[1] / "configs" / "machines"
MACHINE = MACHINES / "t4-gcp.yaml"
TOLERANCE = 0.2  # share of a published figure
THEIRS, OURS = "flexgen_barrier", "zigzag"
FIRST_STEP = 3  # tokens of a run of which the first step counts; another step follows it
WHOLE_BATCH = MOST_TOKENS  # the original computes the prompts of a batch at once

FLEXGEN = "FlexGen, paper and README; flags: bench_suite.py of FlexLLMGen"
ABLATION = "FlexGen, ablation in the paper; flags: bench_suite.py of FlexLLMGen"
REMARK = "FlexGen, remarks in bench_suite.py of FlexLLMGen"
H2O = "H2O, paper; flags: h2o_suite.py of its repository"
LOG = "H2O, logs in its repository"

ON_DEVICE, MOSTLY_HOST, ON_HOST = (100, 0, 100, 0, 100, 0), (20, 80, 0, 100, 0, 100), (0, 100, 0, 100, 0, 100)
HALF_ON_DISK = (0, 50, 0, 0, 0, 100)
BESIDE_KV: Mapping[str, Any] = {"attend_on": HOST}
UNPINNED: Mapping[str, Any] = {"pin_weight": False}
BESIDE_KV_UNPINNED: Mapping[str, Any] = {**BESIDE_KV, **UNPINNED}
PACKED_WEIGHTS: Mapping[str, Any] = {"weight_codec": "group4"}
PACKED_KV: Mapping[str, Any] = {"kv_codec": "group4"}

SAME_RUN = "the same plan stands in FlexGen's table with 25.26; H2O's fork does not warm up, and its first prompts pay for that"
IN_TURN = "here a layer's bytes from the disk and from the host come one after the other, there beside each other"
UNPINNED_KV = "FlexGen's KV is not page-locked, and every load of it is copied once more; here KV crosses as pinned memory does"
DECODED_AGAIN = (
    "FlexGen decodes packed weights anew for each of the three batches; this engine, and so its price, once for a layer"
)


@dataclass(frozen=True)
class Published:
    """A row of a published table."""

    source: str
    name: str
    model: str
    batches: tuple[int, int]  # rows of a batch, and number of batches
    percent: tuple[int, ...]
    lengths: tuple[int, int]  # tokens of the prompt, and to generate
    tokens_per_second: float
    options: Mapping[str, Any] = field(default_factory=dict)
    ran_tokens: int | None = None  # tokens that the decode was projected from; None: it was run to its end
    outside: tuple[float, str] | None = None  # where the tolerance is missed: how far the ratio may go, and why
    seconds: tuple[float, float] | None = None  # seconds of prompts and of the decode, if they are known too

    @property
    def rows(self) -> int:
        return self.batches[0] * self.batches[1]

    @property
    def band(self) -> tuple[float, float]:
        """The range that the ratio of priced to published must lie in."""
        far = 1.0 if self.outside is None else self.outside[0]
        return min(1 - TOLERANCE, far), max(1 + TOLERANCE, far)

    @property
    def placed_percent(self) -> tuple[float, ...]:
        """The percents that came of those that were asked for: weights lay where FlexGen's rule puts them."""
        return (*placed_by_their_rule(spec_of(self.model, Plan()), self.percent[:2]), *self.percent[2:])

    def plan(self, schedule: str, **options: Any) -> Plan:
        """The plan that was run, with its weights where they lay."""
        size, count = self.batches
        whole = {"prefill_tokens": WHOLE_BATCH} if schedule == THEIRS else {}
        options = {**self.options, **whole, "schedule": schedule, **options}
        return Plan.create(gpu_batch_size=size, num_gpu_batches=count, **options).with_percent(self.placed_percent)

    def planned(self, plan: Plan, gen_len: int | None = None) -> WorkloadPlan:
        workload = Workload.uniform(self.rows, self.lengths[0], gen_len or self.lengths[1])
        return WorkloadPlan(spec_of(self.model, plan), plan, workload, Site(accelerator=True))

    def predict(self, machine: Machine, plan: Plan, gen_len: int | None = None) -> Prediction:
        return predict(self.planned(plan, gen_len), machine)


def _h2o(ratio: float, attend_on: str | None = None) -> dict[str, Any]:
    beside = {} if attend_on is None else {"attend_on": attend_on}
    return {"kv_policy": "h2o-flexgen", "hh_ratio": ratio, **beside}


ROWS = (
    Published(FLEXGEN, "FlexGen", "opt-6.7b", (2, 1), ON_DEVICE, (512, 32), 25.26, seconds=(0.91, 1.62)),
    Published(
        FLEXGEN, "FlexGen", "opt-30b", (48, 3), MOSTLY_HOST, (512, 32), 7.32, BESIDE_KV, FIRST_STEP, seconds=(242.0, 387.5)
    ),
    Published(
        FLEXGEN,
        "FlexGen",
        "opt-175b",
        (32, 8),
        HALF_ON_DISK,
        (512, 32),
        0.69,
        BESIDE_KV_UNPINNED,
        FIRST_STEP,
        seconds=(2311.0, 9561.4),
    ),
    Published(FLEXGEN, "FlexGen, 4 bits", "opt-6.7b", (72, 1), ON_DEVICE, (512, 32), 29.12, {**PACKED_WEIGHTS, **PACKED_KV}),
    Published(FLEXGEN, "FlexGen, 4-bit KV", "opt-30b", (64, 8), ON_HOST, (512, 32), 8.38, PACKED_KV, FIRST_STEP),
    Published(
        FLEXGEN,
        "FlexGen, 4 bits",
        "opt-175b",
        (48, 3),
        ON_HOST,
        (512, 32),
        1.12,
        {**PACKED_WEIGHTS, **PACKED_KV, **UNPINNED},
        FIRST_STEP,
        (1.4, DECODED_AGAIN),
    ),
    Published(REMARK, "FlexGen", "opt-6.7b", (4, 1), ON_DEVICE, (256, 32), 53.29),
    Published(REMARK, "FlexGen", "opt-30b", (160, 2), (10, 90, 0, 100, 0, 100), (256, 32), 16.01, BESIDE_KV, FIRST_STEP),
    Published(REMARK, "FlexGen", "opt-175b", (64, 8), HALF_ON_DISK, (256, 32), 1.36, BESIDE_KV_UNPINNED, FIRST_STEP),
    Published(
        ABLATION,
        "no search",
        "opt-175b",
        (32, 1),
        HALF_ON_DISK,
        (512, 32),
        0.27,
        BESIDE_KV_UNPINNED,
        FIRST_STEP,
        (0.7, IN_TURN),
    ),
    Published(ABLATION, "no CPU attention", "opt-175b", (32, 8), HALF_ON_DISK, (512, 32), 0.62, UNPINNED, FIRST_STEP),
    Published(
        ABLATION, "no CPU attention", "opt-30b", (48, 3), MOSTLY_HOST, (512, 32), 4.03, {}, FIRST_STEP, (2.0, UNPINNED_KV)
    ),
    Published(ABLATION, "DeepSpeed's plan", "opt-30b", (8, 1), (0, 100, 100, 0, 100, 0), (512, 32), 1.57, {}, FIRST_STEP),
    Published(H2O, "FlexGen", "opt-6.7b", (2, 1), ON_DEVICE, (512, 32), 20.2, {}, 8, (1.4, SAME_RUN)),
    Published(H2O, "FlexGen", "opt-6.7b", (1, 1), ON_DEVICE, (512, 512), 16.8, {}, 128),
    Published(H2O, "FlexGen", "opt-6.7b", (1, 1), ON_DEVICE, (512, 1024), 16.9, {}, 128),
    Published(H2O, "FlexGen", "opt-30b", (48, 3), MOSTLY_HOST, (512, 32), 8.1, BESIDE_KV, FIRST_STEP),
    Published(H2O, "FlexGen", "opt-30b", (40, 2), MOSTLY_HOST, (512, 512), 8.5, BESIDE_KV, FIRST_STEP),
    Published(H2O, "FlexGen", "opt-30b", (48, 1), MOSTLY_HOST, (512, 1024), 7.1, BESIDE_KV, FIRST_STEP),
    Published(H2O, "H2O", "opt-6.7b", (4, 1), ON_DEVICE, (512, 32), 35.1, _h2o(0.1), 8),
    Published(H2O, "H2O", "opt-6.7b", (4, 1), ON_DEVICE, (512, 512), 51.7, _h2o(0.2), 128),
    Published(H2O, "H2O", "opt-6.7b", (4, 1), ON_DEVICE, (512, 1024), 52.1, _h2o(0.3), 128),
    Published(
        H2O, "H2O", "opt-30b", (52, 14), ON_HOST, (512, 32), 12.7, _h2o(0.1, HOST), FIRST_STEP, seconds=(1052.874, 787.918)
    ),
    Published(
        H2O, "H2O", "opt-30b", (52, 8), ON_HOST, (512, 512), 18.83, _h2o(0.2, HOST), FIRST_STEP, seconds=(609.548, 10704.99)
    ),
    Published(
        H2O, "H2O", "opt-30b", (44, 6), ON_HOST, (512, 1024), 13.82, _h2o(0.3, HOST), FIRST_STEP, seconds=(394.668, 19165.562)
    ),
    Published(
        LOG, "H2O", "opt-30b", (48, 16), MOSTLY_HOST, (512, 32), 14.338, _h2o(0.1, HOST), FIRST_STEP, seconds=(975.97, 738.045)
    ),
    Published(
        LOG,
        "H2O",
        "opt-30b",
        (40, 10),
        MOSTLY_HOST,
        (512, 512),
        18.181,
        _h2o(0.2, HOST),
        FIRST_STEP,
        seconds=(511.514, 10753.118),
    ),
    Published(
        LOG,
        "H2O",
        "opt-30b",
        (40, 7),
        MOSTLY_HOST,
        (512, 1024),
        14.797,
        _h2o(0.3, HOST),
        FIRST_STEP,
        seconds=(363.278, 19014.146),
    ),
    Published(H2O, "H2O, 4-bit weights", "opt-6.7b", (70, 1), ON_DEVICE, (512, 32), 50.5, {**_h2o(0.1), **PACKED_WEIGHTS}),
    Published(
        H2O, "H2O, 4-bit weights", "opt-6.7b", (52, 1), ON_DEVICE, (512, 512), 72.5, {**_h2o(0.2), **PACKED_WEIGHTS}, 128
    ),
    Published(
        H2O, "H2O, 4-bit weights", "opt-6.7b", (44, 1), ON_DEVICE, (512, 1024), 62.3, {**_h2o(0.3), **PACKED_WEIGHTS}, 128
    ),
)


# -- what was placed ---------------------------------------------------------------------------------------------------------


def placed_by_their_rule(spec: ModelSpec, asked: tuple[int, ...]) -> tuple[float, float]:
    """Per cent of OPT's weights that FlexGen has on the GPU and on the host where so many were asked for. A tensor goes whole
    to the disk, to the host or to the GPU, by the place of its middle among the values of its layer: first comes the share of
    the disk, last that of the GPU. So of an attention's four matrices one is on the GPU from 12.5 per cent on."""
    on_device, on_host = asked
    placed = dict.fromkeys(TIERS, 0)
    for sizes, count in their_layers(spec):
        before, total = 0, sum(sizes)
        for size in sizes:
            middle = 100 * (before + size / 2) / total
            tier = DISK if middle < 100 - on_device - on_host else HOST if middle < 100 - on_device else DEVICE
            placed[tier] += count * size
            before += size
    total = sum(placed.values())
    return round(100 * placed[DEVICE] / total, 2), round(100 * placed[HOST] / total, 2)


def their_layers(spec: ModelSpec) -> Iterator[tuple[list[int], int]]:
    """The values of the tensors of each kind of layer, in their order there, and how many layers of the kind there are: the
    embedding, attentions of four matrices and a norm, MLPs of two and a norm, and the head, which has a table of its own."""
    width, inner, table = spec.width, spec.ffn, spec.vocab * spec.width
    yield [table, (spec.max_positions + 2) * width], 1
    yield [width * width, width] * 4 + [width, width], spec.num_blocks
    yield [inner * width, inner, width * inner, width, width, width], spec.num_blocks
    yield [width, width, table], 1


# -- pricing ---------------------------------------------------------------------------------------------------------------


def spec_of(model: str, plan: Plan) -> ModelSpec:
    config = known_config(f"facebook/{model}")
    assert config is not None
    spec = create_model(config, "float16", True, model).spec
    spec = spec.cut_at_attention() if plan.attend_on == HOST else spec
    return spec.written_as(plan.weight_codec, plan.kv_codec, plan.compute)


def as_published(row: Published, machine: Machine) -> dict[str, float]:
    """The price projected from as many steps as the published run had."""
    ran = row.predict(machine, row.plan(THEIRS), row.ran_tokens)
    seconds = ran.prefill_seconds + (row.lengths[1] - 1) * ran.step_seconds
    figure = row.rows * row.lengths[1] / seconds
    return {
        "priced_tokens_per_second": figure,
        "ratio": figure / row.tokens_per_second,
        "prefill_seconds": ran.prefill_seconds,
        "step_seconds": ran.step_seconds,
    }


def to_its_end(row: Published, machine: Machine) -> dict[str, float]:
    return {"whole_run_tokens_per_second": row.predict(machine, row.plan(THEIRS)).tokens_per_second}


def compared(row: Published, machine: Machine) -> Iterator[dict[str, Any]]:
    """The same plan in their loop and in this engine's schedule, to its end, attended beside the KV or on the device."""
    tiers = (DEVICE,) if row.percent[2] == 100 else (HOST, DEVICE)
    for schedule in (THEIRS, OURS):
        for tier in tiers:
            found = row.predict(machine, row.plan(schedule, attend_on=tier))
            yield {
                "schedule": schedule,
                "attend_on": tier,
                "tokens_per_second": found.tokens_per_second,
                "prefill_seconds": found.prefill_seconds,
                "step_seconds": found.step_seconds,
                "busiest_lane": found.busiest_lane,
                "busiest_lane_share": found.lane_seconds[found.busiest_lane] / found.total_seconds,
            }


def is_compared(row: Published) -> bool:
    return row.name in ("FlexGen", "H2O") and row.source in (FLEXGEN, H2O) and row.model != "opt-6.7b"


# -- on other machines, with this engine's kernels ---------------------------------------------------------------------------

GPUS: Mapping[str, LaunchCost] = {"t4-gcp": slow_host()} | dict.fromkeys(
    ("rtx-4090-pcie4", "a100-80gb", "h100", "h200"), quick_host()
)
SMALLER: Mapping[str, Any] = {**PACKED_WEIGHTS, **PACKED_KV, "kv_policy": "h2o", "kv_budget": 0.2}
IN_16_BITS, PACKED_AND_KEPT = "16 bits", "4 bits, h2o 20 %"
WAYS: Mapping[str, tuple[str, Mapping[str, Any], bool]] = {  # schedule, options, and whether all is on the GPU
    f"FlexGen's loop, {IN_16_BITS}": (THEIRS, {}, False),
    f"zig-zag, {IN_16_BITS}": (OURS, {}, False),
    f"zig-zag, {PACKED_AND_KEPT}": (OURS, SMALLER, False),
    f"zig-zag, {PACKED_AND_KEPT}, all on the GPU": (OURS, SMALLER, True),
}


def priced_on_gpus(rows: Sequence[Published]) -> Iterator[dict[str, Any]]:
    for row in rows:
        for name, (schedule, options, resident) in WAYS.items():
            if row.percent == ON_DEVICE and resident:
                continue  # it is the way before
            plan = row.plan(schedule, **{"prefill_tokens": Plan.prefill_tokens, **options})
            for gpu, cost in GPUS.items():
                found = priced_on(row, plan, gpu, cost, resident)
                asked = {"model": row.model, "batches": row.batches, "lengths": row.lengths, "way": name}
                yield {**asked, "machine": gpu, "launches_of_a_block": launches_of(plan).of_a_block, **found}


def priced_on(row: Published, plan: Plan, gpu: str, cost: LaunchCost, resident: bool) -> dict[str, Any]:
    """The price on a machine, attended where that is faster; or what the plan would need."""
    plain = Machine.load(MACHINES / f"{gpu}.yaml")
    machine = with_kernels(plain, launches_of(plan), cost)
    tiers = (DEVICE,) if resident or row.percent[2] == 100 else (HOST, DEVICE)
    percents = (ON_DEVICE,) if resident else tuple((share, *others) for share, *others in lowered(row.percent))
    plans = [placed(row, replace(plan, attend_on=tier), percents, plain) for tier in tiers]
    if not (fitting := [one for one in plans if isinstance(one, Plan)]):
        return {"does_not_fit": plans[0]}
    found, chosen = max(((row.predict(machine, one), one) for one in fitting), key=lambda both: both[0].tokens_per_second)
    hidden = row.predict(replace(machine, visit_seconds={}), chosen)
    return {
        "percent": chosen.percent,
        "attend_on": chosen.attend_on,
        "step_seconds": found.step_seconds,
        "step_seconds_hidden": hidden.step_seconds,
        "tokens_per_second": found.tokens_per_second,
        "tokens_per_second_hidden": hidden.tokens_per_second,
        "busiest_lane": found.busiest_lane,
    }


def launches_of(plan: Plan) -> Launches:
    return counted_launches(plan.weight_codec, plan.kv_codec, plan.kv_policy)


def lowered(percent: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The percents with less and less of the weights on the GPU, and more of them on the host."""
    on_device, on_host, *others = percent
    for share in range(on_device, -1, -2):
        yield (share, on_host + on_device - share, *others)


def placed(row: Published, plan: Plan, percents: Sequence[tuple[int, ...]], machine: Machine) -> Plan | str:
    """The plan with the first of these percents that fits the machine, or else what the last one lacks."""
    left = left_to_system(machine)
    room = {DEVICE: machine.device_bytes, HOST: machine.host_bytes, DISK: machine.disk_bytes}
    limits = MemoryLimits(**{tier: room[tier] - left.get(tier, 0) for tier in TIERS})
    for percent in percents:
        asked = row.planned(plan.with_percent(percent))
        if (tier := limits.first_exceeded(asked.footprint)) is None:
            return asked.plan
    assert tier is not None
    return (
        f"needs {format_bytes(asked.footprint.total(tier))} on {tier}, {format_bytes(room[tier] - left.get(tier, 0))} is free"
    )


def gpu_document(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "benchmark": "published on gpus",
        "title": "ESTIMATED, nothing was run: plans that FlexGen published for a T4, on GPUs with this engine's kernels; "
        "tokens/s",
        "machine": "none; the files in configs/machines, from data sheets: " + ", ".join(GPUS),
        "command": "python benchmarks/published.py --gpus --output benchmarks/results/published-gpus.json",
        "date": date.today().isoformat(),
        "commit": commit(),
        "unit": "tokens/s",
        "ceiling": "none was measured; the lane that is named bounds a step",
        "simulated": True,
        "assumed": {"shares": stated_shares(), "hosts": {gpu: asdict(cost) for gpu, cost in GPUS.items()}},
        "columns": ["model, lengths, batches", "plan", "launches of a block", *GPUS],
        "cells": gpu_cells(found),
        "notes": gpu_notes(),
        "rows": list(found),
    }


def gpu_notes() -> str:
    shares = "; ".join(f"{name} {share:g}" for name, share in stated_shares().items())
    hosts = "; ".join(
        f"{cost.host}: {cost.torch_us:.3g} us for an operation of torch and {cost.kernel_us:.3g} us for a kernel"
        for cost in dict.fromkeys(GPUS.values())
    )
    return (
        "The lower figure has the launches of every visit in front of its work, the upper one hides them all, as launching "
        f"ahead or a captured graph does at best. Assumed shares of memory bandwidth, which are aims: {shares}. Assumed for a "
        f"launch: {hosts}. Launches (of torch + of kernels) are counted for an attention and an MLP of a decode step; the "
        "embedding and the head, which have more, are priced as an MLP, a product in 16 bits as a kernel, and those of "
        "transfers are in the seconds of a task. More than 8 rows are multiplied with decoded weights. The share of the "
        "weights on the GPU is the published one, or the largest below it that fits; KV on the host is attended "
        "where that is faster. In brackets: weights on the GPU, where KV is attended, and the busiest lane."
    )


def gpu_cells(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A line for each plan, with a column for each machine."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for one in found:
        rows, count = one["batches"]
        torch, kernels = one["launches_of_a_block"]
        lengths = f"{one['lengths'][0]} + {one['lengths'][1]}"
        named = f"{one['model']}, {lengths}, {rows} x {count}", one["way"], f"{torch:.0f} + {kernels:.0f}"
        lines.setdefault(named, {})[one["machine"]] = gpu_cell(one)
    return [[*named, *(cells[gpu] for gpu in GPUS)] for named, cells in lines.items()]


def gpu_cell(one: Mapping[str, Any]) -> str:
    if "does_not_fit" in one:
        return str(one["does_not_fit"])
    low, high = (f"{one[name]:.3g}" for name in ("tokens_per_second", "tokens_per_second_hidden"))
    figures = low if low == high else f"{low} to {high}"
    return f"{figures} ({one['percent'][0]:g} %, {one['attend_on']}, {one['busiest_lane']})"


def print_gpus(document: Mapping[str, Any]) -> None:
    print(f"{document['title']}\n\n{document['notes']}\n\n| " + " | ".join(document["columns"]) + " |")
    print("|" + "---|" * len(document["columns"]))
    for row in document["cells"]:
        print("| " + " | ".join(row) + " |")


# -- the table -------------------------------------------------------------------------------------------------------------


def described(row: Published) -> dict[str, Any]:
    return asdict(row) | {"options": dict(row.options)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=str(MACHINE), help="a machine file")
    parser.add_argument("--gpus", action="store_true", help="price plans on several GPUs with this engine's kernels instead")
    parser.add_argument("--output", help="also write a JSON document here")
    args = parser.parse_args(argv)
    result = on_gpus() if args.gpus else on_machine(Machine.load(args.machine))
    if args.output:
        write_text(args.output, json.dumps(result, indent=1) + "\n")
    return 0


def on_gpus() -> dict[str, Any]:
    document = gpu_document(list(priced_on_gpus(ROWS[:3])))
    print_gpus(document)
    return document


def on_machine(machine: Machine) -> dict[str, Any]:
    rows = [described(row) | as_published(row, machine) | to_its_end(row, machine) for row in ROWS]
    shown = {(row.model, row.batches, row.lengths): row for row in ROWS if is_compared(row)}
    schedules = [
        {name: getattr(row, name) for name in ("name", "model", "batches", "percent", "lengths")} | one
        for row in shown.values()
        for one in compared(row, machine)
    ]
    print_rows(rows)
    print_parts(rows)
    print_schedules(schedules)
    return {"benchmark": "published", "machine": machine.name, "simulated": True, "rows": rows, "schedules": schedules}


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    print("| | model | batches | prompt + generated | published | priced | ratio | whole run |\n|" + "---|" * 8)
    for row in rows:
        mark = " *" if abs(row["ratio"] - 1) > TOLERANCE else ""
        print(
            f"| {row['name']} | {row['model']} | {row['batches'][0]} x {row['batches'][1]} | "
            f"{row['lengths'][0]} + {row['lengths'][1]} | {row['tokens_per_second']:.4g} | "
            f"{row['priced_tokens_per_second']:.3g} | {row['ratio']:.2f}{mark} | {row['whole_run_tokens_per_second']:.3g} |"
        )


def print_parts(rows: Sequence[Mapping[str, Any]]) -> None:
    print("\n| | model | batches | prompts s: published | priced | step s: published | priced |\n|" + "---|" * 7)
    for row in (row for row in rows if row["seconds"]):
        prompts, decode = row["seconds"]
        print(
            f"| {row['name']} | {row['model']} | {row['batches'][0]} x {row['batches'][1]} | {prompts:.4g} | "
            f"{row['prefill_seconds']:.4g} | {decode / (row['lengths'][1] - 1):.3g} | {row['step_seconds']:.3g} |"
        )


def print_schedules(rows: Sequence[Mapping[str, Any]]) -> None:
    print(
        "\n| | model | batches | prompt + generated | schedule | attends on | token/s | step s | busiest lane |\n|" + "---|" * 9
    )
    for row in rows:
        print(
            f"| {row['name']} | {row['model']} | {row['batches'][0]} x {row['batches'][1]} | "
            f"{row['lengths'][0]} + {row['lengths'][1]} | {row['schedule']} | {row['attend_on']} | "
            f"{row['tokens_per_second']:.3g} | {row['step_seconds']:.3g} | "
            f"{row['busiest_lane']} {row['busiest_lane_share']:.0%} |"
        )


if __name__ == "__main__":
    raise SystemExit(main())
