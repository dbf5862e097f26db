"""What eviction buys: in the same memory a larger block and so more tokens per second; and with equal rows less time per step.

    python benchmarks/eviction.py                        # OPT-1.3B shapes in bf16, 512 + 512 tokens, weights on disk: an hour
    python benchmarks/eviction.py --equal-rows 32 --percent 100 0 100 0 100 0 --cpu-mem 14GB --gen-len 64     # ten minutes
    python benchmarks/eviction.py --model smollm2 --percent 100 0 100 0 100 0 --cpu-mem 800MB --gen-len 64 --budgets 0.2 \\
        --policies h2o kvzap --probe own --head-budgets equal own --quality results.json    # a real model: speed and recall

A model with a file on this machine is run with its own weights, any other with random ones. With --quality, which takes the
results.json of `evaluate --tasks recall --output FOLDER`, each line says what the model recalls under the same policy, budget
and head budgets.

The planner finds the largest block of every budget that fits the memory; that block is then run. Each run has a process of its
own. Ceilings are measured in each: the rates of the disk, of matrix products, of reading memory. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from benchmarks.comparison.benchmark_command import add_output, parser_of, tell
from benchmarks.comparison.command import commit
from benchmarks.portable import portable
from benchmarks.recalled import NOT_MEASURED, Asked, Recalled
from h2o_flexgen.checkpoints.model_places import FETCHED_MODELS, WHOLE_MODELS, local_place
from h2o_flexgen.core.environment import default_offload_folder
from h2o_flexgen.core.units import parse_bytes
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.evaluation.answer_settings import model_identity
from h2o_flexgen.formats.table import PLAIN, matrix_format
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.pricing import lane_bounds
from h2o_flexgen.planning.workload_plan import DoesNotFit, largest
from h2o_flexgen.policies import POLICIES
from h2o_flexgen.policies.by_position import Full
from h2o_flexgen.policies.head_budgets import EQUAL, OWN
from h2o_flexgen.policies.policy import PROBE
from h2o_flexgen.profiling.measure import Needs, describe_machine, measure, memory_read_rate
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.session.open_request import head_budgets_of, probe_of
from h2o_flexgen.text.given_texts import made_up_prompts

FULL = 1.0
AIM = 3.0  # times the tokens per second at 20 %
MOST_ROWS = 4096
QUALITY_COLUMNS = ("rows", "tokens/s", "decode tokens/s", "decode of ceiling", "recall visible", "recall hidden")
WORKLOAD = ("percent", "prompt_len", "gen_len", "gpu_batch_size", "dtype", "weight_codec", "kv_codec", "equal_rows")


@dataclass(frozen=True)
class Variant:
    """One line: a policy, what it keeps, and how heads share that out."""

    kept: float
    policy: str = Full.name
    heads: str = EQUAL  # a word of --head-budgets
    probe: str | None = None  # for a policy that asks one

    @property
    def name(self) -> str:
        shared = {EQUAL: "", OWN: ", own head budgets"}.get(self.heads, f", head budgets {Path(self.heads).name}")
        return Full.name if self.kept == FULL else f"{self.policy} {self.kept:.0%}{shared}"

    def options(self) -> dict[str, object]:
        probe = {} if self.probe is None else {"probe": self.probe}
        kept = {"kv_policy": self.policy, "kv_budget": self.kept, "head_budgets": self.heads, **probe}
        return {} if self.kept == FULL else kept

    def asked(self, args: argparse.Namespace) -> Asked:
        heads = head_budgets_of(self.heads, args.model)
        probe = None if self.probe is None else probe_of(self.probe, args.model).checksum
        return Asked(self.policy, f"{100 * self.kept:g} %", args.weight_codec, args.kv_codec, heads and heads.checksum, probe)


def variants(args: argparse.Namespace) -> list[Variant]:
    """The full cache first: all others are held against it."""
    shares = [share for share in args.budgets if share != FULL]
    probes = {name: args.probe if POLICIES[name].ranks_by == PROBE else None for name in args.policies}
    each = product(shares, args.policies, args.head_budgets)
    return [Variant(FULL), *(Variant(share, name, heads, probes[name]) for share, name, heads in each)]


def main() -> int:
    args = parse(sys.argv[1:])
    if args.one is not None:
        print(json.dumps(run_one(args)))
        return 0
    try:
        quality = recalled(args)
        wanted = {variant: variant.asked(args) for variant in variants(args)}
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    result = {**described(args), "lines": repeated(args, [*wanted])}
    for line, (variant, asked) in zip(result["lines"], wanted.items(), strict=True):
        line.update(name=variant.name, policy=variant.policy, head_budgets=asked.head_budgets)
        line.update({} if quality is None else {"recall": quality.cell(asked)})
    print_table(result)
    result.update(for_readme(result), **({} if quality is None else beside_quality(result, quality)))
    tell(result, args.output)
    return 0


def described(args: argparse.Namespace) -> dict[str, Any]:
    """What was measured, and against what."""
    model, shapes = portable([args.model])[0], " shapes" if is_random(args.model) else ""
    return {
        "benchmark": "eviction",
        "command": "python benchmarks/eviction.py " + " ".join(portable(sys.argv[1:])),
        "model": model,
        "title": f"{model}{shapes} in {args.dtype}, {args.prompt_len} + {args.gen_len} tokens, `--percent "
        + " ".join(f"{share:g}" for share in args.percent)
        + ("`: the largest block that fits " + args.cpu_mem if args.equal_rows is None else f"`: {args.equal_rows} rows")
        + written_down(args),
        "workload": {key: getattr(args, key) for key in WORKLOAD},
        "policies": args.policies,
        "head_budgets": portable(args.head_budgets),
        "budget_host_bytes": parse_bytes(args.cpu_mem),
        "ceiling": "bytes of a step over the rate of disk or memory, or flops over that of matrix products, all measured",
        "aim": f"{AIM:g} times the tokens per second at 20 %",
    }


def is_random(model: str) -> bool:
    """Whether nothing but the model's shapes is known here."""
    place = local_place(model)
    return not (model in FETCHED_MODELS or place.is_file() or any((place / name).is_file() for name in WHOLE_MODELS))


