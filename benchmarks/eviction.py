"""What eviction buys: in the same memory a larger block and so more tokens per second; and with equal rows less time per step.

    python benchmarks/eviction.py                        # OPT-1.3B shapes in bf16, 512 + 512 tokens, weights on disk: two hours
    python benchmarks/eviction.py --prompt-len 64 --gen-len 64 --cpu-mem 1.5GB --no-latency

The planner finds the largest block of every budget that fits the memory; that block is then run. Each run has a process of its
own. Ceilings are measured in each: the disk's rate, and that of matrix products. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from h2o_flexgen.commands.made_up import made_up_prompts
from h2o_flexgen.llm import LLM, default_offload_folder
from h2o_flexgen.planning.cost import Cost
from h2o_flexgen.planning.files import write_text
from h2o_flexgen.planning.footprint import DoesNotFit
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.planned import PlannedBlock
from h2o_flexgen.planning.units import parse_bytes
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.runtime.measure import Needs, describe_machine, measure
from h2o_flexgen.runtime.sampling_params import SamplingParams

FULL = 1.0
AIM = 3.0  # times the tokens per second, at 20 %
MOST_ROWS = 4096


def main() -> int:
    args = parse(sys.argv[1:])
    if args.one is not None:
        print(json.dumps(run_one(args)))
        return 0
    kept = [FULL, *(share for share in args.budgets if share != FULL)]
    result: dict[str, Any] = {
        "benchmark": "eviction",
        "command": "python benchmarks/eviction.py " + " ".join(sys.argv[1:]),
        "model": args.model,
        "title": f"{args.model} shapes in {args.dtype}, {args.prompt_len} + {args.gen_len} tokens, `--percent "
        + " ".join(f"{share:g}" for share in args.percent)
        + f"`: the largest block that fits {args.cpu_mem}",
        "workload": {key: getattr(args, key) for key in ("percent", "prompt_len", "gen_len", "gpu_batch_size", "dtype")},
        "policy": args.policy,
        "budget_host_bytes": parse_bytes(args.cpu_mem),
        "ceiling": "bytes read per decode step over the disk's rate, or flops over that of matrix products, both measured",
        "aim": f"{AIM:g} times the tokens per second at 20 %",
    }
    result["equal_memory"] = repeated(args, kept, lambda share: None)
    if not args.no_latency:
        rows = result["equal_memory"][0]["rows"]
        result["equal_rows"] = repeated(args, kept, lambda share: rows)
    print_tables(result)
    result.update(for_readme(result))
    if args.output:
        write_text(args.output, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="facebook/opt-1.3b", help="a model whose shapes are known; weights are random")
    add("--policy", default="h2o")
    add("--budgets", type=float, nargs="+", default=[0.5, 0.2, 0.1], help="shares of prompt and generation that are kept")
    add("--cpu-mem", default="3GB", help="what the process may hold")
    add("--percent", type=float, nargs=6, default=[0, 0, 0, 100, 0, 100])
    add("--gpu-batch-size", type=int, default=16, help="rows computed at once, at most")
    add("--prompt-len", type=int, default=512)
    add("--gen-len", type=int, default=512)
    add("--dtype", default="bfloat16")
    add("--repeats", type=int, default=1)
    add("--no-latency", action="store_true", help="only the runs at equal memory")
    add("--offload-dir", default=str(default_offload_folder()))
    add("--output", help="also write the JSON document here")
    add("--one", type=float, help=argparse.SUPPRESS)  # the run of one process: share kept
    add("--rows", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# -- one process -----------------------------------------------------------------------------------------------------------


def run_one(args: argparse.Namespace) -> dict[str, Any]:
    rows = args.rows or largest(lambda count: fits(args, count))
    if not rows:
        raise SystemExit(f"error: not even one row fits {args.cpu_mem} at {args.one:.0%}; give more with --cpu-mem")
    with opened(args, rows) as llm:
        prompts = made_up_prompts(rows, args.prompt_len, llm.tokenizer, llm.spec.vocab)
        llm.generate(prompts[:1], SamplingParams(max_tokens=1))  # loads: random weights are written to disk
        before = calibrate(llm, args)
        llm.generate(prompts, SamplingParams(max_tokens=args.gen_len, ignore_eos=True))
        stats = llm.stats
        assert stats is not None
        machine = before.at_best(calibrate(llm, args))
        bounds = Cost(PlannedBlock.of(llm.spec, llm.plan, stats.last_block.block, llm.device.accelerator)).lane_bounds(
            max(1, args.gen_len // 2), machine
        )
        lane = max(bounds, key=lambda name: bounds[name])
        step = statistics.median(stats.step_seconds)
        return {
            "kept": args.one,
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
            "disk_gb_per_s": machine.disk_read_per_s / 1e9,
            "machine": describe_machine(llm.device),
        }


def opened(args: argparse.Namespace, rows: int) -> LLM:
    batch = min(rows, args.gpu_batch_size)
    kept = {} if args.one == FULL else {"kv_policy": args.policy, "kv_budget": args.one}
    shape = {"gpu_batch_size": batch, "num_gpu_batches": -(-rows // batch), "sep_layer": False, "slots": 3}
    memory = {"cpu_mem": args.cpu_mem, "offload_dir": args.offload_dir, "dtype": args.dtype}
    return LLM(args.model, dummy_weights=True, percent=args.percent, **kept, **shape, **memory)


def fits(args: argparse.Namespace, rows: int) -> bool:
    with opened(args, rows) as llm:
        try:
            llm.check(Workload.uniform(rows, args.prompt_len, args.gen_len))
        except DoesNotFit:
            return False
    return True


def largest(fits: Callable[[int], bool]) -> int:
    """How many rows fit: doubled until they do not, then halved in."""
    low, high = 0, 1
    while high <= MOST_ROWS and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def calibrate(llm: LLM, args: argparse.Namespace) -> Machine:
    needs = Needs(args.dtype, (llm.spec.ffn, llm.spec.hidden), (llm.plan.gpu_batch_size,), read_files=llm.weight_files)
    return measure(llm.device, needs, repetitions=3, seconds=0.5)


# -- all of them -----------------------------------------------------------------------------------------------------------


def repeated(args: argparse.Namespace, kept: Sequence[float], rows: Callable[[float], int | None]) -> list[dict[str, Any]]:
    """Medians, one line for each share that is kept, in turns, because machines drift."""
    runs = [run_in_process(share, rows(share)) for _ in range(args.repeats) for share in kept]
    lines = []
    for share in kept:
        own = [run for run in runs if run["kept"] == share]
        numbers = [key for key, value in own[0].items() if isinstance(value, (int, float))]
        lines.append({**own[0], **{key: statistics.median(run[key] for run in own) for key in numbers}, "runs": own})
    for line in lines:
        line["times_full"] = line["tokens_per_second"] / lines[0]["tokens_per_second"]
        line["decode_times_full"] = line["decode_tokens_per_second"] / lines[0]["decode_tokens_per_second"]
    return lines


def run_in_process(share: float, rows: int | None) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--one", str(share), *(["--rows", str(rows)] if rows else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    run: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{share:.0%}: {run['rows']} rows, {run['tokens_per_second']:.1f} tokens/s", file=sys.stderr)
    return run


def for_readme(result: Mapping[str, Any]) -> dict[str, Any]:
    """The form that scripts/readme_results.py reads."""
    lines = result["equal_memory"]
    return {
        "machine": lines[0]["machine"],
        "unit": "tokens/s in decode",
        "higher_is_better": True,
        "rows": [
            {
                "name": "full" if line["kept"] == FULL else f"{result['policy']} {line['kept']:.0%}",
                "measured": line["decode_tokens_per_second"],
                "ceiling": line["rows"] / line["bound_seconds"],
            }
            for line in lines
        ],
        "notes": "Rows in the block, and tokens/s with prefill: "
        + "; ".join(f"{line['rows']} rows, {line['tokens_per_second']:.1f} ({line['times_full']:.2f} times)" for line in lines),
    }


def print_tables(result: Mapping[str, Any]) -> None:
    first = result["equal_memory"][0]
    print(f"\n{result['model']}, {result['workload']}, {result['policy']}\nmachine: {first['machine']}")
    print(f"ceiling: {result['ceiling']}\naim: {result['aim']}")
    for name, title in (("equal_memory", f"in {result['budget_host_bytes'] / 1e9:g} GB"), ("equal_rows", "with equal rows")):
        if name in result:
            print(f"\n{title}:\n kept  rows prefill s  step s bound s (lane)     tokens/s  times full  in decode  peak GB")
            for line in result[name]:
                print(
                    f"{line['kept']:5.0%} {line['rows']:5} {line['prefill_seconds']:9.1f} {line['step_seconds']:7.2f} "
                    f"{line['bound_seconds']:7.2f} ({line['busiest_lane']:7}) {line['tokens_per_second']:10.1f} "
                    f"{line['times_full']:11.2f} {line['decode_times_full']:10.2f} {line['peak_host_bytes'] / 1e9:8.2f}"
                )


if __name__ == "__main__":
    sys.exit(main())
