"""Others: what other processes took of the processor and of the disk meanwhile. The profile of a shared machine describes only
our share of it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from h2o_flexgen.core.environment import cores, existing_folder

DISTURBING = 0.1  # cores
DISTURBING_BYTES = 20e6  # a second, to and from the disk
SECTOR = 512  # bytes, in which Linux counts whatever the disk has
LOOK_SECONDS = 0.5
LEAST_SECONDS = 0.25  # the system counts busy time in hundredths, core by core: of less time they say nothing


class Others:
    """`folder`: one on the disk that is looked at, if any."""

    def __init__(self, folder: Path | None = None) -> None:
        self._disk = None if folder is None else existing_folder(folder)
        self._begun, self._busy, self._own = time.perf_counter(), _busy_seconds(), _own_seconds()
        self._moved = self._moved_by_others()

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return max(time.perf_counter() - self._begun, 1e-9)

    def cores(self) -> float:
        """The cores that others kept busy since the beginning, on average: no more than this process may use."""
        busy = _busy_seconds() - self._busy - (_own_seconds() - self._own)
        return min(max(0.0, busy / max(self.seconds, LEAST_SECONDS)), float(cores()))

    def own_cores(self) -> float:
        """Those that this process had."""
        return (_own_seconds() - self._own) / self.seconds

    def disk_bytes_per_s(self) -> float:
        """The bytes a second that others moved to and from the disk since the beginning."""
        return max(0.0, (self._moved_by_others() - self._moved) / max(self.seconds, LEAST_SECONDS))

    def disturbances(self) -> tuple[str, ...]:
        """What they did that a measurement feels: a line for each; none if other processes were quiet."""
        cores, moved = self.cores(), self.disk_bytes_per_s()
        found = []
        if cores > DISTURBING:
            found.append(f"other processes kept {cores:.1f} cores busy meanwhile")
        if moved > DISTURBING_BYTES:
            found.append(f"other processes moved {moved / 1e6:.0f} MB/s to and from the disk meanwhile")
        return tuple(found)

    def _moved_by_others(self) -> int:
        return 0 if self._disk is None else _moved_bytes(self._disk) - _own_moved_bytes()


def is_quiet(folder: Path) -> bool:
    """Whether other processes are quiet now, on the processor and on the disk of this folder: a short look."""
    others = Others(folder)
    time.sleep(LOOK_SECONDS)
    return not others.disturbances()


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


def _moved_bytes(folder: Path) -> int:
    """The bytes that have been read from and written to the disk of a folder; 0 where the system does not count them."""
    with suppress(OSError, ValueError, IndexError):
        device = folder.stat().st_dev
        counts = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text(encoding="ascii").split()
        return SECTOR * (int(counts[2]) + int(counts[6]))
    return 0


def _own_moved_bytes() -> int:
    """The bytes that this process has moved to and from disks, and its children that have ended."""
    with suppress(OSError, ValueError):
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
        return int(counts.get("read_bytes", 0)) + int(counts.get("write_bytes", 0))
    return 0
