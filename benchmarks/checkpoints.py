"""A checkpoint from its file to its first token, and its tokens per second, beside llama.cpp on the same GGUF file.

    scripts/fetch_smollm2 && python benchmarks/checkpoints.py --llama-cpp SOURCES
    python benchmarks/checkpoints.py MODEL.gguf --memory 8GiB --rows 1 8 --repeats 5 --output benchmarks/results

Every run is a process of its own under the same cap on memory, the page cache included. Until the first token: the seconds of
the command that a person would type, from its start to its end, asked for one token, and once without a model: of ours, most is
the start of Python with torch. They are taken with nothing of the file in the page cache, and again with all of it. Tokens per
second: prompts and steps apart, of loaded models, by the harness of compare.py. All take turns; medians count. The last line is
one JSON document.
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
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from benchmarks.baselines.llama_build import BENCH, COMPLETION, QUANTIZE, compiled_programs
from benchmarks.comparison.cap import open_cap
from benchmarks.comparison.command import argument_of, commit, say
from benchmarks.comparison.launch import Failed, Launcher, forget_pages
from benchmarks.comparison.one_file import (
    DTYPE,
    IN_MEMORY,
    THEIRS,
    add_options,
    chosen,
    our_contender,
    request,
    their_contender,
)
from benchmarks.comparison.point import Point
from benchmarks.comparison.suites import Contender, Load
from benchmarks.instructions import instructions, processor_slug
from benchmarks.limits import LIMIT, Limits, PassLimit
from h2o_flexgen.checkpoints.model_places import SMOLLM2, held_out_prose, resolve_model
from h2o_flexgen.core.files import write_text
from h2o_flexgen.core.units import format_bytes, parse_bytes
from h2o_flexgen.formats.kernel_table import EXACT, INT8
from h2o_flexgen.memory.device import open_device
from h2o_flexgen.profiling.measure import describe_machine

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = (COMPLETION, BENCH, QUANTIZE)
PROMPT_WORDS = 48
COLUMNS = (
    *("system", "computes", "rows", "first token s: file on disk", "file in memory", "without a model"),
    *("prompts tokens/s", "steps tokens/s", "steps of ceiling", "steps beside llama.cpp", "peak RSS GB"),
)


@dataclass(frozen=True)
class Started:
    """Seconds of a command that gives one token: with the file on disk, with it in memory, and of the same without a model."""

    cold: float
    warm: float
    bare: float


@dataclass
class Measured:
    contender: Contender
    started: list[Started] = field(default_factory=list)
    points: dict[int, Point] = field(default_factory=dict)  # by rows

    def median_of(self, which: str) -> float:
        return median(getattr(one, which) for one in self.started)


def main() -> int:
    args = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that systems under way are ended too
    result = document(args, measured(args))
    print_table(result)
    if args.output:
        Path(args.output).mkdir(parents=True, exist_ok=True)
        name = f"checkpoints-{args.file.stem}-{processor_slug()}.json".lower()
        write_text(Path(args.output) / name, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", nargs="?", default=SMOLLM2.name, help="a GGUF file (default: what scripts/fetch_smollm2 fetches)")
    add("--memory", type=argument_of(parse_bytes), default=parse_bytes("1GiB"), help="of each process (default: 1GiB)")
    add("--rows", type=int, nargs="+", default=[1, 8, 32])
    add("--load", type=argument_of(Load.of), default=Load(128, 33), metavar="P+G", help="tokens of a prompt + to generate")
    add("--repeats", type=int, default=3)
    add_options(parser)
    add("--systems", nargs="+", metavar="NAME", help="only these")
    add("--timeout", type=float, default=600, help="seconds that one run may take")
    add("--output", metavar="FOLDER", help="also write checkpoints-....json there")
    args = parser.parse_args(argv)
    try:
        args.file = resolve_model(args.model)
        args.programs = compiled_programs(args.llama_cpp, args.llama_cpp_for, PROGRAMS)
        args.contenders = chosen(contenders(args), args.systems)
    except ValueError as error:
        parser.error(str(error))
    return args


def contenders(args: argparse.Namespace) -> list[Contender]:
    return [
        their_contender(args.programs),
        our_contender("int8", "rows in int8, KV in bfloat16", compute=INT8),
        our_contender("bfloat16", "exactly, KV in bfloat16"),
        our_contender("float32", "exactly, KV in float32", dtype="float32"),
    ]


# -- measuring -------------------------------------------------------------------------------------------------------------


def measured(args: argparse.Namespace) -> list[Measured]:
    """Systems take turns, because machines drift. What fails is left out, and said."""
    found = [Measured(contender) for contender in args.contenders]
    launcher = Launcher(args.timeout, {"PYTHONPATH": python_path()})
    for turn in range(args.repeats):
        for one in found:
            try:
                add_turn(args, launcher, one)
            except Failed as error:
                say(f"{turn}: {one.contender.name}: {error}")
    return [one for one in found if one.points]


def add_turn(args: argparse.Namespace, launcher: Launcher, one: Measured) -> None:
    one.started.append(started(args, one.contender))
    seconds = one.started[-1]
    say(f"{one.contender.name}: first token {seconds.cold:.2f} s, {seconds.warm:.2f} s, {seconds.bare:.2f} s")
    for rows in args.rows:
        answer = launcher.run(request(args.file, one.contender, rows, args.load, args.memory), loads_within_cap=True)
        point = one.points.get(rows, Point(rows, args.load, ())).with_answer(answer)
        one.points[rows] = point
        say(f"{one.contender.name}, {rows} rows: {point}")


def started(args: argparse.Namespace, contender: Contender) -> Started:
    command = first_token_command(args, contender)
    forget_pages(args.file)
    return Started(*(seconds_of(args, one) for one in (command, command, bare_command(args, contender))))


def first_token_command(args: argparse.Namespace, contender: Contender) -> list[str]:
    prompt, threads = " ".join(held_out_prose().split()[:PROMPT_WORDS]), str(torch.get_num_threads())
    if contender.system == THEIRS:
        asked = ["-m", str(args.file), "-p", prompt, "-n", "1", "-t", threads, "-tb", threads, "--temp", "0"]
        return [str(args.programs / COMPLETION), *asked, "-no-cnv", "--no-warmup", "--no-display-prompt"]
    ours = [sys.executable, "-m", "h2o_flexgen.run", "--model", str(args.file), "--prompt", prompt, "--gen-len", "1"]
    asked = [
        "--percent",
        *map(str, IN_MEMORY),
        "--dtype",
        contender.dtype or DTYPE,
        "--device",
        "cpu",
        "--threads",
        threads,
    ]
    return [*ours, *asked, "--compute", str(contender.options.get("compute", EXACT))]


def bare_command(args: argparse.Namespace, contender: Contender) -> list[str]:
    if contender.system == THEIRS:
        return [str(args.programs / COMPLETION), "--version"]
    return [sys.executable, "-c", "import h2o_flexgen.llm, transformers"]


def seconds_of(args: argparse.Namespace, command: Sequence[str]) -> float:
    """The wall time of a command under the cap."""
    cap = open_cap()
    try:
        cap.lower(args.memory)
        begun = time.perf_counter()
        done = subprocess.run(
            cap.started(command),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": python_path()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=args.timeout,
        )
        seconds = time.perf_counter() - begun
    finally:
        cap.close()
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise Failed(f"{command[0]} ended with status {done.returncode}: {(said or ['without a word'])[-1]}")
    return seconds


def python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


# -- what comes of it --------------------------------------------------------------------------------------------------------


def document(args: argparse.Namespace, found: Sequence[Measured]) -> dict[str, Any]:
    """The result in the form that scripts/readme_results.py reads."""
    limits = Limits.measured()
    theirs = next((one.points for one in found if one.contender.name == THEIRS), {})
    return {
        "benchmark": "checkpoints",
        "title": f"{args.file.name}, {args.load} tokens, {format_bytes(args.memory)} of memory ({instructions()})",
        "machine": describe_machine(open_device("cpu")),
        "date": date.today().isoformat(),
        "commit": commit(),
        "command": "python benchmarks/checkpoints.py " + " ".join(sys.argv[1:]),
        "ceiling": f"a step: {LIMIT}, all measured: {limits}",
        "unit": "tokens/s",
        "columns": list(COLUMNS),
        "cells": [cells for one in found for cells in lines(one, PassLimit.of(args.file, one.contender, limits), theirs)],
        "notes": "First tokens are timed from the start of the command to its end, with a prompt of "
        f"{PROMPT_WORDS} words; without a model: {THEIRS} that says its version, Python that imports torch, transformers and "
        f"the package. llama.cpp {versions(found)}; it makes up the tokens of its prompts and steps. All is the median of "
        f"{args.repeats} runs, in turns.",
    }


def lines(one: Measured, limit: PassLimit, theirs: Mapping[int, Point]) -> Iterator[list[str]]:
    starts = [f"{one.median_of(which):.2f}" for which in ("cold", "warm", "bare")]
    for rows, point in sorted(one.points.items()):
        rate = point.step_tokens_per_s
        beside = f"{rate / theirs[rows].step_tokens_per_s:.2f}" if rows in theirs else "-"
        share = f"{rate / limit.step_tokens_per_s(rows, point.load):.0%}"
        rates = [f"{point.prompt_tokens_per_s:.3g}", f"{rate:.3g}", share, beside, f"{point.peak_bytes / 1e9:.2f}"]
        yield [one.contender.name, one.contender.computes, str(rows), *starts, *rates]
        starts = ["-"] * len(starts)


def versions(found: Sequence[Measured]) -> str:
    answers = [answer for one in found for point in one.points.values() for answer in point.answers]
    return next((answer.versions[THEIRS] for answer in answers if THEIRS in answer.versions), "was not run")


def print_table(result: Mapping[str, Any]) -> None:
    print(f"\n{result['title']}\nmachine: {result['machine']}\nceiling: {result['ceiling']}\n")
    table = [result["columns"], *result["cells"]]
    widths = [max(len(row[place]) for row in table) for place in range(len(COLUMNS))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)))
    print(f"\n{result['notes']}\n")


if __name__ == "__main__":
    sys.exit(main())
