"""Slots that each head chooses, copied to another place. C and torch give the same bits.

Torch wants an index for every value of a slot: eight bytes of index to move two."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from h2o_flexgen.kernels.native import ValuePlaces, native_library, pointer


def take_slots(source: Tensor, index: Tensor, out: Tensor) -> None:
    rows, heads, count, width = out.shape
    source = source if source.stride(3) == 1 else source.contiguous()  # C reads the values of a slot side by side
    index = index.contiguous()  # both are kept alive until C is done
    assert source.dtype == out.dtype and (*source.shape[:2], source.shape[3]) == (rows, heads, width)
    assert index.dtype == torch.int64 and index.shape in ((rows, heads, count), (rows, 1, count))
    strides = (index.stride(0), index.stride(1) if index.shape[1] > 1 else 0)
    given = _Taking(
        *(ValuePlaces.of(source), ValuePlaces.of(out, writes=True), pointer(index)),
        *strides,
        *(rows, heads, count, width * out.itemsize),
    )
    native_library().take_slots(ctypes.byref(given), ctypes.c_int(torch.get_num_threads()))


def take_slots_twin(source: Tensor, index: Tensor, out: Tensor) -> None:
    out.copy_(source.gather(2, index.unsqueeze(-1).expand(*out.shape)))


class _Taking(ctypes.Structure):
    _fields_ = (
        *((name, ValuePlaces) for name in ("source", "out")),
        ("index", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("index_row", "index_head", "rows", "heads", "count", "width")),
    )
