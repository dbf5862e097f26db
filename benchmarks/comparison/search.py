"""The best number of rows of a system: found by doubling until it fails or slows, and half way from there; or, where a planner
knows what fits, from there downwards until fewer are slower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from benchmarks.comparison.launch import Failed, may_do_with_less

T = TypeVar("T")
SLOWER = 0.97  # of the best so far: less than that is no accident of the measurement


@dataclass
class Search(Generic[T]):
    """`measure` runs so many rows, `score` says what of it is to be large."""

    measure: Callable[[int], T]
    score: Callable[[T], float]
    runs: dict[int, T] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    @property
    def best(self) -> int | None:
        return max(self.runs, key=lambda rows: self.score(self.runs[rows]), default=None)

    def upwards(self, most: int) -> None:
        rows = 1
        while rows <= most and self._goes_well(rows):
            rows *= 2
        if self.best is not None and 1 < self.best < most:  # powers of two are coarse: a system may fit nearly twice the best
            self._goes_well(min(most, self.best + self.best // 2))

    def downwards(self, most: int, halved: bool = True, tries: int | None = None) -> None:
        """Unless it is to be halved, only what lacks memory or time is tried with fewer, so many times at most."""
        rows, left = most, tries
        while rows and left != 0:
            if not ((self._goes_well(rows) and halved) or may_do_with_less(self.failures.get(rows, ""))):
                return
            rows, left = rows // 2, None if left is None else left - 1

    def _goes_well(self, rows: int) -> bool:
        """Was it run, and not slower than the best before?"""
        best = max(map(self.score, self.runs.values()), default=0.0)
        try:
            self.runs[rows] = self.measure(rows)
        except Failed as error:
            self.failures[rows] = str(error)
            return False
        return self.score(self.runs[rows]) > SLOWER * best
