"""The activation of an mlp, and its product with a second factor where there is one, in one pass. C and torch differ in the
last bits of float32; both round the activation to the type of the values first. With C what becomes of a value depends on
nothing but the value: torch gives the last values of a tensor, and of a thread's part, other last bits."""

from __future__ import annotations

import ctypes

from torch import Tensor
from torch.nn import functional

from h2o_flexgen.kernels.native import KINDS, native_library, pointer
from h2o_flexgen.kernels.thread_counts import threads_for

SILU, GELU_TANH, GELU = range(3)  # as in C


def gated_silu(gate: Tensor, up: Tensor | None) -> Tensor:
    return _gated(gate, up, SILU)


def gated_silu_twin(gate: Tensor, up: Tensor | None) -> Tensor:
    return _times(functional.silu(gate, inplace=True), up)


def gated_gelu_tanh(gate: Tensor, up: Tensor | None) -> Tensor:
    return _gated(gate, up, GELU_TANH)


def gated_gelu_tanh_twin(gate: Tensor, up: Tensor | None) -> Tensor:
    return _times(functional.gelu(gate, approximate="tanh"), up)


def gated_gelu(gate: Tensor, up: Tensor | None) -> Tensor:
    return _gated(gate, up, GELU)


def gated_gelu_twin(gate: Tensor, up: Tensor | None) -> Tensor:
    return _times(functional.gelu(gate), up)


def _times(activated: Tensor, up: Tensor | None) -> Tensor:
    return activated if up is None else activated.mul_(up)


def _gated(gate: Tensor, up: Tensor | None, curve: int) -> Tensor:
    assert up is None or (gate.shape == up.shape and gate.dtype == up.dtype)
    places = pointer(gate, writes=True), None if up is None else pointer(up)
    given = _Gating(*places, gate.numel(), KINDS[gate.dtype], curve)
    native_library().gated(ctypes.byref(given), ctypes.c_int(threads_for(gate.numel())))
    return gate


class _Gating(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate", "up")),
        ("count", ctypes.c_long),
        *((name, ctypes.c_int) for name in ("kind", "curve")),
    )
