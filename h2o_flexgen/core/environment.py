"""What a process finds where it runs: the default folders, the number of cores, and how threads of OpenMP wait for each other.
Flags are checked against these, so torch is not imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import gettempdir

from h2o_flexgen.core.allowed_values import Allowed, Bounds
from h2o_flexgen.core.files import local_path

LONGEST_FOR_SOCKETS = 24  # characters: names of sockets have 107 at most, and Ray adds up to 80


def cache_folder(kind: str) -> Path:
    """The folder in the user's cache for one kind of things."""
    return local_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "h2o_flexgen" / kind


def default_offload_folder() -> Path:
    """The folder for offloaded data. It is not the system's folder for temporary files, which is often memory."""
    return cache_folder("offload")


def existing_folder(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    whole = folder.absolute()
    return next(place for place in (whole, *whole.parents) if place.exists())


def folder_of_sockets() -> Path:
    """The folder for temporary files, unless the names of sockets below it would be longer than the system allows."""
    folder = gettempdir()
    return Path(folder if len(folder) <= LONGEST_FOR_SOCKETS else "/tmp")


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(most: int) -> Bounds:
    """The numbers of threads that may compute where there are so many cores."""
    return Bounds(1, most, note=", the cores that this process may use")


class Threads(Allowed):
    """The numbers of threads that may compute. The cores are counted when a number is read."""

    def read(self, value: object) -> int:
        return int(threads(cores()).read(value))

    def typed(self, word: str) -> int:
        return int(threads(cores()).typed(word))

    def __str__(self) -> str:
        return str(threads(cores()))


WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # if the user sets one of them, it stays
SPINS = 2000  # how often a waiting thread looks for work before it sleeps


def let_threads_sleep_soon() -> None:
    """Makes waiting threads sleep soon. OpenMP's threads spin long for work before they sleep: where another process needs
    the core, each then waits for the other, and two threads are several times slower than one. Threads that sleep at once
    are slow where no other process runs, so these spin a little (docs/log/measuring.md has the figures). OpenMP reads the
    variable when torch is imported; if that has happened, nothing is changed."""
    if "torch" not in sys.modules and not any(name in os.environ for name in WAITING):
        os.environ[WAITING[0]] = str(SPINS)