def recalled(args: argparse.Namespace) -> Recalled | None:
    if args.quality is None:
        return None
    with LLM(args.model, dummy_weights=is_random(args.model), dtype=args.dtype, offload_dir=args.offload_dir) as llm:
        return Recalled.of([Path(one) for one in args.quality], model_identity(llm))


def written_down(args: argparse.Namespace) -> str:
    packed = {"weights": args.weight_codec, "KV": args.kv_codec}
    return "".join(f", {name} as {codec}" for name, codec in packed.items() if codec != PLAIN)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", default="facebook/opt-1.3b", help="a model on this machine, or one with known shapes")
    add("--policies", "--policy", nargs="+", default=["h2o"])
    shared = f"{EQUAL}: equal budgets of all heads; FILE: as this file of `calibrate` says; {OWN}: the file beside the model"
    add("--head-budgets", nargs="+", default=[EQUAL], metavar=f"{EQUAL}|{OWN}|FILE", help=f"{shared}; several are compared")
    add("--probe", metavar=f"{OWN}|FILE", help="kvzap: what tokens are worth is said by this file")
    add("--budgets", type=float, nargs="+", default=[0.5, 0.2, 0.1], help="shares of prompt and generation that are kept")
    add("--cpu-mem", default="3GB", help="what the process may hold")
    add("--percent", type=float, nargs=6, default=[0, 0, 0, 100, 0, 100])
    add("--gpu-batch-size", type=int, default=64, help="rows computed at once, at most")
    add("--prompt-len", type=int, default=512)
    add("--gen-len", type=int, default=512)
    add("--dtype", default="bfloat16")
    add("--repeats", type=int, default=1)
    add("--equal-rows", type=int, metavar="N", help="so many rows whatever is kept, instead of as many as the memory takes")
    add("--weight-codec", default=Plan.weight_codec, help="how weights are written down, like group4")
    add("--kv-codec", default=Plan.kv_codec)
    add("--offload-dir", default=str(default_offload_folder()))
    add("--quality", nargs="+", metavar="RESULTS", help="results.json of `evaluate --tasks recall`, to stand beside the speed")
    add_output(parser)
    add("--one", type=int, help=argparse.SUPPRESS)  # internal: a process that runs one variant, by its place
    return parser.parse_args(argv)


# -- one process -----------------------------------------------------------------------------------------------------------


