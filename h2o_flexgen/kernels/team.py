"""The team of threads that kernels in C share their work out to. team.c has it, and starts it when it is first wanted."""

from __future__ import annotations

import ctypes

from h2o_flexgen.formats.kernel_table import CPU, TORCH
from h2o_flexgen.kernels.native import native_library, processor


def start_team(threads: int) -> None:
    """Starts the team's threads while there is room for them. Where there is room for fewer, fewer compute."""
    if processor(CPU).build != TORCH:
        native_library().start_team(ctypes.c_int(threads))
