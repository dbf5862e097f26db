"""Runs a job to its end, whatever becomes of single requests: one that breaks is written off, and those that have not ended are
run again from their prompts."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import TypeAlias

from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.engine.job import BrokenRequest, DivisibleJob, Outcome
from h2o_flexgen.engine.reports import NO_TICK, OnTick, Tick
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.sampler import NoTokenLeft

Generate: TypeAlias = "Callable[..., Generator[Completion, None, None]]"  # takes a job, and on_tick


@dataclass
class RestartedRun:
    generate: Generate
    left: DivisibleJob
    on_tick: OnTick | None = None  # gets counts from the beginning of the first run
    _ended: array[int] = field(default_factory=lambda: array("q"))  # numbers of requests
    _before: Tick = NO_TICK  # the last of the runs that broke
    _latest: Tick = NO_TICK

    def outcomes(self) -> Generator[Outcome, None, None]:
        """What becomes of each request, as they end."""
        while len(self.left.sizes):
            broken = yield from self._until_one_breaks()
            if broken is None:
                return
            self._ended.append(broken.index)
            yield broken
            self.left = self.left.without(set(self._ended))
            self._before = self._latest

    def _until_one_breaks(self) -> Generator[Completion, None, BrokenRequest | None]:
        try:
            with closing(self.generate(self.left, on_tick=self._count)) as completions:
                for done in completions:
                    self._ended.append(done.index)
                    yield done
        except TaskFailed as failed:
            if isinstance(failed.cause, NoTokenLeft):
                return BrokenRequest(failed.cause.number, str(failed.cause))
            raise
        return None

    def _count(self, tick: Tick) -> None:
        self._latest = tick.behind(self._before)
        if self.on_tick is not None:
            self.on_tick(self._latest)