def run_one(args: argparse.Namespace) -> dict[str, Any]:
    variant = variants(args)[args.one]
    with opened(args) as llm:
        rows = args.equal_rows or largest(lambda count: fits_planned(llm, args, count), MOST_ROWS)
        if not rows:
            raise SystemExit(f"error: not even one row fits {args.cpu_mem} under {variant.name}; give more with --cpu-mem")
        take_rows(llm, args, rows)
        prompts = made_up_prompts(rows, args.prompt_len, llm.tokenizer, llm.spec.vocab)
        llm.generate(prompts[:1], SamplingParams(max_tokens=1))  # loads; random weights are written to disk
        before = calibrate(llm, args)
        while args.equal_rows is None and not fits(llm, args, rows):  # the process itself has grown since they were counted
            rows -= 1
        prompts = prompts[:rows]
        llm.generate(prompts, SamplingParams(max_tokens=args.gen_len, ignore_eos=True), may_shrink=False)
        stats = llm.stats
        assert stats is not None
        machine = before.at_best(calibrate(llm, args))
        planned = stats.last_block.planned
        middle = max(1, args.gen_len // 2)
        bounds = lane_bounds(planned, middle, machine)
        bounds["memory"] = bytes_computed_with(planned, middle) / memory_read_rate()
        lane = max(bounds, key=lambda name: bounds[name])
        step = statistics.median(stats.step_seconds)
        return {
            "kept": variant.kept,
            "rows": rows,
            "prefill_seconds": stats.prefill_seconds,
            "decode_seconds": stats.decode_seconds,
            "step_seconds": step,
            "bound_seconds": bounds[lane],
            "busiest_lane": lane,
            "share_of_ceiling": bounds[lane] / step,
            "tokens_per_second": stats.generated_tokens / stats.total_seconds,
            "decode_tokens_per_second": (stats.generated_tokens - rows) / stats.decode_seconds,
            "peak_host_bytes": stats.peak_bytes["host"],
            "disk_gb_per_s": machine.disk_read_per_s / 1e9 if isfinite(machine.disk_read_per_s) else None,
            "machine": describe_machine(llm.device),
        }


def bytes_computed_with(planned: BlockPlan, step: int) -> int:
    """Bytes that a step must read from memory: the weights once for each batch, and all held KV."""
    spec, heads = planned.spec, (sum(map(len, level.heads)) for level in planned.levels)
    slots = (sum(one.batch.size * one.held(step) for one in batches) for batches in planned.kv.occupancies)
    held = sum(count * own for count, own in zip(heads, slots, strict=True))
    return len(planned.block.batches) * spec.weight_bytes + held * spec.kv_bytes_per_head


def opened(args: argparse.Namespace) -> LLM:
    kept, shape = variants(args)[args.one].options(), {"sep_layer": False, "buffers": 3}
    memory = {"cpu_mem": args.cpu_mem, "offload_dir": args.offload_dir, "dtype": args.dtype}
    codecs = {"weight_codec": args.weight_codec, "kv_codec": args.kv_codec}
    return LLM(args.model, dummy_weights=is_random(args.model), percent=args.percent, **kept, **shape, **memory, **codecs)


def take_rows(llm: LLM, args: argparse.Namespace, rows: int) -> None:
    """Has the plan compute so many rows, before anything is loaded."""
    count = -(-rows // args.gpu_batch_size)
    llm.adopt(replace(llm.loaded.requested, gpu_batch_size=-(-rows // count), num_gpu_batches=count))


def fits_planned(llm: LLM, args: argparse.Namespace, rows: int) -> bool:
    take_rows(llm, args, rows)
    return fits(llm, args, rows)


def fits(llm: LLM, args: argparse.Namespace, rows: int) -> bool:
    try:
        llm.check(Workload.uniform(rows, args.prompt_len, args.gen_len))
    except DoesNotFit:
        return False
    return True


def calibrate(llm: LLM, args: argparse.Namespace) -> Machine:
    form, rows = matrix_format(llm.plan.weight_codec), (llm.plan.gpu_batch_size,)
    needs = Needs(args.dtype, (llm.spec.ffn, llm.spec.width), rows, form, read_files=llm.loaded.weight_files)
    return measure(llm.device, needs, repetitions=3, seconds=0.5)


# -- all of them -----------------------------------------------------------------------------------------------------------


def repeated(args: argparse.Namespace, wanted: Sequence[Variant]) -> list[dict[str, Any]]:
    """Medians, one line for each variant; they take turns, because machines drift."""
    rounds = [[run_in_process(place, variant) for place, variant in enumerate(wanted)] for _ in range(args.repeats)]
    lines = [medians(own) for own in zip(*rounds, strict=True)]
    for line in lines:
        line["times_full"] = line["tokens_per_second"] / lines[0]["tokens_per_second"]
        line["decode_times_full"] = line["decode_tokens_per_second"] / lines[0]["decode_tokens_per_second"]
        line["step_over_full"] = line["step_seconds"] / lines[0]["step_seconds"]
    return lines


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    numbers = [key for key, value in runs[0].items() if isinstance(value, (int, float))]
    return {**runs[0], **{key: statistics.median(run[key] for run in runs) for key in numbers}, "runs": runs}


def run_in_process(place: int, variant: Variant) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--one", str(place)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    run: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{variant.name}: {run['rows']} rows, {run['tokens_per_second']:.1f} tokens/s", file=sys.stderr)
    return run


def for_readme(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result in the form that scripts/readme_results.py reads."""
    lines, workload = result["lines"], result["workload"]
    seconds = workload["equal_rows"] is not None
    rows = "; ".join(f"{line['rows']} rows, {line['tokens_per_second']:.1f} ({line['times_full']:.2f} times)" for line in lines)
    steps = "; ".join(f"{line['name']} {line['step_over_full']:.2f}" for line in lines)
    return {
        "machine": lines[0]["machine"],
        "unit": "seconds per decode step" if seconds else "tokens/s in decode",
        "higher_is_better": not seconds,
        "rows": [
            {
                "name": line["name"],
                "measured": line["step_seconds"] if seconds else line["decode_tokens_per_second"],
                "ceiling": line["bound_seconds"] if seconds else line["rows"] / line["bound_seconds"],
            }
            for line in lines
        ],
        "notes": f"Steps over that of full: {steps}." if seconds else f"Rows in the block, and tokens/s with prefill: {rows}.",
    }


def beside_quality(result: Mapping[str, Any], quality: Recalled) -> dict[str, Any]:
    """The result as a table in which speed and recall stand side by side."""
    return {
        "benchmark": "eviction and quality",
        "date": date.today().isoformat(),
        "commit": commit(),
        "quality": quality.command,
        "columns": ["", *QUALITY_COLUMNS],
        "cells": [[line["name"], *quality_cells(line)] for line in result["lines"]],
        "notes": "Behind ±: the standard error. Recall is the share of questions that were answered rightly, measured by "
        f"`{quality.command}`; {NOT_MEASURED} stands for what that did not measure.",
    }


def quality_cells(line: Mapping[str, Any]) -> Iterator[str]:
    yield str(line["rows"])
    yield from (f"{line[rate]:.0f}" for rate in ("tokens_per_second", "decode_tokens_per_second"))
    yield f"{line['share_of_ceiling']:.0%}"
    yield from line["recall"]


def print_table(result: Mapping[str, Any]) -> None:
    print(f"\n{result['title']}, {result['workload']}\nmachine: {result['lines'][0]['machine']}")
    print(f"ceiling: {result['ceiling']}\naim: {result['aim']}")
    width = max(len(line["name"]) for line in result["lines"])
    head = "rows prefill s  step s bound s (lane)     tokens/s  times full  in decode  peak GB"
    print(f"\n{'':{width}} {head}" + ("  recall visible, hidden" if "recall" in result["lines"][0] else ""))
    for line in result["lines"]:
        print(
            f"{line['name']:{width}} {line['rows']:4} {line['prefill_seconds']:9.1f} {line['step_seconds']:7.2f} "
            f"{line['bound_seconds']:7.2f} ({line['busiest_lane']:7}) {line['tokens_per_second']:10.1f} "
            f"{line['times_full']:11.2f} {line['decode_times_full']:10.2f} {line['peak_host_bytes'] / 1e9:8.2f}"
            + "".join(f"  {figure}" for figure in line.get("recall", ()))
        )


if __name__ == "__main__":
    sys.exit(main())
