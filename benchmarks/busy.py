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
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    sys.path[0] = os.environ.get("MEASURED_CHECKOUT", str(Path(__file__).resolve().parents[1]))  # else kernels.py is a package

from benchmarks.comparison.command import commit
from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.core.files import write_text
from h2o_flexgen.memory.device import open_device
from h2o_flexgen.profiling.measure import describe_machine

HERE, CHECKOUT = str(Path(__file__).resolve().parents[1]), "MEASURED_CHECKOUT"
QUIET, BUSY = STATES = ("quiet", "busy")
SPINNER = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
CHILD = "--child"
COLUMNS = ("rows", "threads", "checkout", "quiet tokens/s", "busy tokens/s", "kept", "processor s quiet", "processor s busy")


@dataclass(frozen=True)
class Way:
    """What one process does whenever it is asked."""

    model: str
    compute: str
    threads: int
    checkout: str
    prompt_len: int
    gen_len: int


@dataclass(frozen=True)
class Took:
    seconds: float
    processor: float


def main() -> int:
    if CHILD in sys.argv:
        answer_for(Way(**json.loads(sys.argv[-1])))
        return 0
    args = parse(sys.argv[1:])
    result = result_of(args, measured(args))
    print_table(result)
    if args.output:
        write_text(args.output, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="demo")
    add("--compute", default="int8")
    add("--rows", type=int, nargs="+", default=[1, 8, 32])
    add("--threads", type=int, nargs="+", default=[1, len(os.sched_getaffinity(0))])
    add("--checkouts", nargs="+", default=[HERE], help="folders with the packages to compare")
    add("--prompt-len", type=int, default=64)
    add("--gen-len", type=int, default=32)
    add("--rounds", type=int, default=5)
    add("--output", help="also write the JSON document here")
    return parser.parse_args(argv)


# -- the process of a way ----------------------------------------------------------------------------------------------------


def answer_for(way: Way) -> None:
    """For every number of rows that comes, generates once and says what it took. A model is opened anew for another number."""
    opened, of_rows = None, 0
    for line in sys.stdin:
        rows = int(line)
        if rows != of_rows:
            if opened is not None:
                opened.close()
            shape: dict[str, Any] = {"gpu_batch_size": rows, "num_gpu_batches": 1, "compute": way.compute}
            opened = LLM(way.model, percent=(100, 0, 100, 0, 100, 0), device="cpu", threads=way.threads, **shape)
            of_rows = rows
            opened.generate([[100] * way.prompt_len] * rows, SamplingParams(max_tokens=2))  # loads
        assert opened is not None
        prompts = [[100 + (7 * row + at) % 150 for at in range(way.prompt_len)] for row in range(rows)]
        begun, processor = time.perf_counter(), time.process_time()
        opened.generate(prompts, SamplingParams(max_tokens=way.gen_len, ignore_eos=True))
        print(json.dumps([time.perf_counter() - begun, time.process_time() - processor]), flush=True)


class Runner:
    """A way's process, seen from outside."""

    def __init__(self, way: Way) -> None:
        self.way = way
        command = [sys.executable, __file__, CHILD, json.dumps(asdict(way))]
        env = {**os.environ, "PYTHONPATH": way.checkout, CHECKOUT: way.checkout}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def took(self, rows: int) -> Took:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{rows}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process with {self.way.threads} threads ended with status {self._process.wait()}")
        return Took(*json.loads(answer))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


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
    shape = {"prompt_len": args.prompt_len, "gen_len": args.gen_len}
    folders = [str(Path(checkout).resolve()) for checkout in args.checkouts]
    return [Way(args.model, args.compute, threads, folder, **shape) for threads in args.threads for folder in folders]


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = list[dict[str, Any]]()
    with ExitStack() as stack:
        runners = [Runner(way) for way in ways(args)]
        for runner in runners:
            stack.callback(runner.close)
        spinners = Spinners()
        stack.callback(spinners.close)
        for rows in args.rows:
            took = {(runner.way, state): list[Took]() for runner in runners for state in STATES}
            for runner in runners:
                runner.took(rows)  # opens the model
            for _ in range(args.rounds):
                for state in STATES:
                    with spinners.state(state):
                        for runner in runners:
                            took[runner.way, state].append(runner.took(rows))
            for runner in runners:
                found.append(line_of(rows, runner.way, {state: took[runner.way, state] for state in STATES}))
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
