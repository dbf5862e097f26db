"""What a profile has time for: larger sizes, points of curves, and rounds, on machines of any speed. Time is made up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from h2o_flexgen.memory.device import Device
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.profiling.bench import Figures, Subject, TimeLimit
from h2o_flexgen.profiling.measured_machine import Measurement, RoundsTaken, measured, missing, profile
from tests.profiling.profiles import TINY


@dataclass
class World:
    """A clock that only work sets forward, and all that was measured by it: title and size."""

    slow: float = 1.0  # how many times slower it is than another
    seconds: float = 0.0
    order: list[tuple[str, int]] = field(default_factory=list)

    def now(self) -> float:
        return self.seconds

    def limit(self, seconds: float) -> TimeLimit:
        return TimeLimit(seconds, self.now)

    def subject(self, title: str, seconds: float = 0.01, sizes: tuple[int, ...] = (1,), **other: object) -> Subject:
        """Takes so many seconds each time its size is one more."""
        return Subject(title, self._working(title, seconds), sizes, **other)  # type: ignore[arg-type]

    def _working(self, title: str, seconds: float) -> Callable[[int], Figures]:
        def measure(size: int) -> Figures:
            self.order.append((title, size))
            self.seconds += self.slow * seconds * size
            return {title: float(size)}

        return measure

    def curve(self, name: str, seconds: float, rows: tuple[int, ...]) -> list[Subject]:
        titles = [f"{name} {each}" for each in rows]
        behind = ("", *titles)
        return [
            self.subject(title, seconds, (each,), figure=title, behind=before)
            for title, each, before in zip(titles, rows, behind)
        ]


def test_the_middle_of_the_rounds_counts_and_the_first_does_not() -> None:
    left = {"a": [9.0, 1.0, 5.0, 2.0], "b": [0.0, 7.0, 8.0, 9.0]}
    order: list[str] = []

    def subject(name: str) -> Subject:
        return Subject(name, lambda _: (order.append(name), {name: left[name].pop(0)})[1])

    assert measured([subject("a"), subject("b")], 3) == {"a": 2.0, "b": 8.0}
    assert order == ["a", "b"] * 4


def test_of_rates_of_computing_the_best_round_counts_and_of_times_the_least() -> None:
    left = {"rate": [9.0, 1.0, 5.0], "seconds": [1.0, 7.0, 8.0]}
    subjects = [
        Subject(name, lambda _, name=name: {name: left[name].pop(0)}, of_rounds=best)  # type: ignore[misc]
        for name, best in (("rate", max), ("seconds", min))
    ]
    assert measured(subjects, 2) == {"rate": 5.0, "seconds": 7.0}


def test_rounds_that_disagree_tell_of_a_disturbance() -> None:
    """A few figures that change say nothing; it takes a tenth of them. What was measured once cannot change."""
    taken, titles = RoundsTaken(), [str(place) for place in range(20)]
    assert taken.unsteadiness(titles) == 1.0
    for number, round_of in enumerate(([1.0] * 20, [2.0] * 20, [*[2.2] * 18, 8.0, 20.0])):
        for title, value in zip(titles, round_of):
            taken.add(number, title, Measurement({title: value}, 1, 0.1))
    assert taken.unsteadiness(titles) == 4.0
    assert taken.unsteadiness(titles[:19]) == pytest.approx(1.1)


def test_sizes_grow_until_a_measurement_is_long_enough() -> None:
    world = World()
    subjects = [world.subject("fast", 0.001, (1, 8, 64)), world.subject("slow", 0.05, (1, 8, 64))]
    assert measured(subjects, 1, world.limit(100.0)) == {"fast": 64, "slow": 8}
    assert world.order == [
        *[("fast", size) for size in (1, 1, 64)],
        *[("slow", size) for size in (1, 1, 8)],
        ("fast", 64),
        ("slow", 8),
    ]


def test_what_a_first_call_takes_says_nothing_about_larger_sizes() -> None:
    world = World()
    steady = world.subject("a", 0.01, (1, 8))

    def measure(size: int) -> Figures:
        world.seconds += 0.2 if not world.order else 0.0
        return steady.measure(size)

    assert measured([Subject("a", measure, (1, 8))], 0, world.limit(100.0)) == {"a": 8}


def test_nothing_that_is_slow_is_repeated_and_then_its_first_time_counts() -> None:
    world = World()
    assert measured([world.subject("fast"), world.subject("slow", 4.0)], 3, world.limit(10.0)) == {"fast": 1, "slow": 1}
    assert world.order.count(("slow", 1)) == 1 and world.order.count(("fast", 1)) == 4


def test_points_for_which_there_is_no_time_are_left_out_with_all_behind_them() -> None:
    world = World()
    curve = world.curve("rows", 0.01, (1, 16, 64, 1024))
    found = measured(curve, 1, world.limit(3.0))
    assert set(found) == {"rows 1", "rows 16", "rows 64"} and missing(curve, found) == ["rows 1024"]
    world = World(slow=100.0)
    curve = world.curve("rows", 0.01, (1, 16, 64, 1024))
    assert set(measured(curve, 1, world.limit(3.0))) == {"rows 1"}


@pytest.mark.parametrize("slow", [1.0, 20.0, 100.0])
@pytest.mark.parametrize("rounds", [2, 9])
def test_it_ends_in_time_on_a_machine_of_any_speed(slow: float, rounds: int) -> None:
    """The work is like that of a profile. On the slowest machine only the smallest sizes are measured."""
    world, limit = World(slow), 25.0
    subjects = [
        world.subject("disk", 0.01, (1, 8, 64), weight=6.0, enough=math.inf),
        *(world.subject(f"attention {number}", 0.002, (1, 8), weight=2.0) for number in range(8)),
        *(point for number in range(4) for point in world.curve(f"products {number}", 0.001, (1, 4, 16, 64, 256, 1024))),
    ]
    found = measured(subjects, rounds, world.limit(limit))
    assert world.seconds <= limit
    assert set(found) >= {subject.title for subject in subjects if not subject.behind}
    assert missing(subjects, found) == [] or slow > 1


def test_what_was_measured_is_not_measured_again_and_the_first_time_is_made_up_for(tmp_path: Path) -> None:
    world = World()
    taken = RoundsTaken.kept_in(tmp_path / "file", "")
    for number, name in ((0, "a"), (1, "a"), (2, "a"), (0, "b"), (1, "b")):
        taken.add(number, name, Measurement({name: 1.0}, 4, 0.01))
    again = RoundsTaken.kept_in(tmp_path / "file", "")
    subjects = [world.subject("a", sizes=(1, 4)), world.subject("b", sizes=(1, 4))]
    assert measured(subjects, 2, world.limit(10.0), None, again) == {"a": 1.0, "b": 2.5}
    assert world.order == [("b", 4)] * 2, "at the size that was found before, and once for nothing"


def test_without_any_time_there_is_a_machine_all_the_same(tmp_path: Path) -> None:
    machine = profile(Device(), tmp_path, "here", "float32", TINY, now=_hurrying())
    assert machine.flops_per_s["float32"][0][0] == 1 and len(machine.flops_per_s["float32"]) == 1
    line = "products of float32 with more rows than 1: too slow to be measured in time, taken as with 1"
    assert line in machine.not_measured
    machine.save(tmp_path / "here.yaml")
    assert Machine.load(tmp_path / "here.yaml") == machine


def _hurrying() -> Callable[[], float]:
    """A clock by which a year passes with each look at it."""
    years = iter(range(10**9))
    return lambda: 3e7 * next(years)
