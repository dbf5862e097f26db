"""The name of what computes: the processor with the instructions that are used of it."""

from __future__ import annotations

import os
import re

from h2o_flexgen.formats.kernel_table import CPU
from h2o_flexgen.kernels.native import SWITCH, processor
from h2o_flexgen.profiling.measure import cpu_name


def instructions() -> str:
    """The library of kernels in words. One that was asked for stands for a processor that has no more than it needs."""
    return processor(CPU).build + (", emulated" if os.environ.get(SWITCH) else "")


def processor_slug() -> str:
    """A part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", f"{cpu_name()} {instructions()}".lower()).strip("-")
