"""A job of which single requests break: what is said of each, once, and how far all of it is."""

from __future__ import annotations

from collections.abc import Container, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.engine.job import BrokenRequest, Request, RequestSize
from h2o_flexgen.engine.reports import NO_TICK, OnTick, Tick
from h2o_flexgen.engine.restarted_run import RestartedRun
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.sampler import NoTokenLeft


@dataclass(frozen=True)
class Numbered:
    """A job of which only the numbers of its requests are known."""

    numbers: Sequence[int]
    prefixes: None = None

    @property
    def sizes(self) -> Sequence[RequestSize]:
        return [RequestSize(1, 1) for _ in self.numbers]

    def request(self, place: int) -> Request:
        raise AssertionError("no text is read here")

    def without(self, ended: Container[int]) -> Numbered:
        return Numbered([number for number in self.numbers if number not in ended])


class Engine:
    """Completes requests in order, each in a pass of its own, until one of those that break."""

    def __init__(self, broken: Container[int], cause: type[Exception] | None = None) -> None:
        self.broken, self.cause = broken, cause
        self.runs: list[list[int]] = []
        self.closed = 0

    def generate(self, job: Numbered, on_tick: OnTick) -> Generator[Completion, None, None]:
        self.runs.append([*job.numbers])
        try:
            for count, number in enumerate(job.numbers, 1):
                on_tick(
                    replace(
                        NO_TICK, number=count, requests_done=count - 1, alive=1, seats=2, busy_seconds={"read": 1.0 * count}
                    )
                )
                if number in self.broken:
                    raise TaskFailed("a task", self.cause("bad") if self.cause else NoTokenLeft(0, number, f"{number} is bad"))
                yield Completion(number, None, (1,), "", (1,), None, "stop")
        finally:
            self.closed += 1


def test_requests_that_break_are_written_off_and_the_others_end_once() -> None:
    engine, ticks = Engine((5, 0)), list[Tick]()
    run = RestartedRun(engine.generate, Numbered((3, 5, 1 << 62, 0, 7)), ticks.append)
    said: list[Any] = [one if isinstance(one, BrokenRequest) else one.index for one in run.outcomes()]
    assert said == [3, BrokenRequest(5, "5 is bad"), 1 << 62, BrokenRequest(0, "0 is bad"), 7]
    assert engine.runs == [[3, 5, 1 << 62, 0, 7], [1 << 62, 0, 7], [7]] and engine.closed == 3
    assert [tick.number for tick in ticks] == [1, 2, 3, 4, 5], "ticks count on"
    assert (ticks[-1].requests_done, ticks[-1].alive, ticks[-1].seats, ticks[-1].busy_seconds["read"]) == (2, 1, 2, 5.0)


def test_a_job_of_which_all_break_ends() -> None:
    engine = Engine(range(9))
    assert [one.index for one in RestartedRun(engine.generate, Numbered(range(3))).outcomes()] == [0, 1, 2]
    assert len(engine.runs) == 3
    assert [*RestartedRun(engine.generate, Numbered(())).outcomes()] == []


def test_what_is_no_single_requests_fault_is_raised() -> None:
    engine = Engine((1,), OSError)
    with pytest.raises(TaskFailed, match="bad"):
        list(RestartedRun(engine.generate, Numbered((0, 1, 2))).outcomes())
    assert engine.closed == 1


def test_closing_ends_the_run_that_is_under_way() -> None:
    engine = Engine(())
    outcomes = RestartedRun(engine.generate, Numbered((0, 1))).outcomes()
    assert next(outcomes).index == 0 and engine.closed == 0
    outcomes.close()
    assert engine.closed == 1
