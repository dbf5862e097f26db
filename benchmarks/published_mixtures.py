"""ESTIMATES of what this engine would do with Mixtral-8x7B on the machines of others who published figures for it. Nothing is
run: machines are data sheets (configs/machines), and of the published runs neither the rows nor the host's memory are known.

    python benchmarks/published_mixtures.py
    python benchmarks/published_mixtures.py --output benchmarks/results/published-mixtures.json

Weights rest in host memory and cross the link once in a step for all rows; KV rests there too, and is attended where that is
faster. Of the numbers of batches that fit, the one with the most tokens per second counts. Launches are not priced: a block of
experts has hundreds, and the processor may be the limit before any lane is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import sys

    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from benchmarks.comparison.command import commit
from h2o_flexgen.core.files import write_text
from h2o_flexgen.core.site import DEVICE, DISK, HOST, TIERS, Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.models import create_model, known_config
from h2o_flexgen.planning.footprint import MemoryLimits, left_to_system
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.predict import Prediction, predict
from h2o_flexgen.planning.workload_plan import WorkloadPlan

MACHINES = Path(__file__).resolve().parents[1] / "configs" / "machines"
MODEL, PROMPT_LEN, GEN_LEN = "mistralai/Mixtral-8x7B-v0.1", 512, 256
BATCH, BATCHES = 128, (1, 2, 4, 8, 12, 16, 24, 32)
PERCENTS = (0, 100, 0, 100, 100, 0), (0, 100, 0, 100, 0, 100)  # activations on the GPU, or in host memory
SMALLER: Mapping[str, Any] = {"weight_codec": "group4", "kv_codec": "group4", "kv_policy": "h2o", "kv_budget": 0.2}
WAYS: Mapping[str, Mapping[str, Any]] = {"16 bits": {}, "4 bits, h2o 20 %": SMALLER}
PUBLISHED = {  # machine -> prompts and steps in tokens/s, 512 + 256 tokens, from the README of MoE-Gen (EfficientMoE/MoE-Gen)
    "rtx-a5000": {"MoE-Gen": (2790, 469), "vLLM": (1347, 31), "llama.cpp": (328, 4)},
    "t4-gcp": {},  # MoE-Lightning's paper gives this GPU and "up to 10.3 times" others: no figure of tokens per second is known
}
COLUMNS = ["machine", "who", "rows", "prompts tokens/s", "steps tokens/s", "attended on", "busiest lane"]


@dataclass(frozen=True)
class Priced:
    plan: Plan
    found: Prediction

    @property
    def prompt_rate(self) -> float:
        return self.plan.block_size * PROMPT_LEN / self.found.prefill_seconds

    @property
    def step_rate(self) -> float:
        return self.plan.block_size / self.found.step_seconds


def priced(machine: Machine, options: Mapping[str, Any]) -> Priced | None:
    """The best of what fits."""
    fitting = [
        Priced(planned.plan, predict(planned, machine)) for planned in planned_on(machine, options) if fits(machine, planned)
    ]
    return max(fitting, key=lambda one: one.found.tokens_per_second, default=None)


def planned_on(machine: Machine, options: Mapping[str, Any]) -> Iterator[WorkloadPlan]:
    config = known_config(MODEL)
    assert config is not None
    for count, tier, percent in product(BATCHES, (DEVICE, HOST), PERCENTS):
        plan = Plan.create(gpu_batch_size=BATCH, num_gpu_batches=count, attend_on=tier, **options).with_percent(percent)
        spec = create_model(config, "float16", True, MODEL).spec
        spec = spec.cut_at_attention() if tier == HOST else spec
        spec = spec.written_as(plan.weight_codec, plan.kv_codec, plan.compute)
        workload = Workload.uniform(plan.block_size, PROMPT_LEN, GEN_LEN)
        yield WorkloadPlan(spec, plan, workload, Site(accelerator=True))


def fits(machine: Machine, planned: WorkloadPlan) -> bool:
    left = left_to_system(machine)
    room = {DEVICE: machine.device_bytes, HOST: machine.host_bytes, DISK: machine.disk_bytes}
    return MemoryLimits(**{tier: room[tier] - left.get(tier, 0) for tier in TIERS}).first_exceeded(planned.footprint) is None


def document(machines: Sequence[str]) -> dict[str, Any]:
    rows = [row for name in machines for row in rows_of(name)]
    return {
        "benchmark": "published mixtures",
        "title": f"ESTIMATED, nothing was run: {MODEL} on data sheets, {PROMPT_LEN} + {GEN_LEN} tokens, beside what others "
        "published",
        "machine": f"none; the files in configs/machines, from data sheets: {', '.join(machines)}",
        "date": date.today().isoformat(),
        "commit": commit(),
        "command": "python benchmarks/published_mixtures.py --output benchmarks/results/published-mixtures.json",
        "ceiling": "none was measured; the lane that is named bounds a step",
        "unit": "tokens/s",
        "simulated": True,
        "columns": COLUMNS,
        "cells": rows,
        "notes": "MoE-Gen's rows and host are not known; 512 GB are assumed here. Launches are not priced. Of MoE-Lightning's "
        "T4 no figure in tokens/s is known.",
    }


def rows_of(name: str) -> Iterator[list[str]]:
    plain = Machine.load(MACHINES / f"{name}.yaml")
    machine = replace(plain, visit_seconds={})
    for who, (prompts, steps) in PUBLISHED[name].items():
        yield [name, f"{who}, published", "?", f"{prompts:,}", f"{steps:,}", "", ""]
    for way, options in WAYS.items():
        best = priced(machine, options)
        if best is None:
            yield [name, f"priced, {way}", "does not fit", "", "", "", ""]
            continue
        figures = f"{best.plan.block_size:,}", f"{best.prompt_rate:,.0f}", f"{best.step_rate:,.0f}"
        yield [name, f"priced, {way}", *figures, best.plan.attend_on, best.found.busiest_lane]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="also write a JSON document here")
    args = parser.parse_args(argv)
    result = document(list(PUBLISHED))
    print(f"{result['title']}\n\n| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for row in result["cells"]:
        print("| " + " | ".join(row) + " |")
    if args.output:
        write_text(args.output, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
