"""Jobs: files of requests that differ in length, or that begin alike, in one memory and in several ways.

    python benchmarks/jobs.py ragged --cpu-mem 700MB                       # weights on disk: a quarter of an hour
    python benchmarks/jobs.py ragged --percent 0 100 0 100 0 100 --cpu-mem 700MB
    python benchmarks/jobs.py few-shot --requests 64

`ragged`: prompts of 32 to 512 tokens, limits of tokens drawn from a long-tailed distribution, and the model's own ends of text.
Blocks run one after the other, and rows that have ended stay till the end of theirs ("blocks"), or leave ("compaction"); or
they make room for the next ("joining"). `few-shot`: a header of 800 tokens before 64 of a request's own, 8 generated, with the
header shared and not. Every way takes as many rows as the memory allows, in a process of its own; ways take turns. The last
line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from benchmarks.comparison.benchmark_command import add_output, parser_of, tell
from h2o_flexgen.checkpoints.model_places import held_out_prose
from h2o_flexgen.core.environment import default_offload_folder
from h2o_flexgen.core.files import write_text
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.core.units import parse_bytes
from h2o_flexgen.core.workload import Block, Workload
from h2o_flexgen.engine.job import Request
from h2o_flexgen.engine.reports import Tick
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.seating import Seating
from h2o_flexgen.planning.workload_plan import largest
from h2o_flexgen.profiling.measure import describe_machine
from h2o_flexgen.sampling.params import SamplingParams

BLOCKS, COMPACTION, JOINING = RAGGED = ("blocks", "compaction", "joining")
APART, SHARED = FEW_SHOT = ("apart", "shared")
FILES = {"ragged": RAGGED, "few-shot": FEW_SHOT}
SHORTEST, LONGEST, HEADER, OWN, ANSWER = 32, 512, 800, 64, 8
TAIL, LEAST, MOST = 1.1, 24, 500  # of the limits: the exponent of Pareto's distribution, its least value, and the largest taken
SPARED = 24 << 20  # bytes
AIMS = {
    JOINING: "1.5 times the tokens per second of blocks with compaction, 0.9 of the computed tokens useful",
    SHARED: "5 times",
}


def main() -> int:
    args = parse(sys.argv[1:])
    if args.one is not None:
        print(json.dumps(run_one(args)))
        return 0
    with TemporaryDirectory() as folder:
        lines = repeated(args, Path(folder) / "lengths.json")
    result = result_of(args, lines)
    print_table(result)
    tell(result, args.output)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("file", choices=tuple(FILES))
    add("--model", default="demo")
    add("--requests", type=int, default=300)
    add("--cpu-mem", default=None, help="what the process may hold (default: all memory)")
    add("--percent", type=float, nargs=6, default=[0, 0, 0, 100, 0, 100])
    add("--num-gpu-batches", type=int, default=2)
    add("--most-rows", type=int, default=64, help="rows of a batch, at most")
    add("--dtype", default="bfloat16")
    add("--threads", type=int)
    add("--seed", type=int, default=0)
    add("--repeats", type=int, default=3)
    add("--ways", nargs="+", help="only these")
    add("--offload-dir", default=str(default_offload_folder()))
    add_output(parser)
    add("--one", help=argparse.SUPPRESS)  # internal: a process that runs one way
    add("--lengths", help=argparse.SUPPRESS)  # internal: a file with the tokens that each row came to
    return parser.parse_args(argv)


# -- the files -------------------------------------------------------------------------------------------------------------


def requests_of(args: argparse.Namespace, llm: LLM) -> list[Request]:
    """The same for the same seed."""
    random, text = Random(args.seed), llm.tokenizer.encode(held_out_prose())
    made = _ragged(args, random, text) if args.file == "ragged" else _few_shot(args, random, text)
    return list(made)


def _ragged(args: argparse.Namespace, random: Random, text: Sequence[int]) -> Iterator[Request]:
    for _ in range(args.requests):
        length, most = random.randint(SHORTEST, LONGEST), min(MOST, int(LEAST * random.paretovariate(TAIL)))
        yield Request(_passage(random, text, length), SamplingParams(temperature=1.0, max_tokens=most))


def _few_shot(args: argparse.Namespace, random: Random, text: Sequence[int]) -> Iterator[Request]:
    header = _passage(random, text, HEADER)
    for _ in range(args.requests):
        asked = SamplingParams(temperature=1.0, max_tokens=ANSWER, ignore_eos=True)
        yield Request([*header, *_passage(random, text, OWN)], asked)


def _passage(random: Random, text: Sequence[int], length: int) -> list[int]:
    start = random.randrange(len(text) - length)
    return list(text[start : start + length])


# -- one process -----------------------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """What a way did. Useful tokens are those of prompts and all generated ones but the first of each row, which its prompt
    gives."""

    seconds: float
    generated: Sequence[int]  # tokens of each row
    computed_tokens: int
    alive: float  # rows alive of rows possible, over all passes
    ticks: list[Tick] = field(default_factory=list)


def run_one(args: argparse.Namespace) -> dict[str, Any]:
    size = rows_that_fit(args)
    with opened(args, size) as llm:
        requests = requests_of(args, llm)
        llm.generate([requests[0].prompt], SamplingParams(max_tokens=1))  # loads
        ran = WAYS[args.one](args, llm, requests)
        assert llm.stats is not None
        whole = sum(len(request.prompt) for request in requests)  # type: ignore[arg-type]
        prompts = ran.ticks[-1].prompt_tokens if ran.ticks else whole  # a shared header is read once
        useful = prompts + sum(ran.generated) - len(requests)
        run = {
            "way": args.one,
            "rows": size * args.num_gpu_batches,
            "seconds": ran.seconds,
            "tokens_per_second": sum(ran.generated) / ran.seconds,
            "useful_share": useful / ran.computed_tokens,
            "alive_share": ran.alive,
            "peak_host_bytes": llm.stats.peak_bytes["host"],
            "machine": describe_machine(llm.device),
            "generated": list(ran.generated),
        }
        if ran.ticks:
            run |= _at_best(ran, prompts) | _foreseen(args, llm, requests, ran)
        return run


def rows_that_fit(args: argparse.Namespace) -> int:
    """Rows of a batch that take the memory but for a little, by which processes differ before they begin."""
    held = None if args.cpu_mem is None else parse_bytes(args.cpu_mem) - SPARED
    size = largest(lambda count: fits(argparse.Namespace(**{**vars(args), "cpu_mem": held}), count), args.most_rows)
    if not size:
        raise SystemExit(f"error: not even one row fits {args.cpu_mem}; give more with --cpu-mem")
    return size


def fits(args: argparse.Namespace, size: int) -> bool:
    with opened(args, size) as llm:
        return llm.planned(_workload(args, llm)).fits(llm.limits)


def _workload(args: argparse.Namespace, llm: LLM) -> Workload:
    needs = [SeatNeed(len(one.prompt), one.params.max_tokens) for one in requests_of(args, llm)]  # type: ignore[union-attr,arg-type]
    if args.one in (BLOCKS, COMPACTION):
        return Workload(tuple(need.prompt_len for need in needs), max(need.gen_len for need in needs))
    return Workload.running(needs)


def opened(args: argparse.Namespace, size: int) -> LLM:
    shape = {"gpu_batch_size": size, "num_gpu_batches": args.num_gpu_batches, "shared_prefixes": args.one == SHARED}
    memory = {"cpu_mem": args.cpu_mem, "offload_dir": args.offload_dir, "dtype": args.dtype, "threads": args.threads}
    return LLM(args.model, percent=args.percent, device="cpu", **shape, **memory)


# -- ways ------------------------------------------------------------------------------------------------------------------


def without_compaction(args: argparse.Namespace, llm: LLM, requests: Sequence[Request]) -> Ran:
    """All rows of a block are computed until the last of them has ended."""
    lengths = json.loads(Path(args.lengths).read_text(encoding="utf-8"))
    return _in_blocks(
        llm, requests, lengths, lambda block: {row: max(lengths[other] for other in block.rows) for row in block.rows}
    )


def with_compaction(args: argparse.Namespace, llm: LLM, requests: Sequence[Request]) -> Ran:
    return _in_blocks(llm, requests, None, lambda block: {})


def _in_blocks(
    llm: LLM, requests: Sequence[Request], lengths: Sequence[int] | None, limits: Callable[[Block], Mapping[int, int]]
) -> Ran:
    prompts, params = [one.prompt for one in requests], [one.params for one in requests]
    lens = tuple(len(prompt) for prompt in prompts)  # type: ignore[arg-type]
    blocks = Workload(lens, 1).blocks(llm.plan.gpu_batch_size, llm.plan.num_gpu_batches)
    for row, most in (pair for block in blocks for pair in limits(block).items()):
        params[row] = replace(params[row], max_tokens=most, ignore_eos=True)  # type: ignore[type-var]
    begun = time.perf_counter()
    completions = llm.generate(prompts, params, seed=0, may_shrink=False)
    seconds = time.perf_counter() - begun
    grown = [len(one.token_ids) for one in completions]
    possible = sum(block.num_rows * max(grown[row] for row in block.rows) for block in blocks)
    batches = [batch for block in blocks for batch in block.batches]
    padded = sum(part.size * part.prompt_len for batch in batches for part in batch.parts(llm.plan.prefill_tokens))
    useful = grown if lengths is None else lengths
    return Ran(seconds, useful, padded + sum(grown) - len(grown), sum(useful) / possible)


def joining(args: argparse.Namespace, llm: LLM, requests: Sequence[Request]) -> Ran:
    ticks: list[Tick] = []
    begun = time.perf_counter()
    found = sorted(llm.generate_stream(requests, seed=0, on_tick=ticks.append, may_shrink=False), key=lambda one: one.index)
    seconds = time.perf_counter() - begun
    alive = sum(tick.alive for tick in ticks) / sum(tick.seats for tick in ticks)
    return Ran(seconds, [len(one.token_ids) for one in found], ticks[-1].computed_tokens, alive, ticks)


WAYS: Mapping[str, Callable[[argparse.Namespace, LLM, Sequence[Request]], Ran]] = {
    BLOCKS: without_compaction,
    COMPACTION: with_compaction,
    JOINING: joining,
    APART: joining,
    SHARED: joining,
}


def _at_best(ran: Ran, prompts: int) -> dict[str, float]:
    """Tokens per second if every seat were taken in every pass, at the rates of this run: of its first pass, which reads
    prompts alone, and of those passes without prompts that took least for a row."""
    first = ran.ticks[0]
    passes = [(now.alive, now.decode_seconds - before.decode_seconds) for before, now in pairwise(ran.ticks)]
    full = sorted((seconds / alive for alive, seconds in passes if seconds and alive), key=float)
    of_row = statistics.median(full[: max(1, len(full) // 4)]) if full else 0.0
    decoded = sum(ran.generated) - len(ran.generated)
    of_prompts = prompts * first.prompt_seconds / max(1, first.computed_tokens)
    return {"ceiling_tokens_per_second": sum(ran.generated) / (of_prompts + decoded * of_row)}


def _foreseen(args: argparse.Namespace, llm: LLM, requests: Sequence[Request], ran: Ran) -> dict[str, int]:
    """Passes, and those that were foreseen, for rows that grow as long as they may."""
    seating = Seating.of(llm.planned(_workload(args, llm)).blocks.first)
    return {"passes": ran.ticks[-1].number, "foreseen_passes": seating.passes}


# -- all of them -----------------------------------------------------------------------------------------------------------


def repeated(args: argparse.Namespace, lengths: Path) -> list[dict[str, Any]]:
    """Medians, one line for each way; ways take turns, because machines drift. A run without compaction does not see
    where texts end, so one with compaction comes first."""
    ways = [way for way in FILES[args.file] if args.ways is None or way in args.ways]
    if BLOCKS in ways:
        write_text(lengths, json.dumps(run_in_process(COMPACTION, lengths)["generated"]))
    runs = [run_in_process(way, lengths) for _ in range(args.repeats) for way in ways]
    lines = []
    for way in ways:
        own = [run for run in runs if run["way"] == way]
        numbers = [key for key, value in own[0].items() if isinstance(value, (int, float))]
        lines.append({**own[0], **{key: statistics.median(run[key] for run in own) for key in numbers}})
        lines[-1]["rates"] = [run["tokens_per_second"] for run in own]
    return lines


def run_in_process(way: str, lengths: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--one", way, "--lengths", str(lengths)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    run: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{way}: {run['rows']} rows, {run['tokens_per_second']:.1f} tokens/s", file=sys.stderr)
    return run


def result_of(args: argparse.Namespace, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The result in the form that scripts/readme_results.py reads."""
    baseline = lines[-2] if len(lines) > 1 else lines[0]
    for line in lines:
        line["times"] = line["tokens_per_second"] / baseline["tokens_per_second"]
        del line["generated"]
    ceiling = lines[-1]["ceiling_tokens_per_second"]
    shape = " ".join(f"{share:g}" for share in args.percent)
    held = "all memory" if args.cpu_mem is None else args.cpu_mem
    return {
        "benchmark": "jobs",
        "command": "python benchmarks/jobs.py " + " ".join(sys.argv[1:]),
        "title": f"A job of {args.requests} {args.file} requests, `{args.model}`, `--percent {shape}`, {held}",
        "machine": lines[0]["machine"],
        "ceiling": "every seat taken in every pass, at the rates of the last line's own run",
        "aim": AIMS.get(lines[-1]["way"], "what the line before says"),
        "unit": "tokens/s",
        "higher_is_better": True,
        "rows": [{"name": line["way"], "measured": line["tokens_per_second"], "ceiling": ceiling} for line in lines],
        "notes": "; ".join(
            f"{line['way']}: {line['rows']} rows, {line['times']:.2f} times, useful of computed tokens "
            f"{line['useful_share']:.2f}, rows alive of rows possible {line['alive_share']:.2f}"
            for line in lines
        )
        + ".",
        "lines": lines,
    }


def print_table(result: Mapping[str, Any]) -> None:
    print(f"\n{result['title']}\nmachine: {result['machine']}\nceiling: {result['ceiling']}\naim: {result['aim']}")
    print("\nway         rows  seconds  tokens/s  times  useful  alive  of ceiling  peak GB")
    for line, row in zip(result["lines"], result["rows"]):
        print(
            f"{line['way']:10} {line['rows']:5} {line['seconds']:8.1f} {line['tokens_per_second']:9.1f} {line['times']:6.2f} "
            f"{line['useful_share']:7.2f} {line['alive_share']:6.2f} {row['measured'] / row['ceiling']:11.2f} "
            f"{line['peak_host_bytes'] / 1e9:8.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())
