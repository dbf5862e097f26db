"""Others: how many cores other processes kept busy. The profile of a shared machine describes only our share of it."""

from __future__ import annotations

import os
import time

import psutil

DISTURBING = 0.1  # cores
WARNING = "other processes"  # the warning's first words


class Others:
    def __init__(self) -> None:
        self._begun, self._busy, self._own = time.perf_counter(), _busy_seconds(), _own_seconds()

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return max(time.perf_counter() - self._begun, 1e-9)

    def cores(self) -> float:
        """The cores that others kept busy since the beginning, on average."""
        return max(0.0, (_busy_seconds() - self._busy) / self.seconds - self.own_cores())

    def own_cores(self) -> float:
        """Those that this process had."""
        return (_own_seconds() - self._own) / self.seconds

    def warning(self) -> str:
        """A warning, which is empty if other processes were quiet."""
        cores = self.cores()
        told = f"{WARNING} kept {cores:.1f} cores busy meanwhile: measure again when the machine is quiet"
        return told if cores > DISTURBING else ""


def _busy_seconds() -> float:
    """The seconds for which the cores that this process may use have been busy."""
    times = psutil.cpu_times(percpu=True)
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(len(times)))
    own = own if max(own) < len(times) else set(range(len(times)))  # some containers show other cores than they have
    return float(sum(times[core].user + times[core].system for core in own))


def _own_seconds() -> float:
    """The processor seconds of this process, and of its children that have ended."""
    times = psutil.Process().cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)
