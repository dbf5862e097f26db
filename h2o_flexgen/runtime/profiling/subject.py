"""Subject: one thing that is measured, once in every round. The middle of the rounds counts: a plan wants what a run gets."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from h2o_flexgen.memory.device import Device

CALLS_AT_ONCE = 8  # that an accelerator is given before it is waited for
OnSubject = Callable[[str, int, int], None]  # what is measured now, how many measurements are over, of how many
Figures = Mapping[str, float]


@dataclass(frozen=True)
class Subject:
    title: str  # for people
    measure: Callable[[], Figures]  # figures by name


@dataclass(frozen=True)
class Clock:
    """What a call takes: the median of calls in a row, on an accelerator of some calls at once."""

    device: Device
    seconds: float

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


def measured(subjects: Sequence[Subject], rounds: int, on_subject: OnSubject | None = None) -> dict[str, float]:
    """All of them in turns; a first time, which does not count, lets threads start and memory be there."""
    taken: dict[str, list[float]] = defaultdict(list)
    total = (1 + rounds) * len(subjects)
    for number in range(1 + rounds):
        for place, subject in enumerate(subjects):
            if on_subject is not None:
                on_subject(subject.title, number * len(subjects) + place, total)
            figures = subject.measure()
            for name, value in figures.items() if number else ():
                taken[name].append(value)
    return {name: statistics.median(values) for name, values in taken.items()}
