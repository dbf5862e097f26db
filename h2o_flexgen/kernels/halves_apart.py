"""Rows of values of which neighbours belong together, with those that come first before those that come second. C and torch
give the same bits."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from h2o_flexgen.kernels.native import native_library, pointer
from h2o_flexgen.kernels.thread_counts import threads_for


def halves_apart(x: Tensor) -> Tensor:
    x, out, width = x.contiguous(), torch.empty(x.shape, dtype=x.dtype), x.shape[-1]
    assert width % 2 == 0 and x.itemsize in (2, 4)
    given = _Pairs(pointer(x), pointer(out), x.numel() // max(1, width), width // 2, x.itemsize)
    native_library().halves_apart(ctypes.byref(given), ctypes.c_int(threads_for(x.numel())))
    return out


def halves_apart_twin(x: Tensor) -> Tensor:
    pairs: Tensor = x.unflatten(-1, (-1, 2))
    return pairs.transpose(-1, -2).reshape(x.shape)


class _Pairs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_long) for name in ("rows", "half", "nbytes")),
    )
