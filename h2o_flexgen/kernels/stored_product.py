"""The product of rows and a transposed matrix in a checkpoint's own form. Nothing is rounded but the outcome to the type of the
rows. C and torch sum in different orders. With C what becomes of a row depends on nothing but the row and the matrix."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.native import native_library
from h2o_flexgen.kernels.panels import ARRANGED, PLAIN_BITS, Arranged, Product, asked
from h2o_flexgen.kernels.stored_decode import stored_decode_twin
from h2o_flexgen.kernels.stored_matrix import Stored, StoredMatrix, form_of, order_of


def stored_product(codec: Stored, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., inputs), data (rows, bytes of a row) or (1, bytes), bias (outputs,) -> (..., outputs)"""
    return product_of_stored("stored_product", codec, x, ARRANGED[PLAIN_BITS], data, outputs, bias)


def stored_product_twin(codec: Stored, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    values = torch.empty(outputs, x.values.shape[-1], device=data.device)
    stored_decode_twin(codec, data, values)
    return functional.linear(x.values.float(), values, None if bias is None else bias.float()).to(x.values.dtype)


def product_of_stored(
    function: str,
    codec: Stored,
    x: Factor,
    arrange: Callable[[Tensor], Arranged],
    data: Tensor,
    outputs: int,
    bias: Tensor | None,
) -> Tensor:
    """A product by a function of the library, which wants the rows arranged. Where columns of codes have an order of their own,
    rows are brought into it first."""
    inputs = x.values.shape[-1]
    order = order_of(codec, data, outputs, inputs)
    rows = x if order is None else Factor(x.values[..., order])
    arranged = rows.made(arrange)
    of_rows, out, _kept = asked(rows, arranged, outputs, bias)
    given = _ProductOfStored(of_rows, StoredMatrix.of(codec, data, outputs, inputs))
    numbers = (ctypes.c_int(form_of(codec)), ctypes.c_int(torch.get_num_threads()))
    getattr(native_library(), function)(ctypes.byref(given), *numbers)
    return out


class _ProductOfStored(ctypes.Structure):
    _fields_ = (("given", Product), ("matrix", StoredMatrix))
