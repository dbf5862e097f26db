"""What a comparison found: as a table, and as a document of JSON from which the README is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from benchmarks.comparison.calibration import Calibration
from benchmarks.comparison.point import Point
from benchmarks.comparison.suites import Load
from h2o_flexgen.core.units import format_bytes

WORDS = 3  # columns of words; the others are numbers
COLUMNS = (
    *("system", "version", "computes"),
    *("rows", "prefill s", "decode s", "step s", "tokens/s", "peak RSS GB", "times slower", "of ceiling"),
)


@dataclass(frozen=True)
class Entry:
    """A system: every number of rows that was tried, and the best."""

    name: str
    version: str
    points: tuple[Point, ...]
    best: Point
    ceiling: float  # tokens per second, with the best number of rows
    failures: Mapping[int, str]
    computes: str
    remark: str = ""  # where it was treated unlike the others
    prompt_limit: float = 0.0  # tokens per second in prompts, and in steps: where that is looked at
    step_limit: float = 0.0
    commit: str = ""  # of what measured it

    @property
    def share(self) -> float:
        return self.best.tokens_per_s / self.ceiling


@dataclass(frozen=True)
class Report:
    suite: str
    model: str
    dtype: str
    cap_bytes: int | None  # None: what the machine has
    cap_words: str
    load: Load
    before: Calibration
    after: Calibration
    day: str
    reference: str  # the name of the one that the others are held against
    entries: tuple[Entry, ...]
    skipped: Mapping[str, str]
    not_run: Mapping[str, str] = field(default_factory=dict)  # because time was over
    failures: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    device_bytes: int | None = None  # of an accelerator that is made smaller
    kind: ClassVar[str] = "compare"
    columns: ClassVar[tuple[str, ...]] = COLUMNS
    ceiling: ClassVar[str] = (
        "the lower of two rates: the disk reads the weights that the cap has no room for; the processor multiplies matrices "
        "for as many rows. All are measured, and KV is not counted. Peak RSS counts mapped pages of a checkpoint too"
    )

    @property
    def name(self) -> str:
        memory = "" if self.cap_bytes is None else f"{self.cap_bytes / 2**30:g}GiB-"
        return f"{self.model.rpartition('/')[2]}-{memory}{self.load}".lower().replace("+", "-")

    @property
    def file_name(self) -> str:
        return f"compare-{self.name}.json"

    @property
    def title(self) -> str:
        memory = "" if self.cap_bytes is None else f", in {self.cap_bytes / 2**30:g} GiB"
        return f"{self.model} shapes in {self.dtype}, {self.load} tokens{memory}"

    def times_slower(self, entry: Entry) -> float | None:
        """Than the reference, if that came to its end."""
        reference = next((one.best.tokens_per_s for one in self.entries if one.name == self.reference), None)
        return None if reference is None else reference / entry.best.tokens_per_s

    # -- for people ----------------------------------------------------------------------------------------------------------

    def table(self) -> str:
        rows = [self.columns, *map(self.cells, self.entries)]
        cap = "none" if self.cap_bytes is None else f"{format_bytes(self.cap_bytes)}, {self.cap_words}"
        widths = [max(len(row[column]) for row in rows) for column in range(len(self.columns))]
        lines = [
            "  ".join([*map(str.ljust, row[:WORDS], widths[:WORDS]), *map(str.rjust, row[WORDS:], widths[WORDS:])])
            for row in rows
        ]
        machine = self.before.machine
        return "\n".join(
            [
                self.title,
                f"machine: {machine['cpu']}, {machine['cores']} cores, {machine['device']}, torch {machine['torch']}",
                f"before:  {self.before}",
                f"after:   {self.after}",
                f"cap:     {cap}",
                "",
                *lines,
                "",
                *self.remarks(),
            ]
        )

    def cells(self, entry: Entry) -> tuple[str, ...]:
        best = entry.best
        return (
            entry.name + ("" if best.is_whole else " *"),
            entry.version,
            entry.computes,
            str(best.rows),
            f"{best.prefill_seconds:.1f}",
            f"{best.decode_seconds:.0f}",
            f"{best.step_seconds:.2f}",
            f"{best.tokens_per_s:.3g}",
            f"{best.peak_bytes / 1e9:.2f}",
            "-" if self.times_slower(entry) is None else f"{self.times_slower(entry):.2f}",
            f"{entry.share:.0%}",
        )

    def remarks(self) -> list[str]:
        steps = {len(answer.step_seconds) for entry in self.entries if not entry.best.is_whole for answer in entry.best.answers}
        lines = []
        if steps:
            several = " or ".join(map(str, sorted(steps)))
            timed = f"{several} decode steps are timed after the prompts, with the KV of half the text"
            lines.append(f"With a star: {timed}; their median counts for every step.")
        lines += [f"{entry.name}: {entry.remark}." for entry in self.entries if entry.remark]
        lines += [f"{name}: skipped, {reason}." for name, reason in self.skipped.items()]
        lines += [f"{name}: not run, {reason}." for name, reason in self.not_run.items()]
        failures = {entry.name: entry.failures for entry in self.entries}
        lines += [f"{name}, {rows} rows: {why}." for name, failed in failures.items() for rows, why in failed.items()]
        return lines

    # -- for programs --------------------------------------------------------------------------------------------------------

    def document(self, command: str, commit: str) -> dict[str, Any]:
        return {
            "benchmark": self.kind,
            "title": self.title,
            "command": command,
            "commit": ", ".join(dict.fromkeys(entry.commit or commit for entry in self.entries)) or commit,
            "date": self.day,
            "machine": self.before.machine,
            "ceiling": self.ceiling,
            "cap": {"bytes": self.cap_bytes, "how": self.cap_words},
            "calibration": {"before": asdict(self.before), "after": asdict(self.after)},
            "unit": "tokens/s",
            "higher_is_better": True,
            "columns": list(self.columns),
            "cells": [list(self.cells(entry)) for entry in self.entries],
            "rows": [self._row(entry) for entry in self.entries],
            "skipped": dict(self.skipped),
            "not_run": dict(self.not_run),
            "failures": {name: {str(rows): why for rows, why in failed.items()} for name, failed in self.failures.items()},
            "notes": " ".join(self.remarks()),
        }

    def _row(self, entry: Entry) -> dict[str, Any]:
        return {
            "name": entry.name,
            "measured": entry.best.tokens_per_s,
            "ceiling": entry.ceiling,
            "rows": entry.best.rows,
            "seconds": entry.best.seconds,
            "commit": entry.commit,
            "times_slower": self.times_slower(entry),
            "failures": {str(rows): why for rows, why in entry.failures.items()},
            "points": [_point(point) for point in entry.points],
        }


def _point(point: Point) -> dict[str, Any]:
    return {
        "rows": point.rows,
        "prefill_seconds": point.prefill_seconds,
        "decode_seconds": point.decode_seconds,
        "step_seconds": point.step_seconds,
        "tokens_per_s": point.tokens_per_s,
        "peak_host_bytes": point.peak_bytes,
        "whole": point.is_whole,
        "answers": [asdict(answer) for answer in point.answers],
    }


def version_of(versions: Mapping[str, str], system: str) -> str:
    return versions.get(system, next(iter(versions.values()), ""))
