"""Beside busy processes: what a run keeps of its rate when another process wants every core, with one thread and with several.

    python benchmarks/busy.py --model smollm2                                   # minutes
    python benchmarks/busy.py --model smollm2 --compute exact --threads 2 --checkouts ../before .

Every way (a number of threads, and a checkout) has a process of its own, which loads the model once. The ways take
turns, on the quiet machine and then beside one busy process for each core, which is bound to its core; while the machine is to
be quiet these are stopped. Medians over the rounds. The kept share is the busy rate over the quiet rate of the same way. Set
GOMP_SPINCOUNT as the run that you mean has it: a command sets it to 2000, and so does the package where it is imported before
torch. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from benchmarks.comparison.benchmark_command import add_output, parser_of, tell
from benchmarks.comparison.command import commit
from benchmarks.comparison.engine_process import HERE, EngineProcess, Took, Way
from benchmarks.comparison.one_file import IN_MEMORY
from h2o_flexgen.memory.device import open_device
from h2o_flexgen.profiling.measure import describe_machine

QUIET, BUSY = STATES = ("quiet", "busy")
SPINNER = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
COLUMNS = ("rows", "threads", "checkout", "quiet tokens/s", "busy tokens/s", "kept", "processor s quiet", "processor s busy")


def main() -> int:
    args = parse(sys.argv[1:])
    result = result_of(args, measured(args))
    print_table(result)
    tell(result, args.output)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", default="demo")
    add("--compute", default="int8")
    add("--rows", type=int, nargs="+", default=[1, 8, 32])
    add("--threads", type=int, nargs="+", default=[1, len(os.sched_getaffinity(0))])
    add("--checkouts", nargs="+", default=[HERE], help="folders with the packages to compare")
    add("--prompt-len", type=int, default=64)
    add("--gen-len", type=int, default=32)
    add("--rounds", type=int, default=5)
    add_output(parser)
    return parser.parse_args(argv)


# -- busy processes ----------------------------------------------------------------------------------------------------------


class Spinners:
    """A process for each core that does nothing but want it; stopped, until the machine is to be busy."""

    def __init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self._processes = [subprocess.Popen([sys.executable, "-c", SPINNER, str(core)]) for core in cores]
        self._tell(signal.SIGSTOP)

    def _tell(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    @contextmanager
    def state(self, state: str) -> Iterator[None]:
        if state == BUSY:
            self._tell(signal.SIGCONT)
        try:
            yield
        finally:
            self._tell(signal.SIGSTOP)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


# -- all of them -------------------------------------------------------------------------------------------------------------


def ways(args: argparse.Namespace) -> list[Way]:
    folders = [str(Path(checkout).resolve()) for checkout in args.checkouts]
    shape, options = (args.prompt_len, args.gen_len), {"percent": IN_MEMORY, "compute": args.compute}
    return [Way(args.model, *shape, threads, options, folder) for threads in args.threads for folder in folders]


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = list[dict[str, Any]]()
    with ExitStack() as stack:
        asked = ways(args)
        runners = [stack.enter_context(closing(EngineProcess(way))) for way in asked]
        spinners = Spinners()
        stack.callback(spinners.close)
        for rows in args.rows:
            took = {(number, state): list[Took]() for number in range(len(asked)) for state in STATES}
            for runner in runners:
                runner.took(rows)  # opens the model
            for _ in range(args.rounds):
                for state in STATES:
                    with spinners.state(state):
                        for number, runner in enumerate(runners):
                            took[number, state].append(runner.took(rows))
            for number, way in enumerate(asked):
                found.append(line_of(rows, way, {state: took[number, state] for state in STATES}))
                print({name: found[-1][name] for name in ("rows", "threads", "checkout", "rates", "kept")}, file=sys.stderr)
    return found


def line_of(rows: int, way: Way, took: Mapping[str, Sequence[Took]]) -> dict[str, Any]:
    """Rates are of generated tokens, over the whole run with its prompts."""
    tokens = rows * way.gen_len
    rates = {state: median(tokens / one.seconds for one in took[state]) for state in STATES}
    return {
        "rows": rows,
        "threads": way.threads,
        "checkout": Path(way.checkout).name,
        "rates": rates,
        "kept": rates[BUSY] / rates[QUIET],
        "processor": {state: median(one.processor for one in took[state]) for state in STATES},
        "seconds": {state: [one.seconds for one in took[state]] for state in STATES},
    }


def result_of(args: argparse.Namespace, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    cells = [
        [
            *(str(line[name]) for name in ("rows", "threads", "checkout")),
            *(f"{line['rates'][state]:.1f}" for state in STATES),
            f"{line['kept']:.2f}",
            *(f"{line['processor'][state]:.2f}" for state in STATES),
        ]
        for line in lines
    ]
    return {
        "benchmark": "busy",
        "title": f"`{args.model}`, {args.compute}, {args.prompt_len} + {args.gen_len} tokens, one busy process per core",
        "command": "python benchmarks/busy.py " + " ".join(sys.argv[1:]),
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": describe_machine(open_device("cpu")),
        "ceiling": "half of the quiet rate: a core's time is halved between two processes",
        "unit": "tokens/s",
        "columns": COLUMNS,
        "cells": cells,
        "notes": f"Medians over {args.rounds} rounds, GOMP_SPINCOUNT={os.environ.get('GOMP_SPINCOUNT', 'not set')}.",
        "lines": list(lines),
    }


def print_table(result: Mapping[str, Any]) -> None:
    print(f"\n{result['title']}\nmachine: {result['machine']}\n{result['notes']}")
    for row in (result["columns"], *result["cells"]):
        print("  ".join(f"{cell:>17}" for cell in row))


if __name__ == "__main__":
    sys.exit(main())
