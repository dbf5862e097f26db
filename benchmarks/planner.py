"""Are plans what they promise? Runs a grid of plans and some with other policies and codecs, each in a process of its own, and
holds seconds and bytes against what was predicted; then lets the search choose, runs its choice, and holds that against the
best of the grid.

    python benchmarks/planner.py                                    # OPT-1.3B and LLaMA-3.2-1B shapes, 2 GB of memory
    python benchmarks/planner.py --models opt --machine machine.yaml --output planner.json

The machine is profiled first, unless one is given. It drifts meanwhile: behind every run the command measures the disk and the
matrix products again, and beside the prediction for the machine as it was profiled stands one for the machine as it was then.
The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from h2o_flexgen.core.files import write_text
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.memory.memories import own_site
from h2o_flexgen.models import create_model, known_config, load_config
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.predict import Prediction, predict
from h2o_flexgen.planning.workload_plan import WorkloadPlan

PROMPT_LEN, GEN_LEN = 32, 16
LLAMA_1B = {  # the shape of LLaMA-3.2-1B: four queries for a key
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
MODELS = {"opt": "facebook/opt-1.3b", "llama": "llama-3.2-1b"}
H2O = ("--kv-policy", "h2o", "--kv-budget", "0.2")
PACKED_WEIGHTS, PACKED_KV = ("--compress-weight",), ("--compress-cache",)
CHOSEN = "chosen by the search"
ROOT = Path(__file__).resolve().parents[1]
AIMS = {"median": 0.10, "worst": 0.25, "memory": 0.10, "chosen": 0.10}


@dataclass(frozen=True)
class Case:
    rows: int
    batches: int
    weights: int  # per cent in memory
    kv: int
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        options = " ".join(flag for flag in self.flags if flag not in ("--kv-policy", "--kv-budget"))
        return f"{self.rows} x {self.batches}, weights {self.weights} %, KV {self.kv} % {options}".strip()

    @property
    def command(self) -> list[str]:
        percent = ["--percent", "0", str(self.weights), "0", str(self.kv), "0", "100"]
        return ["--gpu-batch-size", str(self.rows), "--num-gpu-batches", str(self.batches), *percent, *self.flags]


GRID = tuple(
    Case(rows, batches, weights, kv) for rows in (16, 64) for batches in (1, 4) for weights in (0, 30) for kv in (0, 100)
)
OTHERS = (
    Case(64, 2, 0, 0, H2O),
    Case(128, 1, 20, 100, H2O),
    Case(64, 1, 50, 100, PACKED_WEIGHTS),
    Case(8, 1, 0, 100, PACKED_WEIGHTS),
    Case(64, 2, 0, 0, PACKED_KV),
    Case(96, 2, 100, 100, (*H2O, *PACKED_WEIGHTS, *PACKED_KV)),
    Case(32, 2, 20, 100, ("--schedule", "row_by_row")),
    Case(32, 2, 20, 0, ("--overlap", "0")),
)


def main() -> int:
    args = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        machine_file = args.machine or profiled(Path(folder))
        results = [of_model(args, name, machine_file, Path(folder)) for name in args.models]
    document = as_document(results, "python benchmarks/planner.py " + " ".join(sys.argv[1:]))
    for result in results:
        print_table(result)
    if args.output:
        write_text(args.output, json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    add("--machine", help="a profile (default: measured now, at length)")
    add("--cpu-mem", default="2GB", help="what a run may hold")
    add("--prompt-len", type=int, default=PROMPT_LEN)
    add("--gen-len", type=int, default=GEN_LEN)
    add("--only", type=int, help="only so many of the plans, for a quick look")
    add("--folder", help="for files of the runs (default: the system's for such)")
    add("--output", help="also write the JSON document here")
    return parser.parse_args(argv)


def profiled(folder: Path) -> str:
    file = folder / "machine.yaml"
    subprocess.run([sys.executable, "-m", "h2o_flexgen.profile", "-o", file, "--offload-dir", folder / "profile"], check=True)
    return str(file)


# -- a model -----------------------------------------------------------------------------------------------------------------


def of_model(args: argparse.Namespace, name: str, machine_file: str, folder: Path) -> dict[str, Any]:
    model, spec = _model(name, folder)
    machine = Machine.load(machine_file)
    grid, others = GRID[: args.only], OTHERS[: args.only]
    common = ["--model", model, "--dummy-weights", "--prompt-len", args.prompt_len, "--gen-len", args.gen_len]
    common += ["--cpu-mem", args.cpu_mem, "--machine", machine_file, "--offload-dir", folder / "offload", "--ignore-eos"]
    rows = []
    for case in (*grid, *others):
        done = run([*common, *case.command])
        if isinstance(done, str):
            print(f"  {case.name}: {done}", file=sys.stderr)
            continue
        rows.append(compared(case.name, done, spec, machine))
    most = max(case.rows * case.batches for case in grid)
    chosen = run([*common, "--percent", "auto", "--num-prompts", most])
    assert not isinstance(chosen, str), chosen
    rows.append(compared(CHOSEN, chosen, spec, machine))
    names = {case.name for case in grid}
    best = max((row for row in rows if row["plan"] in names), key=lambda row: row["tokens_per_second"])
    errors = [abs(row["step_error"]) for row in rows]
    at_once = [abs(row["step_error_as_it_was"]) for row in rows]
    return {
        "model": MODELS[name],
        "machine": {**chosen["machine"], "profile": machine.name},
        "load": f"{args.prompt_len} + {args.gen_len} tokens in {args.cpu_mem}",
        "rows": rows,
        "step_error": {"median": statistics.median(errors), "worst": max(errors)},
        "step_error_as_it_was": {"median": statistics.median(at_once), "worst": max(at_once)},
        "peak_error": {"worst": max(abs(row["peak_error"]) for row in rows)},
        "above_budget": [row["plan"] for row in rows if row["peak_bytes"] > row["budget_bytes"]],
        "best_of_grid": best["plan"],
        "chosen": {key: rows[-1][key] for key in ("blocks", "tokens_per_second")},
        "chosen_over_best": rows[-1]["tokens_per_second"] / best["tokens_per_second"],
    }


def _model(name: str, folder: Path) -> tuple[str, ModelSpec]:
    config = known_config(MODELS[name])
    if config is not None:
        return MODELS[name], create_model(config, "bfloat16", True, name).spec
    place = folder / MODELS[name]
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(LLAMA_1B), encoding="utf-8")
    return str(place), create_model(load_config(str(place)), "bfloat16", True, name).spec


def run(flags: Sequence[object]) -> dict[str, Any] | str:
    """The JSON of a run, or the reason why there is none."""
    command = [sys.executable, "-m", "h2o_flexgen.run", *map(str, flags), "--verbose", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    document: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return document


# -- a run -------------------------------------------------------------------------------------------------------------------


def compared(name: str, done: Mapping[str, Any], spec: ModelSpec, machine: Machine) -> dict[str, Any]:
    predicted, steps = done["predicted"], done["step_seconds_median"]
    then = as_it_was(machine, done["rates"])
    again = prediction(done, spec, then)
    budget, peak = done["budget_bytes"]["host"], done["peak_bytes"]["host"]
    row = {
        "plan": name,
        "blocks": f"{done['plan']['gpu_batch_size']} x {done['plan']['num_gpu_batches']}",
        "percent": done["requested_percent"],
        "prefill_seconds": done["prefill_seconds"],
        "prefill_predicted": predicted["prefill_seconds"],
        "step_seconds": steps,
        "step_predicted": predicted["step_seconds_mean"],
        "step_error": predicted["step_seconds_mean"] / steps - 1,
        "step_predicted_as_it_was": again.step_seconds,
        "step_error_as_it_was": again.step_seconds / steps - 1,
        "tokens_per_second": done["tokens_per_second"],
        "busy_seconds": {lane: one["busy_share"] for lane, one in done["lanes"].items()},
        "busiest_lane": max(predicted["busy_seconds"], key=lambda lane: predicted["busy_seconds"][lane]),
        "peak_bytes": peak,
        "peak_predicted": predicted["peak_bytes"]["host"],
        "peak_error": predicted["peak_bytes"]["host"] / peak - 1,
        "budget_bytes": budget,
        "disk_gb_per_s": [machine.disk_read_per_s / 1e9, then.disk_read_per_s / 1e9],
        "products_share": then.flop_rate("bfloat16", 64) / machine.flop_rate("bfloat16", 64),
    }
    print(
        f"  {name}: step {steps:.3f} s, predicted {row['step_predicted']:.3f} ({row['step_error']:+.0%}), as it was "
        f"{again.step_seconds:.3f} ({row['step_error_as_it_was']:+.0%}); {row['tokens_per_second']:.1f} tokens/s; "
        f"peak {peak / 1e9:.2f} GB ({row['peak_error']:+.0%}); disk {row['disk_gb_per_s']}",
        file=sys.stderr,
    )
    return row


def as_it_was(machine: Machine, rates: Mapping[str, Any]) -> Machine:
    """The machine with the disk and the products as they were measured after the run."""
    curves = {
        name: {of: tuple(map(tuple, curve)) for of, curve in rates.get(name, {}).items() if curve}
        for name in ("flops_per_s", "packed_flops_per_s")
    }
    disk = rates.get("disk_read_per_s", machine.disk_read_per_s)
    return machine.as_it_is(replace(machine, disk_read_per_s=disk, **curves))


def prediction(done: Mapping[str, Any], spec: ModelSpec, machine: Machine) -> Prediction:
    options = {key: value for key, value in done["plan"].items() if key not in ("weights", "kv", "hidden", "kv_options")}
    given = {key: value for key, value in done["plan"]["kv_options"].items() if value not in (None, False)}
    plan = Plan.create(**options, **given).with_percent(done["requested_percent"]).folded()
    lengths = (done["prompt_tokens"] // done["num_prompts"],) * done["num_prompts"]
    workload = Workload(lengths, done["generated_tokens"] // done["num_prompts"])
    kept = spec.written_as(plan.weight_codec, plan.kv_codec, plan.compute)
    return predict(WorkloadPlan(kept, plan, workload, own_site("cpu", False, writes_weights=True)), machine)


def as_document(results: Sequence[Mapping[str, Any]], command: str) -> dict[str, Any]:
    """The JSON document, with a table for people."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    cells = [
        [
            result["model"],
            row["plan"]
            if row["plan"] != CHOSEN
            else f"{CHOSEN}: {row['blocks']}, {' '.join(f'{x:g}' for x in row['percent'])}",
            f"{row['step_seconds']:.3f}",
            f"{row['step_predicted']:.3f}",
            f"{row['step_error']:+.0%}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
            f"{row['peak_error']:+.0%}",
        ]
        for result in results
        for row in result["rows"]
    ]
    return {
        "benchmark": "planner",
        "title": f"Plans, as predicted and as measured: {results[0]['load']}, shapes in bfloat16",
        "command": command,
        "commit": commit.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
        "machine": results[0]["machine"],
        "ceiling": "what was predicted, for the machine as it was profiled before",
        "unit": "seconds",
        "columns": ["model", "plan", "step s", "predicted s", "error", "tokens/s", "peak GB", "error of the peak"],
        "cells": cells,
        "notes": " ".join(map(_in_words, results)),
        "aims": AIMS,
        "models": results,
    }


