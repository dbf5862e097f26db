"""Subject: one thing to measure, the clock that measures it, and the watch that reports progress."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from h2o_flexgen.memory.device import Device

CALLS_AT_ONCE = 8  # given to an accelerator before it is awaited
OnSubject = Callable[[str, int, int], None]  # subject, measurements done, measurements in all
Figures = Mapping[str, float]


@dataclass(frozen=True)
class Subject:
    title: str  # for people
    measure: Callable[[], Figures]  # figures by name


@dataclass
class Watch:
    """Reports how far a profile is; a long subject also reports progress inside it."""

    on_subject: OnSubject | None = None
    total: int = 0  # measurements
    done: int = 0
    title: str = ""

    def begin(self, title: str) -> None:
        self.title = title
        self._tell(title)

    def inside(self, text: str) -> None:
        self._tell(f"{self.title}, {text}" if self.title else text)

    def _tell(self, text: str) -> None:
        if self.on_subject is not None:
            self.on_subject(text, self.done, self.total)


@dataclass(frozen=True)
class Clock:
    """Measures a call: the median of calls in a row, or on an accelerator of groups of calls."""

    device: Device
    seconds: float

    def rate(self, title: str, figure: str, work: float, action: Callable[[], object]) -> Subject:
        """A subject with one figure: so much work by the seconds of a call."""
        return Subject(title, lambda: {figure: work / self.of(action)})

    def of(self, action: Callable[[], object]) -> float:
        at_once = CALLS_AT_ONCE if self.device.accelerator else 1
        taken: list[float] = []
        self.device.settle()
        ends = time.perf_counter() + self.seconds
        while not taken or time.perf_counter() < ends:
            begun = time.perf_counter()
            for _ in range(at_once):
                action()
            self.device.settle()
            taken.append((time.perf_counter() - begun) / at_once)
        return statistics.median(taken)
