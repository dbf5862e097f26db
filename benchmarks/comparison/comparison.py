"""One model, one cap, one workload: every system in processes of its own, and what came of it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import product
from math import inf
from pathlib import Path

from benchmarks.baselines.request import Estimates, Plans, Prepares, Request
from benchmarks.baselines.systems import system_named
from benchmarks.comparison.by_rows import ReportByRows
from benchmarks.comparison.calibration import Calibration
from benchmarks.comparison.cap import open_cap
from benchmarks.comparison.ceiling import Ceiling
from benchmarks.comparison.checkpoint import checkpoint_of, made_up_of, made_up_spec, spec_of
from benchmarks.comparison.gpu_report import ReportByRowsOnGpu, ReportOnGpu
from benchmarks.comparison.kept import Kept
from benchmarks.comparison.launch import Failed, Launcher
from benchmarks.comparison.point import Point
from benchmarks.comparison.report import Entry, Report, version_of
from benchmarks.comparison.search import Search
from benchmarks.comparison.suites import Case, Contender, Load
from benchmarks.comparison.time_left import Deadline, NoTimeLeft, expected_seconds
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.formats.kernel_table import CPU
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.planning.machine import kept_folder
from h2o_flexgen.profiling.gpu_checks import KEPT, take_checks

ROOT = Path(__file__).resolve().parents[2]
TRIES = 3  # with fewer and fewer rows, where it is counted and not searched how many fit
NO_ROW = "not even one row fits, says its planner"
NOT_BEGUN = "not begun yet"
NOT_EXPECTED = "not even one row is expected to fit"
Note = Callable[[Report], None]


@dataclass(frozen=True)
class Shared:
    """What all comparisons of a call know."""

    deadline: Deadline
    calibrations: dict[str, Calibration] = field(default_factory=dict)  # by device, where time is short
    walls: dict[tuple[str, str], float] = field(default_factory=dict)  # seconds of a process, by model and system


class Comparison:
    """`part`: the systems that are run now, of those that are asked for; of others what is kept is reported."""

    def __init__(
        self,
        args: argparse.Namespace,
        model: str,
        cap: int | None,
        load: Load,
        shared: Shared,
        part: Sequence[Contender] | None = None,
    ) -> None:
        self.args, self.model, self.cap, self.load, self.shared = args, model, cap, load, shared
        self.part = args.contenders if part is None else part
        self.folder = Path(args.folder).expanduser().absolute()
        self.steps = None if args.whole else args.steps
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.cache = self.folder / "cache"
        self.environment = {"PYTHONPATH": path, "XDG_CACHE_HOME": str(self.cache)}
        self.launcher = Launcher(args.timeout, self.environment, shared.deadline)
        self.checkpoint = self.folder
        self.cap_words = cap_words() if cap is not None else "none"
        self.kept, self.commit = Kept(), commit()
        self.searches: dict[Contender, Search[Point]] = {}
        self.skipped: dict[str, str] = {}
        self.not_run: dict[str, str] = {}
        self.note: Note = lambda report: None

    @property
    def case(self) -> Case:
        return self.model, str(self.load)

    def run(self, note: Note = lambda report: None) -> Report:
        """`note` gets what is known so far after each system."""
        self.note = note
        memory = "all memory of the host" if self.cap is None else format_bytes(self.cap)
        say(f"{self.model}, {self.load} tokens, {memory}, {self.cap_words}")
        made = made_up_of if self.args.made_up else checkpoint_of
        self.checkpoint = made(self.model, self.args.dtype, self.folder / "checkpoints")
        self.take_checks()
        self.before = self.after = self.calibrated()
        self.take_up()
        missing = {one: self.missing(one) for one in self.args.contenders}
        self.skipped = {one.name: reason for one, reason in missing.items() if reason is not None}
        for name, reason in self.skipped.items():
            say(f"  {name}: skipped, {reason}")
        present = [one for one, reason in missing.items() if reason is None and one in self.part]
        (self.with_given_rows if self.args.rows else self.with_best_rows)(present)
        if self.args.seconds is None:
            self.after = self.after.at_best(self.calibrated())
        self.noted()
        return self.report()

    def take_checks(self) -> None:
        """Systems have a cache of their own. Where the check of a GPU was passed counts there as well, or plans have no graphs:
        here, or in the results of another machine of this kind."""
        if self.args.device != CPU:
            output = [Path(self.args.output) / KEPT] if self.args.output else []
            take_checks([kept_folder(KEPT), *output], kept_folder(KEPT, self.cache))

    def take_up(self) -> None:
        """Reads what an earlier call has left."""
        if not self.args.resume:
            return
        file = Path(self.args.output) / self.report().file_name
        self.kept = Kept.in_file(file, self.load, self.args.again)
        if self.kept.before is not None and self.kept.after is not None:
            self.before, self.after = self.kept.before.at_best(self.before), self.kept.after.at_best(self.after)
        for name, seconds in self.kept.walls.items():
            self.remember(name, seconds)

    def noted(self) -> None:
        self.note(self.report())

    def report(self) -> Report:
        machine, found = self.before.at_best(self.after), self.found
        without_row = {
            one.name: next(iter(search.failures.values()), NO_ROW) for one, search in found.items() if not search.runs
        }
        left = {one.name: NOT_BEGUN for one in self.args.contenders if one not in found and one.name not in self.skipped}
        return self.kind_of_report(
            suite=self.args.suite,
            model=self.model,
            dtype=self.args.dtype,
            cap_bytes=self.cap,
            cap_words=self.cap_words,
            load=self.load,
            before=self.before,
            after=self.after,
            day=date.today().isoformat(),
            reference=self.args.contenders[0].name,
            entries=tuple(self.entries(machine)),
            skipped={**self.skipped, **{name: why for name, why in without_row.items() if name not in self.not_run}},
            not_run={**left, **self.not_run},
            failures={one.name: dict(search.failures) for one, search in found.items() if search.failures},
            device_bytes=self.args.device_bytes,
        )

    @property
    def kind_of_report(self) -> type[Report]:
        if self.args.device == CPU:
            return ReportByRows if self.args.rows else Report
        return ReportByRowsOnGpu if self.args.rows else ReportOnGpu

    def entries(self, machine: Calibration) -> Iterator[Entry]:
        for rows in self.args.rows or (None,):
            for contender, search in self.found.items():
                which = search.best if rows is None else rows
                if which in search.runs:
                    yield self.entry(contender, search, which, machine)

    @property
    def found(self) -> dict[Contender, Search[Point]]:
        """What is known of each system, in the order of the suite: of this call, or kept."""
        known = {one: self.searches[one] if one in self.searches else self.kept_search(one) for one in self.args.known}
        return {one: search for one, search in known.items() if search is not None}

    def kept_search(self, contender: Contender) -> Search[Point] | None:
        runs, failures = (of.get(contender.name, {}) for of in (self.kept.runs, self.kept.failures))
        if not runs and not failures:
            return None
        search = self.search(contender)
        search.runs, search.failures = dict(runs), dict(failures)
        return search

    def missing(self, contender: Contender) -> str | None:
        """Why a system is not there, in a line; what it needs beside the checkpoint is made now."""
        if contender.cases and self.case not in contender.cases:
            return f"no plan is given for {self.model} and {self.load} tokens: other ways take part"
        request, system = self.request(contender, 1), system_named(contender.system)
        reason = system.missing(request)
        if reason is None and isinstance(system, Prepares):
            try:
                self.launcher.prepare(request)
            except Failed as error:
                return f"could not be prepared: {error}"
        return reason

    # -- which rows ----------------------------------------------------------------------------------------------------

    def with_best_rows(self, present: Sequence[Contender]) -> None:
        for contender in present:
            self.searched(contender)
            self.noted()
        self.repeat({one: search.best for one, search in self.searches.items() if search.best is not None})

    def with_given_rows(self, present: Sequence[Contender]) -> None:
        """Systems take turns at each number of rows."""
        self.searches = {one: self.search(one) for one in present}
        for number, rows, contender in product(range(self.args.repeats), self.args.rows, present):
            self.once_more(contender, rows, number)

    def repeat(self, finalists: Mapping[Contender, int]) -> None:
        """Runs the best of each once more, in turns, because machines drift."""
        for number, (contender, rows) in product(range(1, self.args.repeats), finalists.items()):
            self.once_more(contender, rows, number)

    def once_more(self, contender: Contender, rows: int, number: int) -> None:
        """The run of this number, from 0 on, unless it is kept or one has failed."""
        search = self.searches[contender]
        if rows in search.failures or (rows in search.runs and len(search.runs[rows].answers) > number):
            return
        try:
            again = self.measured_now(contender, rows) if rows in search.runs else self.measured(contender, rows)
        except NoTimeLeft as late:
            self.not_run[contender.name] = f"{rows} rows: {late}"
        except Failed as error:  # what came to its end before still counts
            search.failures[rows] = f"in a repetition: {error}" if rows in search.runs else str(error)
            say(f"  {contender.name}, {rows} rows: {search.failures[rows]}")
        else:
            search.runs[rows] = search.runs[rows].with_answer(again.answers[0]) if rows in search.runs else again
        self.noted()

    def search(self, contender: Contender) -> Search[Point]:
        kept = self.kept.failures.get(contender.name, {})
        repeated = {rows: why for rows, why in kept.items() if rows in self.kept.runs.get(contender.name, {})}
        return Search(lambda rows: self.measured(contender, rows), lambda point: point.tokens_per_s, failures=repeated)

    def searched(self, contender: Contender) -> None:
        search = self.searches[contender] = self.search(contender)
        try:
            self.fill(search, contender)
        except NoTimeLeft as late:
            self.not_run[contender.name] = str(late)
            say(f"  {contender.name}: not run, {late}")
        for rows, reason in search.failures.items():
            say(f"  {contender.name}, {rows} rows: {reason}")

    def fill(self, search: Search[Point], contender: Contender) -> None:
        request, system = self.request(contender, 1), system_named(contender.system)
        most = min(self.args.most_rows, contender.most_rows or self.args.most_rows)
        planned = contender.rows_for(self.case)
        if planned is not None:
            search.downwards(planned, halved=False, tries=TRIES)
        elif isinstance(system, Plans):
            try:
                fitting = self.launcher.most_rows(request)
            except Failed as error:
                search.failures[1] = str(error)
            else:
                search.downwards(min(fitting, most), contender.halved)
        elif self.args.device != CPU and isinstance(system, Estimates):
            expected = [rows for rows in dict.fromkeys(system.rows_to_try(request)) if rows]
            search.failures |= {} if expected else {1: NOT_EXPECTED}
            for rows in expected:
                search.downwards(min(rows, most), halved=False, tries=TRIES)
        else:
            search.upwards(self.args.most_rows)

    # -- a run ---------------------------------------------------------------------------------------------------------

    def request(self, contender: Contender, rows: int) -> Request:
        return Request(
            system=contender.system,
            checkpoint=str(self.checkpoint),
            dtype=contender.dtype or self.args.dtype,
            device=self.args.device,
            rows=rows,
            prompt_len=self.load.prompt_len,
            gen_len=self.load.gen_len,
            steps=None if self.steps is None else contender.steps or self.steps,
            host_bytes=self.cap if contender.capped else None,
            device_bytes=self.args.device_bytes,
            scratch=str(self.folder / "scratch"),
            options={**contender.options_for(self.case), **self.args.of_system.get(contender.system, {})},
        )

    def calibrated(self) -> Calibration:
        """Measures in a process of its own, so that this one stays small; where time is short, once in a call."""
        known = self.shared.calibrations.get(self.args.device)
        if self.args.seconds is not None and known is not None:
            return known
        asked = [self.args.device, self.args.dtype, str(self.checkpoint)]
        command = [sys.executable, "-m", "benchmarks.comparison.calibration", *asked]
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise ValueError(f"the machine could not be measured, exit status {done.returncode}; the lines above say why")
        calibration = Calibration(**json.loads(done.stdout.splitlines()[-1]))
        say(f"  the machine: {calibration}")
        self.shared.calibrations[self.args.device] = calibration
        return calibration

    def measured(self, contender: Contender, rows: int) -> Point:
        """As it is kept, or else now."""
        known = self.kept.runs.get(contender.name, {}).get(rows)
        if known is not None:
            say(f"  {contender.name}, {rows} rows: kept, {known.tokens_per_s:.2f} tokens/s")
            return known
        if rows in self.kept.failures.get(contender.name, {}):
            raise Failed(self.kept.failures[contender.name][rows])
        return self.measured_now(contender, rows)

    def measured_now(self, contender: Contender, rows: int) -> Point:
        deadline, left = self.shared.deadline, self.shared.deadline.left
        deadline.require(self.expected_seconds(contender))
        try:
            answer = self.launcher.run(self.request(contender, rows), system_named(contender.system).loads_within_cap)
        except Failed:
            if deadline.left <= 0 and deadline.was_short(left):
                raise NoTimeLeft(f"was stopped after {left:.0f} s, when the call was over") from None
            raise
        point = Point(rows, self.load, (answer,))
        self.remember(contender.name, answer.wall_seconds)
        say(
            f"  {contender.name}, {rows} rows: prefill {point.prefill_seconds:.1f} s, step {point.step_seconds:.2f} s, "
            f"{point.tokens_per_s:.2f} tokens/s, {format_bytes(point.peak_bytes)}"
        )
        return point

    def expected_seconds(self, contender: Contender) -> float:
        """As the system took for this model before, or else as a slow one would."""
        if self.args.seconds is None:
            return 0.0
        known = self.shared.walls.get((self.model, contender.name))
        steps = self.load.gen_len - 1 if self.steps is None else contender.steps or self.steps
        weights = self.spec(self.args.dtype).weight_bytes
        return known if known is not None else expected_seconds(weights, steps, is_slow=contender.steps is not None)

    def remember(self, name: str, seconds: float) -> None:
        key = self.model, name
        self.shared.walls[key] = max(self.shared.walls.get(key, 0.0), seconds)

    # -- what came of it -----------------------------------------------------------------------------------------------

    def spec(self, dtype: str) -> ModelSpec:
        return made_up_spec(self.model, dtype) if self.args.made_up else spec_of(self.model, dtype)

    def entry(self, contender: Contender, search: Search[Point], rows: int, machine: Calibration) -> Entry:
        best = search.runs[rows]
        memory = self.cap if contender.capped and self.cap is not None else inf
        spec = self.spec(contender.dtype or self.args.dtype)
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
            remark="" if self.cap is None else remark_on(contender),
            prompt_limit=rows * self.load.prompt_len / ceiling.pass_seconds(rows, self.load.prompt_len),
            step_limit=rows / ceiling.pass_seconds(rows, 1),
            commit=self.kept.commit_of(contender.name) or self.commit,
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