def _in_words(result: Mapping[str, Any]) -> str:
    step, peak = result["step_error"], result["peak_error"]["worst"]
    above = ", ".join(result["above_budget"]) or "none"
    return (
        f"{result['model']}: steps are predicted to {step['median']:.1%} in the median and {step['worst']:.0%} at worst, "
        f"memory to {peak:.0%}; above the limit: {above}. "
        f"What the search chose reaches {result['chosen_over_best']:.2f} of the best of the grid ({result['best_of_grid']})."
    )


# -- what came of it -----------------------------------------------------------------------------------------------------------


def print_table(result: Mapping[str, Any]) -> None:
    print(f"\n{result['model']} shapes in bfloat16, {result['load']}; {result['machine']}")
    print(f"{'plan':58} {'step s':>8} {'predicted':>10} {'error':>6} ", end="")
    print(f"{'as it was':>10} {'tokens/s':>9} {'peak GB':>8} {'error':>6}")
    for row in result["rows"]:
        print(
            f"{row['plan']:58} {row['step_seconds']:8.3f} {row['step_predicted']:10.3f} {row['step_error']:+6.0%} "
            f"{row['step_error_as_it_was']:+10.0%} {row['tokens_per_second']:9.1f} {row['peak_bytes'] / 1e9:8.2f} "
            f"{row['peak_error']:+6.0%}"
        )
    for what, name in (("for the machine as profiled", "step_error"), ("as it was", "step_error_as_it_was")):
        print(f"a step {what}: median error {result[name]['median']:.0%}, worst {result[name]['worst']:.0%}")
    above = ", ".join(result["above_budget"]) or "none"
    print(f"memory: worst error {result['peak_error']['worst']:.0%}; above the limit: {above}")
    print(f"chosen: {result['chosen']}, {result['chosen_over_best']:.2f} of the best of the grid ({result['best_of_grid']})")


if __name__ == "__main__":
    sys.exit(main())
