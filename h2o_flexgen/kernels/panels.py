"""What exact products share whose kernels work panel by panel: rows arranged for them, and their arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.native import KINDS, native_library, pointer
from h2o_flexgen.quant.grouped import GROUP, groups_of

PLAIN_BITS = 0  # of a matrix without codes


class Arranged(NamedTuple):
    values: Tensor
    columns: int  # of a row: inputs, or pairs of them, filled up


class Matrix(NamedTuple):
    data: Tensor
    outputs: int
    told: int  # what the library's function is told of it: bits of its codes, or the kind of plain values


def panel_product(function: str, x: Factor, arranged: Arranged, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """x (..., inputs), arranged, times a transposed matrix, by a function of the library -> (..., outputs)"""
    given, out, _kept = asked(x, arranged, matrix.outputs, bias)
    given.data = pointer(matrix.data)
    numbers = (ctypes.c_int(matrix.told), ctypes.c_int(torch.get_num_threads()))
    getattr(native_library(), function)(ctypes.byref(given), *numbers)
    return out


def asked(x: Factor, arranged: Arranged, outputs: int, bias: Tensor | None) -> tuple[Product, Tensor, Tensor | None]:
    """What C is told of a product but for its matrix, its outcome (..., outputs), and what must be kept until it is there."""
    out = torch.empty(*x.values.shape[:-1], outputs, dtype=x.values.dtype)
    added = None if bias is None else bias.float().contiguous()
    assert added is None or added.shape == (outputs,)
    places = (None if place is None else pointer(place) for place in (arranged.values, added, out))
    return Product(None, *places, x.rows, outputs, x.values.shape[-1], arranged.columns, KINDS[out.dtype]), out, added


def _arranged(values: Tensor, bits: int) -> Arranged:
    """Rows (..., inputs) as float32, block by block, and for codes the sums of their groups behind them: panels.c says how."""
    inputs, native = values.shape[-1], native_library()
    rows = values.reshape(-1, inputs).contiguous()
    columns = groups_of(inputs) * GROUP
    out = torch.empty(len(rows), columns + (columns // GROUP if bits else 0))
    sizes = (ctypes.c_long(len(rows)), ctypes.c_long(inputs), ctypes.c_int(KINDS[rows.dtype]), ctypes.c_int(bits))
    native.arrange_rows(pointer(rows), pointer(out), *sizes, ctypes.c_int(torch.get_num_threads()))
    return Arranged(out, columns)


ARRANGED: Mapping[int, Callable[[Tensor], Arranged]] = {bits: partial(_arranged, bits=bits) for bits in (PLAIN_BITS, 4, 8)}


class Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "x", "bias", "out")),
        *((name, ctypes.c_long) for name in ("rows", "outputs", "inputs", "columns")),
        ("kind", ctypes.c_int),
    )
