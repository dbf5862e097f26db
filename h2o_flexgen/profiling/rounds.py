"""Rounds: every subject is measured once per round, and the median over the rounds counts, or the best round, as the subject
says. The first round finds the sizes; it counts only for what is too slow to be measured again. Measurements are saved as they
are made, so that a stopped profile can continue."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from h2o_flexgen.profiling.bench import Figures, ProfileWatch, Subject, TimeLimit

FIRST = 0  # the round that finds the sizes
SLOW = 0.04  # the share of the whole time above which a measurement is not repeated
Mark = tuple[int, str]  # the round, and the title of the subject


@dataclass(frozen=True)
class Measurement:
    figures: Figures
    size: int
    seconds: float  # that it took, with all that had to be made ready


@dataclass
class RoundsTaken:
    """Measurements by round and subject, including those of a stopped profile if there is a file. Each is written at once, so
    that only the measurement under way is lost however the process ends."""

    file: Path | None = None
    asked: str = ""  # sizes and everything else that figures depend on; lines with another value are ignored
    known: dict[Mark, Measurement] = field(default_factory=dict)

    @classmethod
    def kept_in(cls, file: Path, asked: str) -> RoundsTaken:
        return cls(file, asked, dict(_read(file, asked)))

    def add(self, number: int, title: str, measurement: Measurement) -> None:
        self.known[number, title] = measurement
        if self.file is None:
            return
        line = json.dumps([self.asked, number, title, {**asdict(measurement), "figures": dict(measurement.figures)}])
        with suppress(OSError):  # a folder that cannot be written is reported when the profile is saved
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as out:
                out.write(line + "\n")

    def forget(self) -> None:
        """Removes the file when the profile is complete."""
        if self.file is not None:
            with suppress(OSError):
                self.file.unlink()

    def unsteadiness(self, titles: Iterable[str]) -> float:
        """How many times better figures were in their best round than in their worst: of those measured more than once, the
        tenth that changed most changed by so much or more."""
        found = []
        for each in ([*self.figures(title)] for title in titles):
            if len(each) > 1:
                found += [max(values) / min(values) for name in each[0] if min(values := [one[name] for one in each]) > 0]
        return sorted(found)[len(found) * 9 // 10] if found else 1.0

    def figures(self, title: str) -> Iterator[Figures]:
        """The figures that count: those of the first round only if there are no others."""
        rounds = sorted(number for number, known in self.known if known == title)
        yield from (self.known[number, title].figures for number in (rounds[1:] if rounds[1:] else rounds))


def _read(file: Path, asked: str) -> Iterator[tuple[Mark, Measurement]]:
    """Reads measurements, skipping a last line that was cut off."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        with suppress(ValueError, TypeError, AttributeError, KeyError):
            of, number, title, found = json.loads(line)
            if of == asked:
                figures = {str(name): float(value) for name, value in found["figures"].items()}
                yield (int(number), str(title)), Measurement(figures, int(found["size"]), float(found["seconds"]))


def measured(
    subjects: Sequence[Subject],
    rounds: int,
    limit: TimeLimit | None = None,
    watch: ProfileWatch | None = None,
    taken: RoundsTaken | None = None,
) -> dict[str, float]:
    """Measures all subjects in turns, as often as the limit allows, and so many rounds at most. Measurements in `taken` are
    not repeated. Points of curves for which there was no time are missing."""
    return Rounds(
        subjects, rounds, limit or TimeLimit(float("inf")), watch or ProfileWatch(), taken or RoundsTaken()
    ).measured()


@dataclass(eq=False)
class Rounds:
    subjects: Sequence[Subject]
    rounds: int
    limit: TimeLimit
    watch: ProfileWatch
    taken: RoundsTaken
    _warm: set[str] = field(default_factory=set)  # titles of what this process has measured
    _last: dict[str, Measurement] = field(default_factory=dict)

    def measured(self) -> dict[str, float]:
        self.watch.total = (1 + self.rounds) * len(self.subjects)
        for number in range(1 + self.rounds):
            self._round(number)
        figures: dict[str, float] = {}
        for subject in self.subjects:
            each = defaultdict[str, list[float]](list)
            for one in self.taken.figures(subject.title):
                for name, value in one.items():
                    each[name].append(value)
            figures |= {name: subject.of_rounds(values) for name, values in each.items()}
        return figures

    def _round(self, number: int) -> None:
        whole = sum(subject.weight for subject in self.subjects)
        to_do = whole
        for place, subject in enumerate(self.subjects):
            self.watch.done = number * len(self.subjects) + place
            share = self.limit.share(subject.weight, to_do + whole * (self.rounds - number) * (number > FIRST))
            if number == FIRST:
                self._first(subject, share)
            else:
                self._again(number, subject, self.limit.left if self._rest_fits(place) else share)
            to_do -= subject.weight

    # -- the first round -------------------------------------------------------------------------------------------------

    def _first(self, subject: Subject, seconds: float) -> None:
        known = self.taken.known.get((FIRST, subject.title))
        if known is None and self._has_time(subject, seconds):
            self.watch.begin(subject.title)
            known = self._at_its_size(subject, seconds)
            self.taken.add(FIRST, subject.title, known)
        if known is not None:
            self._last[subject.title] = known

    def _has_time(self, subject: Subject, seconds: float) -> bool:
        """Points take as long as the point before tells, and without that one they are not tried."""
        if not subject.behind:
            return True
        before = self._last.get(subject.behind)
        return before is not None and before.seconds * subject.sizes[0] / before.size <= seconds

    def _at_its_size(self, subject: Subject, seconds: float) -> Measurement:
        """Measures at the smallest size, and then at the largest that should fit in what is left of the seconds."""
        ends = self.limit.now() + seconds
        found = self._measured(subject, subject.sizes[0])
        if len(subject.sizes) > 1 and 2 * found.seconds <= seconds:
            found = self._measured(subject, found.size)  # without what only a first call takes
        while True:
            left = min(ends - self.limit.now(), subject.enough)
            larger = [size for size in subject.sizes if size > found.size and found.seconds * size / found.size <= left]
            if not larger:
                return found
            found = self._measured(subject, larger[-1])

    # -- the others ------------------------------------------------------------------------------------------------------

    def _rest_fits(self, place: int) -> bool:
        """Whether there is time for all that is not slow and still to come in this round."""
        last = (self._last.get(subject.title) for subject in self.subjects[place:])
        return sum(2 * one.seconds for one in last if one is not None and one.seconds <= self._slow) <= self.limit.left

    @property
    def _slow(self) -> float:
        return SLOW * self.limit.seconds

    def _again(self, number: int, subject: Subject, seconds: float) -> None:
        last = self._last.get(subject.title)
        if last is None or (number, subject.title) in self.taken.known:
            return
        cold = subject.title not in self._warm  # what another process has measured: threads and libraries start here once more
        if (1 + cold) * last.seconds > min(seconds, self._slow):
            return
        self.watch.begin(subject.title)
        if cold:
            self._measured(subject, last.size)
        self._last[subject.title] = found = self._measured(subject, last.size)
        self.taken.add(number, subject.title, found)

    def _measured(self, subject: Subject, size: int) -> Measurement:
        begun = self.limit.now()
        figures = subject.measure(size)
        self._warm.add(subject.title)
        return Measurement(figures, size, self.limit.now() - begun)


def missing(subjects: Sequence[Subject], figures: Mapping[str, float]) -> list[str]:
    """The figures of points for which there was no time."""
    return [subject.figure for subject in subjects if subject.figure and subject.figure not in figures]
