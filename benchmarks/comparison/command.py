"""This engine and its peers side by side: the same workload, the same memory, each with its best number of rows.

    python benchmarks/compare.py --suite cpu-small --loads 64+256            # OPT-1.3B shapes in 1.5 GiB
    python benchmarks/compare.py --suite cpu --caps 4GiB --loads 64+256      # OPT-6.7B shapes in 4 GiB: hours
    python benchmarks/compare.py --suite cpu --systems h2o_flexgen accelerate --steps 8 --repeats 3
    python benchmarks/compare.py --suite processor --llama-cpp SOURCES --repeats 3      # all with the same rows, in turns

Every run has a process of its own under the same cap on memory, the page cache included, and starts with nothing of the
checkpoint in that cache. Random weights are written once, as a checkpoint that every system can read. Rows are doubled until a
system fails or slows, and then tried half way. The engine's planner knows what fits, so the engine is tried from there
downwards, and with one thing switched off it is run with as many as fit. With --rows, as in the suite "processor", all
systems are run with the same numbers of rows, in turns, and prompts and steps are held against the machine's limit apart.
Without --whole a run is shortened: prompts are computed whole, then a few decode steps are timed with as much KV as half way
through the text, and the rest of the generation counts as if each step took their median. The machine is measured before and
after. The last line is one JSON document; --picture draws it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from itertools import product
from math import inf
from pathlib import Path
from typing import TypeVar

from benchmarks.baselines.llama_build import INSTRUCTIONS, NATIVE
from benchmarks.baselines.request import Plans, Prepares, Request
from benchmarks.baselines.systems import system_named
from benchmarks.comparison.by_rows import ReportByRows
from benchmarks.comparison.calibration import Calibration
from benchmarks.comparison.cap import open_cap
from benchmarks.comparison.ceiling import Ceiling
from benchmarks.comparison.checkpoint import checkpoint_of, spec_of
from benchmarks.comparison.launch import Failed, Launcher
from benchmarks.comparison.picture import draw, lines_of
from benchmarks.comparison.point import Point
from benchmarks.comparison.report import Entry, Report, version_of
from benchmarks.comparison.search import Search
from benchmarks.comparison.suites import SUITES, Contender, Load, by_rows, contenders
from h2o_flexgen.core.environment import default_offload_folder
from h2o_flexgen.core.files import write_text
from h2o_flexgen.core.units import format_bytes, parse_bytes
from h2o_flexgen.formats.table import PLAIN

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    args = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that systems under way are ended too
    documents, code = [], commit()
    for model, cap, load in product(args.models, args.caps, args.loads):
        report = Comparison(args, model, cap, load).run()
        documents.append(report.document(" ".join(["python benchmarks/compare.py", *sys.argv[1:]]), code))
        print("\n" + report.table() + "\n")
        if args.output:
            Path(args.output).mkdir(parents=True, exist_ok=True)
            write_text(Path(args.output) / f"compare-{report.name}.json", json.dumps(documents[-1], indent=1) + "\n")
        if args.picture:
            draw(report.title, lines_of(report), Path(args.picture) / f"compare-{report.name}.png")
    print(json.dumps(documents))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--suite", choices=SUITES, default="cpu-small")
    add("--systems", nargs="+", metavar="NAME", help="only these, and the first, which the others are held against")
    add("--models", nargs="+", help="instead of the suite's; shapes are known by name")
    add("--caps", nargs="+", type=argument_of(parse_bytes), metavar="SIZE", help="of memory, like 4GiB, instead of the suite's")
    add("--loads", nargs="+", type=argument_of(Load.of), metavar="P+G", help="tokens of a prompt + tokens to generate")
    add("--dtype", default="bfloat16")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=6, help="decode steps that are timed")
    length.add_argument("--whole", action="store_true", help="generate everything")
    add("--repeats", type=int, default=1, help="runs of each system with its best number of rows, in turns; medians count")
    add("--most-rows", type=int, default=1024, help="no system is tried with more")
    add("--rows", type=int, nargs="+", help="run every system with these, in turns, instead of finding its best number")
    add(
        "--llama-cpp",
        metavar="FOLDER",
        help="of llama.cpp's programs, or of its sources, which are compiled once (default: PATH)",
    )
    add("--llama-cpp-for", choices=INSTRUCTIONS, default=NATIVE, help="the instructions for which it is compiled")
    add("--timeout", type=float, default=3600, help="seconds that one run may take")
    add("--folder", default=str(default_offload_folder().parent / "compare"), help="for checkpoints and what is offloaded")
    add("--output", metavar="FOLDER", help="also write compare-....json there")
    add("--picture", metavar="FOLDER", help="also draw compare-....png there (needs matplotlib)")
    args = parser.parse_args(argv)
    for load in args.loads or SUITES[args.suite].loads:
        if not args.whole and args.steps + 2 > load.gen_len // 2:
            parser.error(f"--steps {args.steps} do not fit into the second half of {load.gen_len} tokens; use --whole")
    suite = SUITES[args.suite]
    args.models, args.caps, args.loads = args.models or suite.models, args.caps or suite.caps, args.loads or suite.loads
    args.device, args.device_bytes = suite.device, suite.device_bytes
    args.rows = tuple(args.rows or suite.rows)
    if args.rows and args.picture:
        parser.error("--picture draws what was found of the best number of rows; leave it out with given rows")
    args.of_system = {"llama.cpp": {"folder": args.llama_cpp, "instructions": args.llama_cpp_for}}
    known = by_rows() if args.rows else contenders(suite.device)
    names = [one.name for one in known]
    for name in args.systems or ():
        if name not in names:
            parser.error(f"unknown system {name!r}; known: {', '.join(map(repr, names))}")
    args.contenders = [one for one in known if not args.systems or one.name in (names[0], *args.systems)]
    return args


def argument_of(read: Callable[[str], T]) -> Callable[[str], T]:
    """Turns a ValueError into argparse's own error, which is shown as its message alone."""

    def checked(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


class Comparison:
    """One model, one cap, one workload."""

    def __init__(self, args: argparse.Namespace, model: str, cap: int, load: Load) -> None:
        self.args, self.model, self.cap, self.load = args, model, cap, load
        self.folder = Path(args.folder).expanduser().absolute()
        self.steps = None if args.whole else args.steps
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.environment = {"PYTHONPATH": path, "XDG_CACHE_HOME": str(self.folder / "cache")}
        self.launcher = Launcher(args.timeout, self.environment)
        self.checkpoint = self.folder
        self.cap_words = cap_words()

    def run(self) -> Report:
        say(f"{self.model}, {self.load} tokens, {format_bytes(self.cap)}, {self.cap_words}")
        self.checkpoint = checkpoint_of(self.model, self.args.dtype, self.folder / "checkpoints")
        before = self.calibrated()
        missing = {one: self.missing(one) for one in self.args.contenders}
        skipped = {one.name: reason for one, reason in missing.items() if reason is not None}
        for name, reason in skipped.items():
            say(f"  {name}: skipped, {reason}")
        present = [one for one, reason in missing.items() if reason is None]
        searches = self.with_given_rows(present) if self.args.rows else self.with_best_rows(present)
        after = self.calibrated()
        machine = before.at_best(after)
        for contender, search in searches.items():
            if search.best is None:
                skipped[contender.name] = next(iter(search.failures.values()), "not even one row fits, says its planner")
        return (ReportByRows if self.args.rows else Report)(
            suite=self.args.suite,
            model=self.model,
            dtype=self.args.dtype,
            cap_bytes=self.cap,
            cap_words=self.cap_words,
            load=self.load,
            before=before,
            after=after,
            day=date.today().isoformat(),
            reference=self.args.contenders[0].name,
            entries=tuple(self.entries(searches, machine)),
            skipped=skipped,
        )

    def entries(self, searches: Mapping[Contender, Search[Point]], machine: Calibration) -> Iterator[Entry]:
        for rows in self.args.rows or (None,):
            for contender, search in searches.items():
                which = search.best if rows is None else rows
                if which in search.runs:
                    yield self.entry(contender, search, which, machine)

    def missing(self, contender: Contender) -> str | None:
        """Why a system is not there, in a line; what it needs beside the checkpoint is made now."""
        request, system = self.request(contender, 1), system_named(contender.system)
        reason = system.missing(request)
        if reason is None and isinstance(system, Prepares):
            try:
                self.launcher.prepare(request)
            except Failed as error:
                return f"could not be prepared: {error}"
        return reason

    def with_best_rows(self, present: Sequence[Contender]) -> dict[Contender, Search[Point]]:
        searches = {one: self.searched(one) for one in present}
        self.repeat(searches, {one: search.best for one, search in searches.items() if search.best is not None})
        return searches

    def with_given_rows(self, present: Sequence[Contender]) -> dict[Contender, Search[Point]]:
        """Systems take turns at each number of rows."""
        searches = {one: self.search(one) for one in present}
        for _, rows, contender in product(range(self.args.repeats), self.args.rows, present):
            if rows not in searches[contender].failures:
                self.once_more(searches[contender], contender, rows)
        return searches

    def once_more(self, search: Search[Point], contender: Contender, rows: int) -> None:
        try:
            again = self.measured(contender, rows)
        except Failed as error:  # what came to its end before still counts
            search.failures[rows] = f"in a repetition: {error}" if rows in search.runs else str(error)
            say(f"  {contender.name}, {rows} rows: {search.failures[rows]}")
        else:
            search.runs[rows] = search.runs[rows].with_answer(again.answers[0]) if rows in search.runs else again

    def search(self, contender: Contender) -> Search[Point]:
        return Search(lambda rows: self.measured(contender, rows), lambda point: point.tokens_per_s)

    def request(self, contender: Contender, rows: int) -> Request:
        return Request(
            system=contender.system,
            checkpoint=str(self.checkpoint),
            dtype=contender.dtype or self.args.dtype,
            device=self.args.device,
            rows=rows,
            prompt_len=self.load.prompt_len,
            gen_len=self.load.gen_len,
            steps=self.steps,
            host_bytes=self.cap if contender.capped else None,
            device_bytes=self.args.device_bytes,
            scratch=str(self.folder / "scratch"),
            options={**contender.options, **self.args.of_system.get(contender.system, {})},
        )

    def calibrated(self) -> Calibration:
        """Measures in a process of its own, so that this one stays small."""
        asked = [self.args.device, self.args.dtype, str(self.checkpoint)]
        command = [sys.executable, "-m", "benchmarks.comparison.calibration", *asked]
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        calibration = Calibration(**json.loads(done.stdout.splitlines()[-1]))
        say(f"  the machine: {calibration}")
        return calibration

    def searched(self, contender: Contender) -> Search[Point]:
        search, request = self.search(contender), self.request(contender, 1)
        if not isinstance(system_named(contender.system), Plans):
            search.upwards(self.args.most_rows)
        else:
            try:
                most = self.launcher.most_rows(request)
            except Failed as error:
                search.failures[1] = str(error)
            else:
                search.downwards(min(most, self.args.most_rows, contender.most_rows or most), contender.halved)
        for rows, reason in search.failures.items():
            say(f"  {contender.name}, {rows} rows: {reason}")
        return search

    def measured(self, contender: Contender, rows: int) -> Point:
        answer = self.launcher.run(self.request(contender, rows), system_named(contender.system).loads_within_cap)
        point = Point(rows, self.load, (answer,))
        say(
            f"  {contender.name}, {rows} rows: prefill {point.prefill_seconds:.1f} s, step {point.step_seconds:.2f} s, "
            f"{point.tokens_per_s:.2f} tokens/s, {format_bytes(point.peak_bytes)}"
        )
        return point

    def repeat(self, searches: Mapping[Contender, Search[Point]], finalists: Mapping[Contender, int]) -> None:
        """Runs the best of each once more, in turns, because machines drift."""
        for _, (contender, rows) in product(range(1, self.args.repeats), finalists.items()):
            self.once_more(searches[contender], contender, rows)

    def entry(self, contender: Contender, search: Search[Point], rows: int, machine: Calibration) -> Entry:
        best = search.runs[rows]
        spec, memory = spec_of(self.model, contender.dtype or self.args.dtype), self.cap if contender.capped else inf
        packed = spec if contender.codec == PLAIN else spec.packed(contender.codec)
        ceiling = Ceiling(packed, machine, memory, self.args.device_bytes, contender.arithmetic)
        return Entry(
            name=contender.name,
            version=version_of(best.answers[-1].versions, contender.system),
            points=tuple(search.runs[rows] for rows in sorted(search.runs)),
            best=best,
            ceiling=ceiling.tokens_per_s(best.rows, self.load),
            failures=search.failures,
            computes=contender.computes,
            remark=remark_on(contender),
            prompt_limit=rows * self.load.prompt_len / ceiling.pass_seconds(rows, self.load.prompt_len),
            step_limit=rows / ceiling.pass_seconds(rows, 1),
        )


def remark_on(contender: Contender) -> str:
    if not contender.capped:
        return "has the whole memory of the machine"
    loads_within_cap = system_named(contender.system).loads_within_cap
    return "" if loads_within_cap else "loaded before the cap came down, which is in its favour"


def cap_words() -> str:
    cap = open_cap()
    cap.close()
    return cap.words


def commit() -> str:
    """The commit of the measured code, with a + if there are uncommitted changes."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+"]
    done = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout.strip() or "unknown"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
