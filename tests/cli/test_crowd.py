"""A crowd that comes while a run computes: said once, and only if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from h2o_flexgen.cli import watch
from h2o_flexgen.cli.watch import Crowd


@dataclass(frozen=True)
class Planted:
    """What was seen in a window."""

    seconds: float
    busy: float
    own: float = 0.0

    def cores(self) -> float:
        return self.busy

    def own_cores(self) -> float:
        return self.own


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "cores", lambda: 4)
    monkeypatch.setattr(watch, "get_num_threads", lambda: 4)


def told(windows: Sequence[Planted]) -> list[str]:
    """What is said by the end, with a look in each window."""
    lines, left = list[str](), iter(windows)
    watching = Crowd(lines.append, lambda: next(left))
    for _ in windows[1:]:
        watching.look()
    return lines


def test_a_crowd_is_said_once_with_what_it_costs_and_what_helps() -> None:
    quiet, late = Planted(1.5, 0.1, 3.9), Planted(1.2, 2.1, 1.8)
    assert told([quiet, quiet, late, late, late, quiet]) == [
        "slow: 4 threads compute on 4 cores, and other processes keep 2.1 of them busy, which leaves 1.9 to this one; "
        "stop them, start them with `nice`, or give --threads 2"
    ]


def test_a_crowd_that_was_told_of_before_is_not_said_again() -> None:
    lines, late = list[str](), Planted(1.2, 2.1, 1.8)
    Crowd(lines.append, lambda: late, is_told=True).look()
    assert lines == []


def test_on_a_quiet_machine_nothing_is_said() -> None:
    assert told([Planted(2.0, 0.3, 3.5)] * 5) == []


def test_a_window_too_short_to_tell_is_waited_for() -> None:
    assert told([Planted(0.2, 4.0)] * 5) == []


def test_idle_time_before_computing_is_not_looked_at() -> None:
    """A server waits for requests while others compute, which slows nothing."""
    idle, begun, busy = Planted(60.0, 4.0), Planted(0.1, 4.0), Planted(1.5, 4.0, 0.4)
    lines, left = list[str](), iter([idle, begun, busy, busy])
    watching = Crowd(lines.append, lambda: next(left))
    with watching.computing():
        watching.look()
    assert lines == []
    with watching.computing():
        watching.look()
    assert [line.startswith("slow: 4 threads compute on 4 cores") for line in lines] == [True]
