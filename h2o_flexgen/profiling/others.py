"""Others: how much of the processor other processes took meanwhile. A shared machine's profile is of its share."""

from __future__ import annotations

import os
import time

import psutil

DISTURBING = 0.1  # of a core
WARNING = "other processes"  # it begins so


class Others:
    def __init__(self) -> None:
        self._begun, self._busy, self._own = time.perf_counter(), _busy_seconds(), _own_seconds()

    def cores(self) -> float:
        """That they kept busy since, on the average."""
        passed = max(time.perf_counter() - self._begun, 1e-9)
        return max(0.0, (_busy_seconds() - self._busy - (_own_seconds() - self._own)) / passed)

    def warning(self) -> str:
        """Nothing where they were quiet."""
        cores = self.cores()
        told = f"{WARNING} kept {cores:.1f} cores busy meanwhile: measure again when the machine is quiet"
        return told if cores > DISTURBING else ""


def _busy_seconds() -> float:
    """The seconds for which the cores that this process may use have been busy."""
    times = psutil.cpu_times(percpu=True)
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(len(times)))
    own = own if max(own) < len(times) else set(range(len(times)))  # a container that shows other cores than it has
    return float(sum(times[core].user + times[core].system for core in own))


def _own_seconds() -> float:
    """The processor seconds of this process, and of its children that have ended."""
    times = psutil.Process().cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)
