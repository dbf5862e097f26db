"""The slot of each head that ranks lowest among those that may go; among equals, the oldest token's.

C and torch have the same outcome.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from h2o_flexgen.kernels.native import native_library, pointer

LAST = torch.iinfo(torch.int32).max


def lowest_slot(positions: Tensor, ranks: Tensor | None, held: Tensor, start: Tensor, end: Tensor) -> Tensor:
    rows = len(positions)
    assert positions.dtype == torch.int32 and (ranks is None or (ranks.dtype, ranks.shape) == (torch.float32, positions.shape))
    assert held.shape == (rows,) and start.shape == end.shape == (rows, 1, 1)
    assert held.dtype == start.dtype == end.dtype == torch.int64
    out = torch.empty(positions.shape[:2], dtype=torch.int64)
    places = (positions, ranks, held, start, end, out)
    given = _Ranking(*(None if place is None else pointer(place) for place in places), *positions.shape)
    native_library().lowest_slot(ctypes.byref(given), ctypes.c_int(torch.get_num_threads()))
    return out


def lowest_slot_twin(positions: Tensor, ranks: Tensor | None, held: Tensor, start: Tensor, end: Tensor) -> Tensor:
    behind = torch.arange(positions.shape[2], device=positions.device) >= held[:, None, None]
    stays = (positions < start) | (positions >= end) | behind
    free = (positions.double() if ranks is None else ranks).masked_fill(stays, torch.inf)
    lowest = (free == free.amin(-1, keepdim=True)) & ~stays
    oldest = positions.masked_fill(~lowest, LAST).argmin(-1)
    return torch.where(lowest.any(-1), oldest, held[:, None] - 1)


class _Ranking(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("positions", "ranks", "held", "start", "end", "out")),
        *((name, ctypes.c_long) for name in ("rows", "heads", "slots")),
    )
