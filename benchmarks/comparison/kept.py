"""What an earlier call has left of a comparison: its document, read again, so that nothing is run twice."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.baselines.request import Answer
from benchmarks.comparison.calibration import Calibration
from benchmarks.comparison.point import Point
from benchmarks.comparison.suites import Load

AGAIN = "run the comparison without --resume and --seconds, or give another --output"


@dataclass(frozen=True)
class Kept:
    """By systems' names: what they did with so many rows, and why they failed."""

    runs: Mapping[str, Mapping[int, Point]] = field(default_factory=dict)
    failures: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    commits: Mapping[str, str] = field(default_factory=dict)
    walls: Mapping[str, float] = field(default_factory=dict)  # the most seconds of a process, also of those that run again
    before: Calibration | None = None
    after: Calibration | None = None

    @classmethod
    def in_file(cls, file: Path, load: Load, again: Collection[str] = ()) -> Kept:
        """Without the systems that are to be run `again`. A file that is not there holds nothing."""
        if not file.is_file():
            return cls()
        try:
            return cls._of(json.loads(file.read_text(encoding="utf-8")), load, again)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is not what this comparison writes ({error!r}); {AGAIN}") from error

    @classmethod
    def _of(cls, document: Mapping[str, Any], load: Load, again: Collection[str]) -> Kept:
        runs: dict[str, dict[int, Point]] = {}
        for row in document["rows"]:
            points = [_point(point, load) for point in row["points"]]
            runs.setdefault(row["name"], {}).update({point.rows: point for point in points})
        failures = {name: {int(rows): why for rows, why in failed.items()} for name, failed in document["failures"].items()}
        rates = document["calibration"]
        return cls(
            runs={name: one for name, one in runs.items() if name not in again},
            failures={name: one for name, one in failures.items() if name not in again},
            commits={row["name"]: row["commit"] for row in document["rows"]},
            walls={name: _longest(points.values()) for name, points in runs.items()},
            before=Calibration(**rates["before"]),
            after=Calibration(**rates["after"]),
        )

    def commit_of(self, name: str) -> str | None:
        """The commit of a system's figures, if they are kept."""
        return self.commits.get(name) if name in self.runs else None


def _point(point: Mapping[str, Any], load: Load) -> Point:
    return Point(point["rows"], load, tuple(Answer.from_json(json.dumps(answer)) for answer in point["answers"]))


def _longest(points: Iterable[Point]) -> float:
    return max(answer.wall_seconds for point in points for answer in point.answers)
