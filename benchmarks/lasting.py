"""Lasting prefixes: the first token of a request after a restart, behind a long prefix that an earlier process has kept.

    python benchmarks/lasting.py                                  # the model of the package: two minutes
    python benchmarks/lasting.py --model smollm2

A process asks twice with a header in common, so that the header is computed as a prefix and written to a folder. Then processes
that know nothing are started in turns. Each loads the model, is asked three times with another prompt of the same length, and
then with the header; what the client waits for its first token is measured. One computes the header ("computed"). One reads it
from its file, which the system still has in memory ("file in memory"), or has to read from the disk ("file on disk"). The last
asks a second time, so that the header is kept where it is computed with ("kept"): that is what any of these could do at best.
The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import date
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from benchmarks.comparison.benchmark_command import passages, tell, with_header
from benchmarks.comparison.command import commit
from h2o_flexgen.engine.arrivals import Arrivals
from h2o_flexgen.engine.job import Request
from h2o_flexgen.engine.reports import Tick
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.stores.prefix_files import SUFFIX
from h2o_flexgen.llm import LLM
from h2o_flexgen.profiling.measure import describe_machine
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.prompts import Prompt

WRITTEN, COMPUTED, CACHED, ON_DISK, KEPT = "written", "computed", "file in memory", "file on disk", "kept"
WAYS = (COMPUTED, CACHED, ON_DISK, KEPT)
COLUMNS = ("prefix", "first token s", "times sooner", "prompt tokens computed", "read MB")


def main() -> int:
    args = parse(sys.argv[1:])
    if args.way:
        print(json.dumps(one_process(args)))
        return 0
    result = result_of(args, measured(args))
    for row in (result["columns"], *result["cells"]):
        print("  ".join(f"{cell:>22}" for cell in row))
    tell(result, args.output)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = with_header(__doc__, 16, "tokens of a request's own")
    add = parser.add_argument
    add("--way", help=argparse.SUPPRESS)  # of a process that is started here
    add("--folder", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# -- a process ---------------------------------------------------------------------------------------------------------------


def one_process(args: argparse.Namespace) -> dict[str, Any]:
    shape = {"gpu_batch_size": 4, "num_gpu_batches": 1, "threads": args.threads}
    folder = None if args.way == COMPUTED else args.folder
    with LLM(args.model, percent=args.percent, device="cpu", dtype=args.dtype, prefix_dir=folder, **shape) as llm:
        passage = passages(llm, Random(args.seed))
        header, others = passage(args.header), passage(args.header + args.own)
        prompts = [[*header, *passage(args.own)] for _ in range(3)]
        arrivals = llm.arrivals(args.header + args.own, 4)
        for _ in range(3):  # the third shares what the second has computed, so that all that is done later was done before
            ask(llm, arrivals, others)
        for prompt in prompts[1:] if args.way == WRITTEN else prompts[1:2] if args.way == KEPT else ():
            ask(llm, arrivals, prompt)
        if args.way == ON_DISK:
            forget_pages(Path(args.folder))
        before = llm.loaded.prefix_counts
        found = ask(llm, arrivals, prompts[0])
        counts = llm.loaded.prefix_counts
        read = 0 if counts is None or before is None else counts.read_bytes - before.read_bytes
        return {**found, "read_bytes": read, "machine": describe_machine(llm.device)}


def ask(llm: LLM, arrivals: Arrivals, prompt: Sequence[int]) -> dict[str, Any]:
    firsts, ticks, begun = list[float](), list[Tick](), time.perf_counter()

    def hear(row: RowState, token: int, text: str | None) -> None:
        firsts.append(time.perf_counter() - begun)

    params = SamplingParams(max_tokens=4, ignore_eos=True)
    arrivals.admit([come := arrivals.prepare(Request(Prompt(None, tuple(prompt)), params), hear)])
    with closing(llm.generate_arriving(arrivals, seed=0, on_tick=ticks.append)) as ended:  # type: ignore[type-var]
        assert len(list(ended)) == 1
    return {"first": firsts[0], "prompt_tokens": ticks[-1].prompt_tokens, "said": [*come.completion.token_ids]}


def forget_pages(folder: Path) -> None:
    """Has the system drop the files from its memory."""
    for file in folder.glob(f"*{SUFFIX}"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


# -- all ways ----------------------------------------------------------------------------------------------------------------


def measured(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with TemporaryDirectory(dir=Path.cwd()) as folder:
        started(args, WRITTEN, folder)
        for _ in range(args.repeats):
            for way in WAYS:
                found[way].append(started(args, way, folder))
                print(f"{way}: {found[way][-1]['first']:.3f} s", file=sys.stderr)
    said = {str(one["said"]) for runs in found.values() for one in runs}
    print(f"{len(said)} different answers", file=sys.stderr)
    return found


def started(args: argparse.Namespace, way: str, folder: str) -> dict[str, Any]:
    options = {"model": args.model, "header": args.header, "own": args.own, "dtype": args.dtype, "seed": args.seed}
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    flags += ["--percent", *map(str, args.percent), *(["--threads", str(args.threads)] if args.threads else [])]
    command = [sys.executable, __file__, *flags, "--way", way, "--folder", folder]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    result: dict[str, Any] = json.loads(lines[-1])
    return result


# -- what is told ------------------------------------------------------------------------------------------------------------


def result_of(args: argparse.Namespace, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The result in the form that scripts/readme_results.py reads."""
    seconds = {way: median(one["first"] for one in runs) for way, runs in found.items()}
    times = {way: median(a["first"] / b["first"] for a, b in zip(found[COMPUTED], runs)) for way, runs in found.items()}
    of_runs = {way: (str(runs[-1]["prompt_tokens"]), f"{runs[-1]['read_bytes'] / 1e6:.1f}") for way, runs in found.items()}
    notes = "Medians over processes that are started in turns; each has loaded its weights and shared another prompt before."
    return {
        "benchmark": "lasting",
        "title": f"A first token after a restart, {args.header} tokens in common, `{args.model}` in {args.dtype}",
        "command": "python benchmarks/lasting.py " + " ".join(sys.argv[1:]),
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": found[KEPT][0]["machine"],
        "ceiling": "a prefix that is kept in memory, where nothing of it is computed or read",
        "unit": "seconds",
        "columns": COLUMNS,
        "cells": [[way, f"{seconds[way]:.3f}", f"{times[way]:.1f}", *of_runs[way]] for way in found],
        "notes": notes,
        "lines": {way: [dict(one, machine=None) for one in runs] for way, runs in found.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
