"""This engine and its peers side by side: the same workload, the same memory, each with its best number of rows.

    python benchmarks/compare.py --suite cpu-small --loads 64+256            # OPT-1.3B shapes in 1.5 GiB
    python benchmarks/compare.py --suite cpu --caps 4GiB --loads 64+256      # OPT-6.7B shapes in 4 GiB: hours
    python benchmarks/compare.py --suite cpu --systems h2o_flexgen accelerate --steps 8 --repeats 3
    python benchmarks/compare.py --suite processor --llama-cpp SOURCES --repeats 3      # all with the same rows, in turns
    python benchmarks/compare.py --suite gpu-16gb --seconds 560 --output RESULTS        # docs/gpu.md has more of these

Every run has a process of its own under the same cap on memory, the page cache included, and starts with nothing of the
checkpoint in that cache. Random weights are written once, as a checkpoint that every system can read. Rows are doubled until a
system fails or slows, and then tried half way. The engine's planner knows what fits, so the engine is tried from there
downwards, and with one thing switched off it is run with as many as fit. With --rows, as in the suite "processor", all
systems are run with the same numbers of rows, in turns, and prompts and steps are held against the machine's limit apart.
Without --whole a run is shortened: prompts are computed whole, then a few decode steps are timed with as much KV as half way
through the text, and the rest of the generation counts as if each step took their median. The machine is measured before and
after. The last line is one JSON document; --picture draws it.

On a GPU, systems make their weights up in memory, and rows are given or counted, and not searched. With --seconds a call ends
in time, and the next one with the same --output goes on where it ended. The machine is measured once in each call.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.baselines.llama_build import INSTRUCTIONS, NATIVE
from benchmarks.comparison.comparison import Comparison, Shared
from benchmarks.comparison.comparison import commit as commit
from benchmarks.comparison.comparison import say as say
from benchmarks.comparison.gpu_suites import ALL_SUITES
from benchmarks.comparison.picture import draw, lines_of
from benchmarks.comparison.report import Report
from benchmarks.comparison.suites import Contender, Load, by_rows
from benchmarks.comparison.time_left import Deadline
from h2o_flexgen.core.environment import default_offload_folder
from h2o_flexgen.core.files import write_text
from h2o_flexgen.core.units import parse_bytes
from h2o_flexgen.formats.kernel_table import CPU, CUDA

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that systems under way are ended too
    command = " ".join(["python benchmarks/compare.py", *(sys.argv[1:] if argv is None else argv)])
    shared, reports = Shared(Deadline(args.seconds)), dict[str, Report]()
    for part, load, model, cap in product(parts(args), args.loads, args.models, args.caps):
        if shared.deadline.left <= 0:
            say(f"{model}, {load} tokens: {', '.join(one.name for one in part)}: not begun, the same command goes on")
            continue
        try:
            report = Comparison(args, model, cap, load, shared, part).run(partial(written, args, command))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        reports[report.name] = report
        print("\n" + report.table() + "\n")
        if args.picture:
            draw(report.title, lines_of(report), Path(args.picture) / f"compare-{report.name}.png")
    print(json.dumps([report.document(command, commit()) for report in reports.values()]))
    return 0


def parts(args: argparse.Namespace) -> list[list[Contender]]:
    """Where time is short, the first systems of a suite are run for all models and loads before the others are."""
    first = ALL_SUITES[args.suite].first
    if args.seconds is None or first is None:
        return [args.contenders]
    early = [one for one in args.contenders if one in args.known[:first]]
    return [part for part in (early, [one for one in args.contenders if one not in early]) if part]


def written(args: argparse.Namespace, command: str, report: Report) -> None:
    """Leaves what is known so far where an interrupted call finds it again."""
    if args.output:
        Path(args.output).mkdir(parents=True, exist_ok=True)
        document = report.document(command, commit())
        write_text(Path(args.output) / report.file_name, json.dumps(document, indent=1) + "\n")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    args = parser.parse_args(argv)
    suite = ALL_SUITES[args.suite]
    args.models, args.caps, args.loads = args.models or suite.models, args.caps or suite.caps, args.loads or suite.loads
    args.device, args.made_up = args.device or suite.device, suite.made_up
    args.device_bytes = None if args.device == CPU else suite.device_bytes
    args.dtype, args.rows = args.dtype or suite.dtype, tuple(args.rows or suite.rows)
    args.resume = args.resume or args.seconds is not None
    try:
        refuse_wrong(args)
        args.known = by_rows() if args.rows and not suite.rows else suite.contenders()
        args.contenders = chosen(args)
    except ValueError as error:
        parser.error(str(error))
    args.of_system = {
        "llama.cpp": {"folder": args.llama_cpp, "instructions": args.llama_cpp_for},
        "h2o original": {"sources": args.h2o_original},
    }
    return args


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--suite", choices=ALL_SUITES, default="cpu-small")
    add("--systems", nargs="+", metavar="NAME", help="only these, and the first, which the others are held against")
    add("--models", nargs="+", help="instead of the suite's; shapes are known by name")
    add("--caps", nargs="+", type=argument_of(parse_bytes), metavar="SIZE", help="of memory, like 4GiB, instead of the suite's")
    add("--loads", nargs="+", type=argument_of(Load.of), metavar="P+G", help="tokens of a prompt + tokens to generate")
    add("--device", choices=(CPU, CUDA), help="instead of the suite's: a suite for a GPU can be tried without one")
    add("--dtype", help="that is computed in (default: the suite's)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=6, help="decode steps that are timed")
    length.add_argument("--whole", action="store_true", help="generate everything")
    add("--repeats", type=int, default=1, help="runs of each system with its best number of rows, in turns; medians count")
    add("--most-rows", type=int, default=1024, help="no system is tried with more")
    add("--rows", type=int, nargs="+", help="run every system with these, in turns, instead of finding its best number")
    told = "of llama.cpp's programs, or of its sources, which are compiled once (default: PATH)"
    add("--llama-cpp", metavar="FOLDER", help=told)
    add("--llama-cpp-for", choices=INSTRUCTIONS, default=NATIVE, help="the instructions for which it is compiled")
    add("--h2o-original", metavar="FOLDER", help="the folder h2o_flexgen of H2O's sources, which are in no package")
    add("--timeout", type=float, default=3600, help="seconds that one run may take")
    add("--seconds", type=float, help="of the whole call: what would not be over is named and not run; goes on like --resume")
    add("--resume", action="store_true", help="what --output has already of this machine is not run again")
    add("--again", nargs="+", default=[], metavar="NAME", help="systems that are run again all the same")
    add("--folder", default=str(default_offload_folder().parent / "compare"), help="for checkpoints and what is offloaded")
    add("--output", metavar="FOLDER", help="also write compare-....json there, after each system")
    add("--picture", metavar="FOLDER", help="also draw compare-....png there (needs matplotlib)")


def refuse_wrong(args: argparse.Namespace) -> None:
    for load in args.loads:
        if not args.whole and args.steps + 2 > load.gen_len // 2:
            raise ValueError(f"--steps {args.steps} do not fit into the second half of {load.gen_len} tokens; use --whole")
    if args.rows and args.picture:
        raise ValueError("--picture draws what was found of the best number of rows; leave it out with given rows")
    if args.resume and not args.output:
        raise ValueError("--resume and --seconds need an --output: the folder in which the results of earlier calls are")
    if args.device == CUDA and not torch.cuda.is_available():
        raise ValueError(f"suite {args.suite} needs a CUDA device, and torch finds none; --device cpu tries it without one")


def chosen(args: argparse.Namespace) -> list[Contender]:
    """Those of the suite, or of a table by rows, that are asked for."""
    names = [one.name for one in args.known]
    for name in (*(args.systems or ()), *args.again):
        if name not in names:
            raise ValueError(f"unknown system {name!r}; known: {', '.join(map(repr, names))}")
    return [one for one in args.known if not args.systems or one.name in (names[0], *args.systems)]


def argument_of(read: Callable[[str], T]) -> Callable[[str], T]:
    """Turns a ValueError into argparse's own error, which is shown as its message alone."""

    def checked(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked
