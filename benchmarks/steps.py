"""Decode steps and prompts beside llama.cpp on the same GGUF file, in memory, by the number of rows.

    scripts/fetch_smollm2 && python benchmarks/steps.py --llama-cpp SOURCES
    python benchmarks/steps.py --model TinyLlama/TinyLlama-1.1B-Chat-v1.0 --rows 1 8 --output benchmarks/results
    H2O_FLEXGEN_KERNELS=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \\
        python benchmarks/steps.py --llama-cpp SOURCES --llama-cpp-for avx2     # emulated

Of a known model that is no file, a GGUF file with its shapes and random weights is written once. This engine takes part in int8
and exactly, with recorded steps and without. Each of these has a process of its own, which keeps the model open; llama.cpp's
own benchmark is started anew, with the file in the page cache. All have as many threads, and take turns at each number of rows;
medians count. The limits are measured before and behind each number of rows. Rows that are not asked for keep their lines in
the file of --output, as long as the title is the same: a long table can be measured in pieces. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Protocol

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from benchmarks.baselines.llama_build import compiled_programs
from benchmarks.baselines.llama_cpp import System
from benchmarks.baselines.request import Answer
from benchmarks.comparison.command import argument_of, commit, say
from benchmarks.comparison.engine_process import EngineProcess, Way
from benchmarks.comparison.one_file import OURS, THEIRS, add_options, chosen, our_contender, request, their_contender
from benchmarks.comparison.point import Point
from benchmarks.comparison.random_gguf import random_gguf
from benchmarks.comparison.suites import Contender, Load
from benchmarks.instructions import instructions, processor_slug
from benchmarks.limits import LIMIT, Limits, PassLimit
from benchmarks.portable import portable
from h2o_flexgen.checkpoints.model_places import SMOLLM2, resolve_model
from h2o_flexgen.cli.terminal import table
from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.environment import default_offload_folder
from h2o_flexgen.core.files import write_text
from h2o_flexgen.formats.kernel_table import EXACT, INT8
from h2o_flexgen.memory.device import open_device
from h2o_flexgen.models import known_config
from h2o_flexgen.planning.plan import OFF
from h2o_flexgen.profiling.measure import describe_machine

COLUMNS = (
    *("rows", "system", "computes"),
    *("prompts tokens/s", "of limit", "times llama.cpp", "steps tokens/s", "of limit", "times llama.cpp"),
)


class Runs(Protocol):
    """A system that is asked again and again."""

    def answer(self, rows: int) -> Answer: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class TheirRuns:
    """llama.cpp, started anew each time."""

    file: Path
    contender: Contender
    load: Load

    def answer(self, rows: int) -> Answer:
        return System().run(request(self.file, self.contender, rows, self.load), lambda: None)

    def close(self) -> None:
        """Nothing is kept."""


class OurRuns:
    """A process of this engine, which opens the model anew for another number of rows."""

    def __init__(self, file: Path, contender: Contender, load: Load) -> None:
        options = {**contender.options, "dtype": contender.dtype}
        self._process = EngineProcess(Way(str(file), load.prompt_len, load.gen_len, torch.get_num_threads(), options))

    def answer(self, rows: int) -> Answer:
        took = self._process.took(rows)
        return Answer({}, "in memory", 0.0, took.prefill, took.steps, took.peak_bytes, 0.0)

    def close(self) -> None:
        self._process.close()


def main() -> int:
    args = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that systems under way are ended too
    place = None if args.output is None else Path(args.output) / f"steps-{args.file.stem}-{processor_slug()}.json".lower()
    lines = list[dict[str, Any]]()
    for of_rows in measured(args):
        lines += of_rows
        result = document(args, lines, place)
        if place is not None:  # at once: a long run may be ended
            place.parent.mkdir(parents=True, exist_ok=True)
            write_text(place, json.dumps(result, indent=1) + "\n")
    for row in table([result["columns"], *result["cells"]]):
        print(row)
    print(json.dumps(result))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=SMOLLM2.name, help="a GGUF file or a model in configs/models (default: what fetch_smollm2 fetches)")
    add("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    add("--load", type=argument_of(Load.of), default=Load(128, 33), metavar="P+G", help="tokens of a prompt + to generate")
    add("--repeats", type=int, default=3)
    add("--threads", type=int, default=torch.get_num_threads(), help="of each system (default: torch's number)")
    add("--systems", nargs="+", metavar="NAME", help="only these")
    add("--folder", default=str(default_offload_folder().parent / "compare"), help="for a file of random weights")
    add("--output", metavar="FOLDER", help="also write steps-....json there")
    add_options(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    try:
        args.file = file_of(args.model, Path(args.folder).expanduser().absolute() / "checkpoints")
        args.programs = compiled_programs(args.llama_cpp, args.llama_cpp_for)
        args.contenders = chosen(contenders(args.programs), args.systems)
    except ValueError as error:
        parser.error(str(error))
    return args


def file_of(model: str, folder: Path) -> Path:
    return resolve_model(model) if known_config(model) is None else random_gguf(model, folder)


def contenders(programs: Path) -> list[Contender]:
    return [
        their_contender(programs),
        our_contender("int8", "rows in int8, KV in bfloat16", compute=INT8, graphs=AUTO),
        our_contender("exact", "exactly, KV in bfloat16", compute=EXACT, graphs=AUTO),
        our_contender("int8, not recorded", "rows in int8, KV in bfloat16", compute=INT8, graphs=OFF),
        our_contender("exact, not recorded", "exactly, KV in bfloat16", compute=EXACT, graphs=OFF),
    ]


# -- measuring -------------------------------------------------------------------------------------------------------------


def measured(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """For each number of rows a line of each system. Systems take turns, because machines drift."""
    with ExitStack() as stack:
        runs: dict[Contender, Runs] = {}
        for one in args.contenders:
            made = OurRuns if one.system == OURS else TheirRuns
            runs[one] = stack.enter_context(closing(made(args.file, one, args.load)))
        for rows in args.rows:
            limits, points = Limits.measured(), {one: Point(rows, args.load, ()) for one in args.contenders}
            for turn in range(args.repeats):
                for one in args.contenders:
                    points[one] = points[one].with_answer(runs[one].answer(rows))
                    say(f"{turn}: {one.name}, {rows} rows: {Point(rows, args.load, points[one].answers[-1:])}")
            limits = limits.at_best(Limits.measured())
            yield [line_of(one, point, PassLimit.of(args.file, one, limits)) for one, point in points.items()]


def line_of(contender: Contender, point: Point, limit: PassLimit) -> dict[str, Any]:
    """Medians, and what each run gave."""
    runs = [Point(point.rows, point.load, (answer,)) for answer in point.answers]
    versions = {name: version for answer in point.answers for name, version in answer.versions.items()}
    return {
        "rows": point.rows,
        "system": contender.name,
        "computes": contender.computes,
        "prompts": point.prompt_tokens_per_s,
        "prompts_of_limit": point.prompt_tokens_per_s / limit.prompt_tokens_per_s(point.rows, point.load),
        "steps": point.step_tokens_per_s,
        "steps_of_limit": point.step_tokens_per_s / limit.step_tokens_per_s(point.rows, point.load),
        "runs": [[one.prompt_tokens_per_s, one.step_tokens_per_s] for one in runs],
        "peak_bytes": point.peak_bytes,
        "limits": str(limit.limits),
        "versions": versions,
        "commit": commit(),
    }


# -- what comes of it --------------------------------------------------------------------------------------------------------


def document(args: argparse.Namespace, lines: Sequence[dict[str, Any]], place: Path | None) -> dict[str, Any]:
    """The result in the form that scripts/readme_results.py reads."""
    title = f"{args.file.name}, steps and prompts by rows, {args.load} tokens ({instructions()})"
    lines = [*kept_lines(place, title, {line["rows"] for line in lines}), *lines]
    lines.sort(key=lambda line: int(line["rows"]))
    theirs = {line["rows"]: line for line in lines if line["system"] == THEIRS}
    told = "; ".join(f"{rows} rows: {limits}" for rows, limits in {line["rows"]: line["limits"] for line in lines}.items())
    versions = {version for line in lines for version in line["versions"].values()}
    return {
        "benchmark": "steps",
        "title": title,
        "machine": describe_machine(open_device("cpu")),
        "date": date.today().isoformat(),
        "commit": ", ".join(sorted({line["commit"] for line in lines})),
        "command": " ".join(["python benchmarks/steps.py", *portable(sys.argv[1:])]),
        "ceiling": f"{LIMIT}, all measured",
        "unit": "tokens/s",
        "columns": list(COLUMNS),
        "cells": [cells_of(line, theirs.get(line["rows"])) for line in lines],
        "lines": lines,
        "notes": f"{args.threads} threads; medians of {args.repeats} runs in turns. {THEIRS} {', '.join(sorted(versions))} "
        f"makes up the tokens of its prompts and steps. Limits: {told}.",
    }


def kept_lines(place: Path | None, title: str, rows: Set[int]) -> list[dict[str, Any]]:
    """What was written before, of rows that are not measured now."""
    if place is None or not place.is_file():
        return []
    before = json.loads(place.read_text(encoding="utf-8"))
    return [line for line in before["lines"] if before["title"] == title and line["rows"] not in rows]


def cells_of(line: dict[str, Any], theirs: dict[str, Any] | None) -> list[str]:
    cells = [str(line["rows"]), line["system"], line["computes"]]
    for kind in ("prompts", "steps"):
        times = "-" if theirs is None else f"{line[kind] / theirs[kind]:.2f}"
        cells += [f"{line[kind]:.3g}", f"{line[f'{kind}_of_limit']:.0%}", times]
    return cells


if __name__ == "__main__":
    sys.exit(main())
