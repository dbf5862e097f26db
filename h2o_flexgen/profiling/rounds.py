"""Rounds: every subject is measured once per round, and the median over the rounds counts. Measurements are saved as they are
made, so that a stopped profile can continue."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from h2o_flexgen.profiling.subject import Figures, Subject, Watch

Mark = tuple[int, str]  # the round, and the title of the subject


@dataclass
class Taken:
    """Measurements by round and subject, including those of a stopped profile if there is a file. Each is written at once, so
    that only the measurement under way is lost however the process ends."""

    file: Path | None = None
    asked: str = ""  # sizes and everything else that figures depend on; lines with another value are ignored
    known: dict[Mark, Figures] = field(default_factory=dict)

    @classmethod
    def kept_in(cls, file: Path, asked: str) -> Taken:
        return cls(file, asked, dict(_read(file, asked)))

    def add(self, number: int, title: str, figures: Figures) -> None:
        self.known[number, title] = figures
        if self.file is None:
            return
        line = json.dumps([self.asked, number, title, dict(figures)])
        with suppress(OSError):  # a folder that cannot be written is reported when the profile is saved
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as out:
                out.write(line + "\n")

    def forget(self) -> None:
        """Removes the file when the profile is complete."""
        if self.file is not None:
            with suppress(OSError):
                self.file.unlink()


def _read(file: Path, asked: str) -> Iterator[tuple[Mark, Figures]]:
    """Reads measurements, skipping a last line that was cut off."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        with suppress(ValueError, TypeError, AttributeError):
            of, number, title, figures = json.loads(line)
            if of == asked:
                yield (int(number), str(title)), {str(name): float(value) for name, value in figures.items()}


def measured(
    subjects: Sequence[Subject], rounds: int, watch: Watch | None = None, taken: Taken | None = None
) -> dict[str, float]:
    """Measures all subjects in turns. A first round that does not count starts threads and touches memory. Measurements in
    `taken` are not repeated."""
    watch, taken = watch or Watch(), taken or Taken()
    watch.total = (1 + rounds) * len(subjects)
    for number in range(1 + rounds):
        for place, subject in enumerate(subjects):
            watch.done = number * len(subjects) + place
            if not _is_needed(subject, number, rounds, taken):
                continue
            watch.begin(subject.title)
            figures = subject.measure()
            if number:
                taken.add(number, subject.title, figures)
    return _middles(subjects, rounds, taken)


def _is_needed(subject: Subject, number: int, rounds: int, taken: Taken) -> bool:
    """The uncounted round is needed if any counted one is still missing."""
    wanted = (number,) if number else range(1, 1 + rounds)
    return any((each, subject.title) not in taken.known for each in wanted)


def _middles(subjects: Sequence[Subject], rounds: int, taken: Taken) -> dict[str, float]:
    figures: dict[str, list[float]] = defaultdict(list)
    for number in range(1, 1 + rounds):
        for subject in subjects:
            for name, value in taken.known[number, subject.title].items():
                figures[name].append(value)
    return {name: statistics.median(values) for name, values in figures.items()}
