"""How much of the transfers hides behind compute, or of the compute behind transfers: time per decode step against the busiest
lane's bound, for the zig-zag schedule, FlexGen's loop with its barrier, and row by row.

    python benchmarks/overlap.py                              # OPT-1.3B shapes in bf16, all weights on disk, 2.1 GB of memory
    python benchmarks/overlap.py --repeats 1 --model facebook/opt-125m --cpu-mem 1GB

Every schedule runs in a process of its own, in turns (A B C A B C ...), because machines drift. The machine's profile is taken
as it was kept, or measured first. In each process the disk and the matrix products are measured again, before and after the
run, with the means that the run itself uses; the faster of the two goes into the profile. From it come both the bound, which
is what the busiest lane needs alone, and what the planner predicts of the run. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from benchmarks.comparison.benchmark_command import add_output, parser_of, tell
from h2o_flexgen.core.environment import default_offload_folder
from h2o_flexgen.core.units import format_bytes, parse_bytes
from h2o_flexgen.engine.engine import BlockRun
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.device import open_device
from h2o_flexgen.planning.cost import Cost
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.predict import BlockPrediction
from h2o_flexgen.planning.pricing import lane_bounds
from h2o_flexgen.profiling.measure import Needs, describe_machine, measure
from h2o_flexgen.profiling.profile_cache import profiled
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.text.given_texts import made_up_prompts

MEASURING = {"repetitions": 3, "seconds": 0.7}


def main() -> int:
    args = parse(sys.argv[1:])
    if args.one:
        print(json.dumps(run_one(args)))
        return 0
    profile_of(args)  # measured once, for all processes
    runs = [run_in_process(args, schedule) for _ in range(args.repeats) for schedule in args.schedules]
    result = summary(args, runs)
    print_table(result)
    tell(result, args.output)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", default="facebook/opt-1.3b", help="a model with known shapes; weights are random")
    add("--cpu-mem", default="2.1GB", help="what the process may hold")
    add("--percent", type=float, nargs=6, default=[0, 0, 0, 100, 0, 100])
    add("--gpu-batch-size", type=int, default=16)
    add("--num-gpu-batches", type=int, default=4)
    add("--prompt-len", type=int, default=64)
    add("--gen-len", type=int, default=16)
    add("--buffers", type=int, default=3)
    add("--sep-layer", type=int, choices=(0, 1), default=0, help="1: attention and mlp are two layers of the schedule")
    add("--dtype", default="bfloat16")
    add("--repeats", type=int, default=3)
    add("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    add("--offload-dir", default=str(default_offload_folder()))
    add_output(parser)
    add("--one", choices=list(SCHEDULES), help=argparse.SUPPRESS)  # internal: a process that runs one schedule
    return parser.parse_args(argv)


# -- one process -----------------------------------------------------------------------------------------------------------


def run_one(args: argparse.Namespace) -> dict[str, Any]:
    shape = {name: getattr(args, name) for name in ("gpu_batch_size", "num_gpu_batches")}
    if args.one != "flexgen_barrier":  # the barrier has a fixed number of buffers
        shape["buffers"] = args.buffers
    shape["sep_layer"] = bool(args.sep_layer)
    limits = {"cpu_mem": args.cpu_mem, "offload_dir": args.offload_dir, "dtype": args.dtype}
    with LLM(args.model, dummy_weights=True, percent=args.percent, schedule=args.one, trace=True, **shape, **limits) as llm:
        prompts = made_up_prompts(llm.plan.block_size, args.prompt_len, llm.tokenizer, llm.spec.vocab)
        llm.generate(prompts[:1], SamplingParams(max_tokens=1))  # loads; random weights are written to disk
        before = calibrate(llm, args)
        llm.generate(prompts, SamplingParams(max_tokens=args.gen_len, ignore_eos=True), may_shrink=False)
        after = calibrate(llm, args)
        assert llm.stats is not None
        return measured(args, llm, llm.stats.last_block, profile_of(args).as_it_is(before.at_best(after)), drift(before, after))


def profile_of(args: argparse.Namespace) -> Machine:
    """This machine, as `run --percent auto` knows it."""
    return profiled(open_device("auto"), Path(args.offload_dir).expanduser(), args.dtype)


def calibrate(llm: LLM, args: argparse.Namespace) -> Machine:
    rows = (args.gpu_batch_size, args.gpu_batch_size * args.prompt_len)
    needs = Needs(args.dtype, (llm.spec.ffn, llm.spec.width), rows, read_files=llm.loaded.weight_files)
    return measure(llm.device, needs, **MEASURING)


def drift(before: Machine, after: Machine) -> dict[str, list[float]]:
    """The change of rates from before to after: a machine that changed was not quiet."""
    points = [machine.flops_per_s for machine in (before, after)]
    gemm = [next(iter(flops.values()))[-1][1] / 1e9 for flops in points]
    disk = [machine.disk_read_per_s / 1e9 for machine in (before, after)]
    return {"disk_gb_per_s": [round(rate, 2) for rate in disk], "gemm_gflop_per_s": [round(rate) for rate in gemm]}


def measured(
    args: argparse.Namespace, llm: LLM, run: BlockRun, machine: Machine, rates: Mapping[str, list[float]]
) -> dict[str, Any]:
    assert llm.stats is not None
    cost = Cost(run.planned)
    bounds = lane_bounds(cost.planned, max(1, run.block.gen_len // 2), machine)
    lane = max(bounds, key=lambda name: bounds[name])
    steps = sorted(run.step_seconds)
    predicted = BlockPrediction.of(cost.planned, machine).decode_seconds / (run.block.gen_len - 1)
    return {
        "schedule": args.one,
        "prefill_seconds": run.prefill_seconds,
        "step_seconds": statistics.median(steps),
        "step_seconds_range": [steps[0], steps[-1]],
        "busiest_lane": lane,
        "bound_seconds": bounds[lane],
        "bounds": bounds,
        "to_bound": statistics.median(steps) / bounds[lane],
        "predicted_step_seconds": predicted,
        "prediction_error": predicted / statistics.mean(steps) - 1,
        "read_gb_per_step": step_bytes(cost) / 1e9,
        "tokens_per_second": llm.stats.generated_tokens / llm.stats.total_seconds,
        "decode_tokens_per_second": run.block.num_rows / statistics.median(steps),
        "peak_host_bytes": llm.stats.peak_bytes["host"],
        "rates": rates,
        "gemm_gflop_per_s": {str(rows): round(rate / 1e9) for rows, rate in machine.flops_per_s[args.dtype]},
        "timeline": run.trace.between(*one_step(run)).text_timeline(110) if args.one != "row_by_row" else "",
        "machine": describe_machine(llm.device),
    }


def one_step(run: BlockRun) -> tuple[float, float]:
    ends = run.trace.step_ends()
    middle = len(ends) // 2
    return ends[middle - 1], ends[middle]


def step_bytes(cost: Cost) -> float:
    middle = max(1, cost.block.gen_len // 2)
    return sum(cost.nbytes(task) for task in cost.schedule.tasks() if task.step == middle)


# -- all of them -----------------------------------------------------------------------------------------------------------


def run_in_process(args: argparse.Namespace, schedule: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--one", schedule]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    run: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(
        f"{schedule:16} step {run['step_seconds']:.2f} s, bound {run['bound_seconds']:.2f} s ({run['busiest_lane']}), "
        f"rates before and after: {run['rates']}",
        file=sys.stderr,
    )
    return run


def summary(args: argparse.Namespace, runs: list[dict[str, Any]]) -> dict[str, Any]:
    rows = {}
    for schedule in args.schedules:
        own = [run for run in runs if run["schedule"] == schedule]
        numbers = [key for key, value in own[0].items() if isinstance(value, (int, float))]
        medians = {key: statistics.median(run[key] for run in own) for key in numbers}
        rows[schedule] = {**medians, "busiest_lane": own[0]["busiest_lane"], "runs": own}
    fastest = rows[args.schedules[0]]["step_seconds"]
    for row in rows.values():
        row["times_the_first"] = row["step_seconds"] / fastest
    workload = {key: getattr(args, key) for key in ("percent", "gpu_batch_size", "num_gpu_batches", "prompt_len", "gen_len")}
    return {
        "benchmark": "overlap",
        "command": "python benchmarks/overlap.py " + " ".join(sys.argv[1:]),
        "model": args.model,
        "workload": {**workload, "slots": args.buffers, "sep_layer": args.sep_layer, "dtype": args.dtype},
        "machine": runs[0]["machine"],
        "ceiling": "the busiest lane alone: bytes read per step over the disk's rate, or products and attention over theirs",
        "budget_host_bytes": parse_bytes(args.cpu_mem),
        "schedules": rows,
    }


def print_table(result: Mapping[str, Any]) -> None:
    machine = result["machine"]
    print(f"\n{result['model']}, {result['workload']}\nmachine: {machine}\nceiling: {result['ceiling']}\n")
    print(f"{'schedule':16} {'prefill s':>9} {'step s':>7} {'bound s':>8} {'lane':>8} ", end="")
    print(f"{'step/bound':>10} {'predicted s':>11} {'peak GB':>8}")
    for name, row in result["schedules"].items():
        print(
            f"{name:16} {row['prefill_seconds']:9.1f} {row['step_seconds']:7.2f} {row['bound_seconds']:8.2f} "
            f"{row['busiest_lane']:>8} {row['to_bound']:10.2f} {row['predicted_step_seconds']:11.2f} "
            f"{row['peak_host_bytes'] / 1e9:8.2f}"
        )
    print(f"\nmemory limit {format_bytes(result['budget_host_bytes'])}. One decode step of the zig-zag schedule:")
    print(result["schedules"].get("zigzag", {"runs": [{"timeline": ""}]})["runs"][-1]["timeline"])


if __name__ == "__main__":
    sys.exit(main())
