"""The rotation of heads: pairs (j, j + half) of a head's first 2 * half values are turned, the rest stays.

How far a position is turned is the same in all layers, so sines and cosines are made once for a step. Each product is rounded
to the type of the values, as torch does it, so kernels give the same bits."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.kernels.native import KINDS, ValuePlaces, native_library, pointer
from h2o_flexgen.kernels.thread_counts import threads_for


class RotationAngles(NamedTuple):
    """Cosines and sines of the pairs of each token's heads, in the type of the values. (rows, tokens, 1, half)"""

    cos: Tensor
    sin: Tensor


def rotate(x: Tensor, turn: RotationAngles) -> Tensor:
    (rows, tokens, heads, dim), half = x.shape, turn.cos.shape[-1]
    x = x if x.stride(3) == 1 else x.contiguous()
    cos, sin = (each.contiguous() for each in turn)
    assert cos.dtype == sin.dtype == x.dtype and cos.shape == sin.shape == (rows, tokens, 1, half) and 2 * half <= dim
    out = torch.empty(x.shape, dtype=x.dtype)
    places = ValuePlaces.of(x.transpose(1, 2), KINDS[x.dtype])
    given = _Rotation(places, *map(pointer, (cos, sin, out)), *(rows, heads, tokens, dim, half))
    native_library().rotate(ctypes.byref(given), ctypes.c_int(threads_for(x.numel())))
    return out


def rotate_twin(x: Tensor, turn: RotationAngles) -> Tensor:
    cos, sin = turn
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.sub(first * cos, second * sin, out=turned[..., :half])
    torch.add(second * cos, first * sin, out=turned[..., half : 2 * half])
    turned[..., 2 * half :] = x[..., 2 * half :]
    return turned


class _Rotation(ctypes.Structure):
    _fields_ = (
        ("x", ValuePlaces),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "out")),
        *((name, ctypes.c_long) for name in ("rows", "heads", "tokens", "dim", "half")),
    )
