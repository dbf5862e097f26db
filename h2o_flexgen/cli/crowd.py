"""A crowd of processes that comes while a run computes, and makes it slow: said once, with what it costs and what helps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from h2o_flexgen.cli.slow import SLOW
from h2o_flexgen.core.cores import cores
from h2o_flexgen.engine.thread_options import crowding, get_num_threads
from h2o_flexgen.profiling.busy_cores import Others

LOOK_SECONDS = 1.0  # between two looks: the system counts busy time in hundredths


class Watched(Protocol):
    """The processes that have kept cores busy since a moment."""

    @property
    def seconds(self) -> float:
        """Since that moment."""

    def cores(self) -> float:
        """Those that other processes have kept busy, on average."""

    def own_cores(self) -> float:
        """Those that this process has had."""


class Crowd:
    """What looks for a crowd: it is asked at the end of each step, and looks now and then."""

    def __init__(self, note: Callable[[str], None], begin: Callable[[], Watched] = Others) -> None:
        self._note, self._begin, self._is_told = note, begin, False
        self._watched = begin()

    def look(self) -> None:
        if self._is_told or self._watched.seconds < LOOK_SECONDS:
            return
        watched, self._watched = self._watched, self._begin()
        line = crowding(watched.cores(), get_num_threads(), cores(), watched.own_cores())
        if line is not None:
            self._is_told = True
            self._note(f"{SLOW}: {line}")
