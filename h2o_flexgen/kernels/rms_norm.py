"""RMS norm: computed in fp32 and rounded before the weight is applied, the order that models with it were trained with. C and
torch sum squares in different orders. With C what becomes of a row depends on nothing but the row."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from h2o_flexgen.kernels.native import KINDS, native_library, pointer
from h2o_flexgen.kernels.thread_counts import threads_for


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight, out = x.contiguous(), weight.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    width = x.shape[-1]
    assert weight.dtype == x.dtype and weight.shape == (width,)
    given = _Norm(pointer(x), pointer(weight), pointer(out), x.numel() // max(1, width), width, eps, KINDS[x.dtype])
    native_library().rms_norm(ctypes.byref(given), ctypes.c_int(threads_for(x.numel())))
    return out


def rms_norm_twin(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype).mul_(weight)


class _Norm(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_long) for name in ("rows", "width")),
        ("eps", ctypes.c_float),
        ("kind", ctypes.c_int),
    )
