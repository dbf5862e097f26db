"""The team of threads that kernels in C share their work out to, and how many threads a kernel is worth. team.c has the team,
and starts it when it is first wanted."""

from __future__ import annotations

import ctypes

import torch

from h2o_flexgen.formats.kernel_table import CPU, TORCH
from h2o_flexgen.kernels.native import native_library, processor

VALUES_OF_A_THREAD = 1 << 15  # some ten microseconds of work


def threads_for(values: int) -> int:
    return max(1, min(torch.get_num_threads(), values // VALUES_OF_A_THREAD))


def start_team(threads: int) -> None:
    """Starts the team's threads while there is room for them. Where there is room for fewer, fewer compute."""
    if processor(CPU).build != TORCH:
        native_library().start_team(ctypes.c_int(threads))
