"""The product of rows and a transposed matrix in a checkpoint's own format. Nothing is rounded but the outcome to the type of
the rows. C and torch sum in different orders. With C what becomes of a row depends on nothing but the row and the matrix."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.kernels.factor import Factor, Meeting
from h2o_flexgen.kernels.panels import ARRANGED, PLAIN_BITS, Arrange, Product, call, products
from h2o_flexgen.kernels.stored_decode import stored_decode_twin
from h2o_flexgen.kernels.stored_matrix import MatrixInC, Stored, number_in_c, order_of


def stored_product(format: Stored, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., inputs), data (rows, bytes of a row) or (1, bytes), bias (outputs,) -> (..., outputs)"""
    out = x.values.new_empty(*x.values.shape[:-1], outputs)
    stored_products(format, x, Meeting.of_all(x, data, bias), out)
    return out


def stored_products(format: Stored, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> None:
    """The same of rows that meet matrices of their own, into out (..., outputs)."""
    products_of_stored("stored_product", format, x, ARRANGED[PLAIN_BITS], meetings, out)


def stored_product_twin(format: Stored, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    values = torch.empty(outputs, x.values.shape[-1], device=data.device)
    stored_decode_twin(format, data, values)
    return functional.linear(x.values.float(), values, None if bias is None else bias.float()).to(x.values.dtype)


def products_of_stored(
    function: str, format: Stored, x: Factor, arrange: Arrange, meetings: Sequence[Meeting], out: Tensor
) -> None:
    """Products by a function of the library, which wants the rows arranged. Where columns of codes have an order of their own,
    rows are brought into it first."""
    outputs, inputs = out.shape[-1], x.values.shape[-1]
    as_they_are = []
    for meeting in meetings:
        order = order_of(format, meeting.data, outputs, inputs)
        if order is None:
            as_they_are.append(meeting)
            continue
        rows = x.values.reshape(-1, inputs)[meeting.first : meeting.first + meeting.rows, order]
        own = out.view(-1, outputs)[meeting.first : meeting.first + meeting.rows]
        _products(function, format, Factor(rows), arrange, [meeting._replace(first=0)], own)
    if as_they_are:
        _products(function, format, x, arrange, as_they_are, out)


def _products(function: str, format: Stored, x: Factor, arrange: Arrange, meetings: Sequence[Meeting], out: Tensor) -> None:
    asked, _kept = products(x, arrange, meetings, out)
    sizes = out.shape[-1], x.values.shape[-1]
    given = [_ProductOfStored(product, MatrixInC.of(format, meeting.data, *sizes)) for product, meeting in zip(asked, meetings)]
    call(function, (_ProductOfStored * len(given))(*given), number_in_c(format))


class _ProductOfStored(ctypes.Structure):
    _fields_ = (("given", Product), ("matrix", MatrixInC))
