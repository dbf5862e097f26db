"""Rounds: every subject is measured once per round, and the median over the rounds counts."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from h2o_flexgen.profiling.subject import Subject, Watch
from h2o_flexgen.profiling.taken import Taken


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
    for name, value in _all(subjects, rounds, taken):
        figures[name].append(value)
    return {name: statistics.median(values) for name, values in figures.items()}


def _all(subjects: Sequence[Subject], rounds: int, taken: Taken) -> Iterator[tuple[str, float]]:
    for number in range(1, 1 + rounds):
        for subject in subjects:
            yield from taken.known[number, subject.title].items()
