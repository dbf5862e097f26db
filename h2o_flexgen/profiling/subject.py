"""Subject: one thing to measure, the bench that it is measured on, and the watch that reports progress."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from h2o_flexgen.memory.device import Device
from h2o_flexgen.profiling.pool import BytePool
from h2o_flexgen.profiling.time_limit import Stopwatch

CALLS_AT_ONCE = 8  # given to an accelerator before it is awaited
ENOUGH = 0.5  # seconds of a measurement that does not have to be longer
OnSubject = Callable[[str, int, int], None]  # subject, measurements done, measurements in all
Figures = Mapping[str, float]
OfRounds = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Subject:
    """It is measured at the largest of its sizes for which there is time. A point of a curve has one size: if there is no time
    for it, its figure stays unknown. All others, and the first point of a curve, are measured whatever it takes.

    Of several rounds the best counts where other processes can only make a figure worse: rates of computing and copying. The
    middle counts for a disk, as its rate changes, and for differences and ratios, which a disturbance changes either way."""

    title: str  # for people
    measure: Callable[[int], Figures]  # figures by name, at a size
    sizes: tuple[int, ...] = (1,)  # smallest first; what is measured takes longer in proportion
    enough: float = ENOUGH  # seconds of a measurement above which no larger size is tried
    weight: float = 1.0  # its part of the time of a profile, as against others'
    figure: str = ""  # of a point
    behind: str = ""  # the title of the point before it, which tells how long this one will take
    of_rounds: OfRounds = statistics.median  # what counts of several rounds


@dataclass
class ProfileWatch:
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
    now: Stopwatch = field(default_factory=Stopwatch)

    def of(self, action: Callable[[], object]) -> float:
        at_once = CALLS_AT_ONCE if self.device.accelerator else 1
        taken: list[float] = []
        if self.device.accelerator:
            self.make_ready(action)
        self.device.settle()
        ends = self.now() + self.seconds
        while not taken or self.now() < ends:
            begun = self.now()
            for _ in range(at_once):
                action()
            self.device.settle()
            taken.append((self.now() - begun) / at_once)
        return statistics.median(taken)

    def make_ready(self, action: Callable[[], object]) -> None:
        """A first call on an accelerator, which takes seconds where its kernels have to be compiled: once for all runs to come,
        so that it counts neither as what a call takes nor as time of the profile."""
        with self.now.stopped():
            action()
            self.device.settle()


@dataclass(frozen=True)
class Bench:
    """A place to measure at: a device, with a clock for it, and memory there."""

    clock: Clock
    pool: BytePool

    @property
    def device(self) -> Device:
        return self.clock.device

    def rate(self, title: str, figure: str, work: float, action: Callable[[], object]) -> Subject:
        """A subject with one figure: so much work by the seconds of a call."""
        return Subject(title, lambda _: {figure: work / self.clock.of(action)}, of_rounds=max)
