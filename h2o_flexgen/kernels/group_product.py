"""The product of few rows and a transposed matrix of a group codec, without decoding it. With many rows it is faster to decode
the matrix first, so table.py chooses this kernel for few."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.kernels.group_decode import group_decode_twin
from h2o_flexgen.kernels.native import KINDS, native_library, pointer
from h2o_flexgen.quant.grouped import GROUP, Grouped, groups_of


def group_product(codec: Grouped, x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., columns), data (outputs, bytes of a row), bias (outputs,) -> (..., outputs)"""
    columns, outputs = x.shape[-1], len(data)
    rows = x.numel() // columns
    native, groups, bits = native_library(), groups_of(columns), codec.bits
    wide = torch.zeros(rows, groups * GROUP)
    wide[:, :columns] = x.reshape(rows, columns)
    arranged = torch.empty(rows, native.group_product_room(ctypes.c_long(groups * GROUP), ctypes.c_int(bits)))
    added = None if bias is None else bias.float().contiguous()
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype)
    assert data.shape[1] == codec.nbytes((columns,), x.itemsize) and (added is None or added.shape == (outputs,))
    places = (data, wide, added, out, arranged)
    sizes = (rows, outputs, groups * GROUP)
    given = _Product(*(None if place is None else pointer(place) for place in places), *sizes, KINDS[x.dtype])
    native.group_product(ctypes.byref(given), ctypes.c_int(bits), ctypes.c_int(torch.get_num_threads()))
    return out


def group_product_twin(codec: Grouped, x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies with the decoded values before they are rounded to the type of x."""
    values = torch.empty(len(data), x.shape[-1])
    group_decode_twin(codec, data, values)
    return functional.linear(x.float(), values, None if bias is None else bias.float()).to(x.dtype)


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "x", "bias", "out", "arranged")),
        *((name, ctypes.c_long) for name in ("rows", "outputs", "columns")),
        ("kind", ctypes.c_int),
    )
