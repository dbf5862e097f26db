"""Few rows times the transposed of a matrix of a group codec, without decoding it: in C on CPUs where the library is.

Of many rows decoding first is faster: then whoever asks does that.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.kernels.group_decode import GROUP, group_decode_twin
from h2o_flexgen.kernels.native import KINDS, native_library, pointer

FEW_ROWS = 16  # up to here it was measured to be the faster: 8 times with one row, 2.2 with 8, 1.2 with 16


def group_product(x: Tensor, data: Tensor, bias: Tensor | None, bits: int) -> Tensor | None:
    """x (..., columns), data (outputs, bytes of a row), bias (outputs,) -> (..., outputs); None where it is not for C to do."""
    columns, outputs = x.shape[-1], len(data)
    rows = x.numel() // columns
    native = native_library()
    if native is None or not 0 < rows <= FEW_ROWS or x.dtype not in KINDS or x.device.type != "cpu":
        return None
    groups = data.shape[1] // (GROUP * bits // 8 + 4)
    wide = torch.zeros(rows, groups * GROUP)
    wide[:, :columns] = x.reshape(rows, columns)
    arranged = torch.empty(rows, native.group_product_room(ctypes.c_long(groups * GROUP), ctypes.c_int(bits)))
    added = None if bias is None else bias.float().contiguous()
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype)
    assert groups == -(-columns // GROUP) and (added is None or added.shape == (outputs,))
    places = (data, wide, added, out, arranged)
    sizes = (rows, outputs, groups * GROUP)
    given = _Product(*(None if place is None else pointer(place) for place in places), *sizes, KINDS[x.dtype])
    native.group_product(ctypes.byref(given), ctypes.c_int(bits), ctypes.c_int(torch.get_num_threads()))
    return out


def group_product_twin(x: Tensor, data: Tensor, bias: Tensor | None, bits: int) -> Tensor:
    """With the values as they are before they are rounded to the type of x."""
    values = torch.empty(len(data), x.shape[-1])
    group_decode_twin(data, values, bits)
    return functional.linear(x.float(), values, None if bias is None else bias.float()).to(x.dtype)


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "x", "bias", "out", "arranged")),
        *((name, ctypes.c_long) for name in ("rows", "outputs", "columns")),
        ("kind", ctypes.c_int),
    )
