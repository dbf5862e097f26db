"""Mixtures of experts from a disk, for hundreds of rows at once, beside llama.cpp on the same GGUF file.

    python benchmarks/moe.py --llama-cpp SOURCES                                     # OLMoE-1B-7B in 2 GiB
    python benchmarks/moe.py --model Qwen/Qwen3-30B-A3B --memory 8GiB --rows 128 256 --their-rows 1 16 64 --repeats 3

A file of random weights is written once, which both read as it is: Q4_0, of gpt-oss MXFP4 and Q8_0 as it was published. Every
run has a process of its own under the same cap on memory, the page cache included, and starts with nothing of the file in that
cache: ours keeps the weights that fit beside the rest and reads the others in every step, llama.cpp maps the file. KV: ours
keeps a fifth by h2o in 4 bits, llama.cpp all in float16. Prompts are computed whole, then a few decode steps are timed behind
half of the text. All take turns; medians count.

The ceiling of a step: the weights and states beyond the cap over the disk's rate, or the products of so many rows over the
processor's, which is the better of before and after all runs. The disk's is the better of some seconds before and behind every
run, in the middle of the repeats: many disks give more in the first seconds than ever after. Of ours, two more figures tell
what the schedule leaves over: the share of its busiest lane, which is what its plan read and wrote over the disk's rate or the
products, and the share of the time in which the disk had anything to do. The last line is one JSON document.

Rows of hybrid models have a state, which each step reads and writes whole. Of ours, as much of it stays in memory as fits, and
then of the weights. With --keep each call may measure some of the lines.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from benchmarks.baselines.llama_build import NATIVE, compiled_programs
from benchmarks.baselines.request import Answer, Request
from benchmarks.comparison.calibration import Calibration
from benchmarks.comparison.cap import open_cap
from benchmarks.comparison.ceiling import Ceiling
from benchmarks.comparison.checkpoint import spec_in, spec_of
from benchmarks.comparison.command import argument_of, commit, say
from benchmarks.comparison.launch import Failed, Launcher
from benchmarks.comparison.one_file import OURS, THEIRS, chosen
from benchmarks.comparison.random_gguf import random_gguf
from benchmarks.comparison.suites import Contender, Load
from h2o_flexgen.cli.terminal import table
from h2o_flexgen.core.environment import default_offload_folder
from h2o_flexgen.core.files import write_text
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.units import format_bytes, parse_bytes
from h2o_flexgen.formats.kernel_table import FLOAT32, INT8
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.profiling.measure import disk_read_rate

ROOT = Path(__file__).resolve().parents[1]
DTYPE = "bfloat16"
KEPT = {"kv_policy": "h2o", "kv_budget": 0.2, "kv_codec": "group4"}
RANDOM = (
    "Routers are random: tokens that follow each other share experts by chance alone, which real texts do not, and which a "
    "page cache feels."
)
COLUMNS = ("system", "computes", "rows", "tokens/s", "of ceiling", "of busiest lane", "disk busy", "prompts s", "peak GB")
STATES, IN_HALF = "state_dtype", "bfloat16"
MEASURED_BY = ("command", "commit")  # of each line, as --keep may bring together what several calls have measured
BUFFERS = 4  # of ours: with two, the disk waits while an attention is computed: slices are small


@dataclass(frozen=True)
class Line:
    """A system with a number of rows."""

    contender: Contender
    rows: int
    answers: tuple[Answer, ...]
    disk_rates: tuple[tuple[float, float], ...]  # bytes per second, before and after each answer
    command: str  # that has measured it
    commit: str

    @property
    def step_seconds(self) -> float:
        return median(median(answer.step_seconds) for answer in self.answers)

    @property
    def prefill_seconds(self) -> float:
        return median(answer.prefill_seconds for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.rows / self.step_seconds

    @property
    def disk_rate(self) -> float:
        """Bytes per second: the better one of before and after, because a disk that has worked is slower."""
        return median(map(max, self.disk_rates))

    @property
    def disk_busy(self) -> float | None:
        shares = [answer.disk_busy for answer in self.answers if answer.disk_busy is not None]
        return median(shares) if shares else None

    @property
    def peak_bytes(self) -> int:
        return max(answer.peak_host_bytes for answer in self.answers)


def main() -> int:
    args = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that systems under way are ended too
    file = random_gguf(args.model, Path(args.folder).expanduser().absolute() / "checkpoints")
    earlier, before = kept(args, file), calibrated(file)
    lines = measured(args, file)
    anew = {(line.contender.name, line.rows) for line in lines}
    lines = [*(line for line in earlier if (line.contender.name, line.rows) not in anew), *lines]
    result = document(args, file, before, calibrated(file), lines)
    print_table(result)
    if args.output:
        Path(args.output).mkdir(parents=True, exist_ok=True)
        write_text(output_of(args), json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="allenai/OLMoE-1B-7B-0924", help="a model with shapes in configs/models")
    add("--memory", type=argument_of(parse_bytes), default=parse_bytes("2GiB"), help="of each process (default: 2GiB)")
    add("--load", type=argument_of(Load.of), default=Load(64, 64), metavar="P+G", help="tokens of a prompt + to generate")
    add("--rows", type=int, nargs="+", default=[128, 512], help="of ours")
    add("--their-rows", type=int, nargs="+", default=[1, 16, 64], help="of llama.cpp")
    add("--graphs", default="auto", help="of ours: what is recorded of hundreds of rows may be more than --memory has room for")
    add("--rows-at-once", type=int, default=512, help="of ours, in a batch")
    add("--buffers", type=int, default=BUFFERS, help="of ours: of states there are fewer where few layers have some")
    add("--resident", type=float, metavar="PERCENT", help="of our weights, in memory (default: what fits beside the rest)")
    add("--steps", type=int, default=4, help="decode steps that are timed")
    add("--repeats", type=int, default=1)
    add("--disk-seconds", type=float, default=5.0, help="that the disk is measured for before and after every run")
    add("--llama-cpp", metavar="FOLDER", help="of its programs, or of its sources, which are compiled once (default: PATH)")
    add("--systems", nargs="+", metavar="NAME", help="only these")
    add("--timeout", type=float, default=1800, help="seconds that one run may take")
    add("--folder", default=str(default_offload_folder().parent / "compare"), help="for the file and what is offloaded")
    add("--output", metavar="FOLDER", help="also write moe-....json there")
    add("--keep", action="store_true", help="lines of the same kind in that file which are not measured anew")
    args = parser.parse_args(argv)
    if args.keep and not args.output:
        parser.error("--keep keeps what is in the file of --output; give --output too")
    if args.steps + 2 > args.load.gen_len // 2:
        parser.error(f"--steps {args.steps} do not fit into the second half of {args.load.gen_len} tokens")
    try:
        args.contenders = chosen(contenders(args), args.systems)
        if any(one.system == THEIRS for one in args.contenders):
            compiled_programs(args.llama_cpp, NATIVE)
    except ValueError as error:
        parser.error(str(error))
    return args


def output_of(args: argparse.Namespace) -> Path:
    return Path(args.output) / f"moe-{args.model.rpartition('/')[2]}.json".lower()


def title_of(args: argparse.Namespace, file: Path) -> str:
    return f"{args.model} shapes, {stored_of(file)} on disk, {args.load} tokens, in {args.memory / 2**30:g} GiB"


def stored_of(file: Path) -> str:
    return f"{file.stat().st_size / 1e9:.1f} GB in {file.stem.rpartition('-')[2].upper()}"


def contenders(args: argparse.Namespace) -> list[Contender]:
    share = {} if args.resident is None else {"percent": (0, args.resident, 0, 100, 0, 100)}
    ours = {**KEPT, "buffers": args.buffers, "graphs": args.graphs, "rows_at_once": args.rows_at_once, **share}
    halved = [IN_HALF] if spec_of(args.model, DTYPE).state_layers else []
    return [
        Contender(OURS, OURS, ours, computes="rows in bfloat16"),
        *(Contender(f"{OURS}, states in {one}", OURS, {**ours, STATES: one}, computes="rows in bfloat16") for one in halved),
        Contender(f"{OURS}, int8", OURS, {**ours, "compute": INT8}, computes="rows in int8", arithmetic=INT8),
        Contender(THEIRS, THEIRS, {"repacks": False}, computes="rows in int8", arithmetic=INT8, dtype="float16"),
    ]


# -- measuring -------------------------------------------------------------------------------------------------------------


def calibrated(file: Path) -> Calibration:
    """Measured in a process of its own, so that this one stays small."""
    command = [sys.executable, "-m", "benchmarks.comparison.calibration", "cpu", DTYPE, str(file)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    found = Calibration(**json.loads(done.stdout.splitlines()[-1]))
    say(f"the machine: {found}")
    return found


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def measured(args: argparse.Namespace, file: Path) -> list[Line]:
    """Systems take turns, because machines drift. What fails is left out, and said."""
    launcher = Launcher(args.timeout, {"PYTHONPATH": environment()["PYTHONPATH"]})
    now = shlex.join(["python", "benchmarks/moe.py", *sys.argv[1:]]), commit()
    asked = [
        Line(one, rows, (), (), *now)
        for one in args.contenders
        for rows in (args.their_rows if one.system == THEIRS else args.rows)
    ]
    for _ in range(args.repeats):
        asked = [_once_more(args, file, launcher, line) for line in asked]
    return [line for line in asked if line.answers]


def _once_more(args: argparse.Namespace, file: Path, launcher: Launcher, line: Line) -> Line:
    before = disk_read_rate([file], seconds=args.disk_seconds)
    try:
        answer = launcher.run(request(args, file, line), loads_within_cap=True)
    except Failed as error:
        say(f"{line.contender.name}, {line.rows} rows: {error}")
        return line
    rates = before, disk_read_rate([file], seconds=args.disk_seconds)
    now = replace(line, answers=(answer,))
    rate = f"a step {now.step_seconds:.2f} s, {now.tokens_per_s:.1f} tokens/s"
    disk = " and then ".join(f"{rate / 1e9:.2f}" for rate in rates)
    both = f"{format_bytes(answer.read_bytes_per_step)} read and {format_bytes(answer.written_bytes_per_step)} written"
    read = f"{both} in a step, disk {disk} GB/s; {answer.placement}"
    said = f"prompts {now.prefill_seconds:.1f} s, {rate}, {format_bytes(now.peak_bytes)}, {read}"
    say(f"{line.contender.name}, {line.rows} rows: {said}")
    return replace(line, answers=(*line.answers, answer), disk_rates=(*line.disk_rates, rates))


def request(args: argparse.Namespace, file: Path, line: Line) -> Request:
    options = dict(line.contender.options)
    if line.contender.system == THEIRS:
        options |= {"folder": args.llama_cpp, "instructions": NATIVE}
    return Request(
        system=line.contender.system,
        checkpoint=str(file),
        dtype=line.contender.dtype or DTYPE,
        device="cpu",
        rows=line.rows,
        prompt_len=args.load.prompt_len,
        gen_len=args.load.gen_len,
        steps=args.steps,
        host_bytes=args.memory,
        device_bytes=None,
        scratch=str(Path(args.folder).expanduser().absolute() / "scratch"),
        options=options,
    )


def kept(args: argparse.Namespace, file: Path) -> list[Line]:
    """The lines of the file that is there."""
    if not args.keep or not output_of(args).is_file():
        return []
    before = json.loads(output_of(args).read_text(encoding="utf-8"))
    if before["title"] != title_of(args, file):
        raise SystemExit(f"{output_of(args)} is of {before['title']!r}, not of {title_of(args, file)!r}; leave out --keep")
    known = {one.name: one for one in contenders(args)}
    if others := sorted({row["system"] for row in before["rows"]} - known.keys()):
        raise SystemExit(f"{output_of(args)} has lines of {others[0]!r}, which is no system here; leave out --keep")
    of_all = {name: before[name] for name in MEASURED_BY}
    return [_line_of({**of_all, **row}, known[row["system"]]) for row in before["rows"]]


def _line_of(row: Mapping[str, Any], contender: Contender) -> Line:
    answers = tuple(Answer.from_json(json.dumps(answer)) for answer in row["answers"])
    rates = tuple((before, after) for before, after in row["disk_read_per_s"])
    return Line(contender, row["rows"], answers, rates, *(row[name] for name in MEASURED_BY))


# -- what was found ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """What a machine allows, and how much of it a line has reached."""

    specs: Mapping[str, ModelSpec]  # by the type of the states that rows keep
    machine: Calibration
    memory: float

    def shares(self, line: Line) -> dict[str, float | None]:
        # theirs reads prompts besides
        lane = None if line.contender.system == THEIRS else line.tokens_per_s / self._of_lane(line)
        return {"of_ceiling": self._pass(line, self.memory) / line.step_seconds, "of_lane": lane, "disk_busy": line.disk_busy}

    def _of_lane(self, line: Line) -> float:
        moved = median(answer.read_bytes_per_step + answer.written_bytes_per_step for answer in line.answers)
        return line.rows / max(moved / line.disk_rate, self._pass(line, inf))

    def _pass(self, line: Line, memory: float) -> float:
        then = replace(self.machine, disk_read_per_s=line.disk_rate)
        spec = self.specs[line.contender.options.get(STATES, FLOAT32)]
        return Ceiling(spec, then, memory, None, line.contender.arithmetic).pass_seconds(line.rows, 1)


def document(
    args: argparse.Namespace, file: Path, before: Calibration, after: Calibration, lines: Sequence[Line]
) -> dict[str, object]:
    machine, cap = before.at_best(after), open_cap()
    cap.close()
    kinds = {line.contender.options.get(STATES, FLOAT32) for line in lines}
    bounds = Bounds({kind: spec_in(file, DTYPE, Plan(state_dtype=kind)) for kind in kinds}, machine, args.memory)
    times = times_their_best(lines)
    stored, memory = stored_of(file), f"{args.memory / 2**30:g} GiB"
    return {
        "benchmark": "moe",
        "title": title_of(args, file),
        "machine": f"{machine.machine['cpu']}, {machine.machine['cores']} cores, {machine.machine['instructions']}, torch "
        f"{machine.machine['torch']}; {machine}; cap: {cap.words}",
        "date": date.today().isoformat(),
        "commit": ", ".join(dict.fromkeys(line.commit for line in lines)),
        "command": "; ".join(dict.fromkeys(line.command for line in lines)),
        "ceiling": "of weights that so many rows ask for: those beyond the cap over the disk's rate, all over the memory's; "
        "states are read and written; or products over the processor's rate, all measured. Busiest lane: what was read and "
        "written in a step over the disk's rate, or products",
        "unit": "tokens/s in steps",
        "columns": COLUMNS,
        "cells": [cells_of(line, bounds) for line in lines],
        "headline": {"model": args.model, "on disk": stored, "in memory of": memory, **headline_of(lines, bounds)},
        "rows": [row_of(line, bounds) for line in lines],
        "times_their_best": times,
        "notes": " ".join(
            [*([] if times is None else [f"The best of ours is {times:.1f} times the best of llama.cpp."]), RANDOM]
        ),
        "before": asdict(before),
        "after": asdict(after),
    }


def cells_of(line: Line, bounds: Bounds) -> list[str]:
    shares = map(percent, bounds.shares(line).values())
    rate, prompts, peak = number(line.tokens_per_s), f"{line.prefill_seconds:.0f}", f"{line.peak_bytes / 1e9:.2f}"
    return [line.contender.name, line.contender.computes, str(line.rows), rate, *shares, prompts, peak]


def row_of(line: Line, bounds: Bounds) -> dict[str, object]:
    return {
        "system": line.contender.name,
        "rows": line.rows,
        "tokens_per_s": line.tokens_per_s,
        **bounds.shares(line),
        "prefill_seconds": line.prefill_seconds,
        "peak_bytes": line.peak_bytes,
        "disk_read_per_s": line.disk_rates,
        "command": line.command,
        "commit": line.commit,
        "answers": [asdict(answer) for answer in line.answers],
    }


def headline_of(lines: Sequence[Line], bounds: Bounds) -> dict[str, str]:
    """What the README says of a model, as far as both were measured."""
    ours, theirs = (best_of(system, lines) for system in (OURS, THEIRS))
    times = times_their_best(lines)
    return {
        "rows": "" if ours is None else str(ours.rows),
        "tokens/s in steps": "" if ours is None else number(ours.tokens_per_s),
        "of ceiling": "" if ours is None else percent(bounds.shares(ours)["of_ceiling"]),
        "llama.cpp's best": "" if theirs is None else number(theirs.tokens_per_s),
        "with rows": "" if theirs is None else str(theirs.rows),
        "times": "" if times is None else number(times),
    }


def best_of(system: str, lines: Sequence[Line]) -> Line | None:
    return max((line for line in lines if line.contender.system == system), key=lambda line: line.tokens_per_s, default=None)


def times_their_best(lines: Sequence[Line]) -> float | None:
    ours, theirs = best_of(OURS, lines), best_of(THEIRS, lines)
    return None if ours is None or theirs is None else ours.tokens_per_s / theirs.tokens_per_s


def number(value: float) -> str:
    return f"{value:.3g}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def print_table(result: dict[str, Any]) -> None:
    print(f"\n{result['title']}\n{result['machine']}")
    for row in table([result["columns"], *result["cells"]]):
        print(row)
    print(result["notes"])


if __name__ == "__main__":
    sys.exit(main())
