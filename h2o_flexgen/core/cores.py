"""The number of cores to compute with. Flags are checked against it, so it imports no torch."""

from __future__ import annotations

import os

from h2o_flexgen.core.allowed_values import Bounds


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(most: int) -> Bounds:
    """The numbers of threads that may compute where there are so many cores."""
    return Bounds(1, most, note=", the cores that this process may use")
