"""How many threads a kernel is worth that passes over values once: starting one takes as long as thousands of values."""

from __future__ import annotations

import torch

VALUES_OF_A_THREAD = 1 << 15  # some ten microseconds of work


def threads_for(values: int) -> int:
    return max(1, min(torch.get_num_threads(), values // VALUES_OF_A_THREAD))
