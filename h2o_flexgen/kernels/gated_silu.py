"""silu(gate) * up in one pass over the two, of which the first becomes the outcome. C and torch differ in the last bits of
float32; both round silu to the type of the values first."""

from __future__ import annotations

import ctypes

from torch import Tensor
from torch.nn import functional

from h2o_flexgen.kernels.native import KINDS, native_library, pointer
from h2o_flexgen.kernels.threads import threads_for


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    assert gate.shape == up.shape and gate.dtype == up.dtype
    given = _Gating(pointer(gate, writes=True), pointer(up), gate.numel(), KINDS[gate.dtype])
    native_library().gated_silu(ctypes.byref(given), ctypes.c_int(threads_for(gate.numel())))
    return gate


def gated_silu_twin(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate, inplace=True).mul_(up)


class _Gating(ctypes.Structure):
    _fields_ = (("gate", ctypes.c_void_p), ("up", ctypes.c_void_p), ("count", ctypes.c_long), ("kind", ctypes.c_int))
