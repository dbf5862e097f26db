"""The product of rows of int8 and a transposed matrix in a checkpoint's own format, if that is one of whole numbers. C and
torch give the same bits, and what becomes of a row depends on nothing but the row and the matrix (stored_int8_product.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.formats.blocked import Blocked
from h2o_flexgen.formats.grouped import GROUP
from h2o_flexgen.formats.kernel_sizes import twin_values
from h2o_flexgen.formats.table import Stored
from h2o_flexgen.kernels.chosen_rows import take_rows
from h2o_flexgen.kernels.factor import Factor, Meeting
from h2o_flexgen.kernels.int8_product import FactorRows, Factors, Int8Parts, int8_parts, int8_parts_twin
from h2o_flexgen.kernels.panels import call
from h2o_flexgen.kernels.stored_values import IntegerParts, MatrixInC, blocked_parts, number_in_c, order_of, sectioned_parts


def stored_int8_product(format: Stored, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., inputs), data (rows, bytes of a row) or (1, bytes), bias (outputs,) -> (..., outputs)"""
    out = x.values.new_empty(*x.values.shape[:-1], outputs)
    stored_int8_products(format, x, Meeting.of_all(x, data, bias), out)
    return out


def stored_int8_products(format: Stored, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> None:
    """The same of rows that meet matrices of their own, into out (..., outputs)."""
    sizes, parts = (out.shape[-1], x.values.shape[-1]), int8_parts(part_of(format))
    asked, kept, of_all = list[_StoredInt8Product](), list[FactorRows](), None
    for first, rows, data, bias in meetings:
        order = order_of(format, data, *sizes)
        if order is None:
            given = of_all = of_all or _told(x.arranged(parts, x.counted), out)
        else:  # rows in an order of their own are made for this matrix alone
            own = slice(first, first + rows)
            rows_in_order = take_rows(x.values.reshape(-1, sizes[1])[own], order, axis=1, first=0)
            given = _told(parts(rows_in_order), out.view(-1, sizes[0])[own])
            kept.append(given)
            first = 0
        asked.append(
            _StoredInt8Product(given.factors(first, rows, bias), given.sums(first), MatrixInC.of(format, data, *sizes))
        )
    told = (_StoredInt8Product * len(asked))(*asked)
    if of_all is not None:
        of_all.place(told, x, _StoredInt8Product.wholes.offset)
    call("stored_int8_product", told, number_in_c(format))


def _told(made: Int8Parts, out: Tensor) -> FactorRows:
    return FactorRows(made.rows, made.wholes, out)


def part_of(format: Stored) -> int:
    """The inputs of a part, which has one scale for its dot product: those that share a scale, of a group of x at most."""
    return min(GROUP, format.layout.sharing_inputs)


# -- the twin ----------------------------------------------------------------------------------------------------------------


def stored_int8_product_twin(format: Stored, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    inputs, part = x.values.shape[-1], part_of(format)
    order = order_of(format, data, outputs, inputs)
    made = x.made(int8_parts_twin(part)) if order is None else int8_parts_twin(part)(x.values[..., order])
    if isinstance(format, Blocked):
        step = max(1, twin_values(data.device.type) // max(inputs, x.rows))
        pieces = (blocked_parts(format, data[start : start + step]) for start in range(0, outputs, step))
        out = torch.cat([_product_of(made, piece, part, False) for piece in pieces], dim=1)
    else:
        out = _product_of(made, sectioned_parts(format, data, outputs, inputs), part, format.layout.has_zeros)
    added = out if bias is None else out + bias.float()
    return added.to(x.values.dtype).reshape(*x.values.shape[:-1], outputs)


def _product_of(x: Int8Parts, matrix: IntegerParts, part: int, has_zeros: bool) -> Tensor:
    """The sums of some outputs (rows, outputs), group behind group. Dot products are whole numbers below 2 ** 24, which float32
    holds, in any order of their sums."""
    codes, scales, minima = _by_part(matrix, part, has_zeros)
    sums = torch.zeros(len(x.rows.codes), len(codes), device=codes.device)
    for group in range(-(-codes.shape[1] // GROUP)):
        value = torch.zeros_like(sums)
        for at in range(group * GROUP // part, min((group + 1) * GROUP, codes.shape[1]) // part):
            own = slice(at * part, (at + 1) * part)
            product = functional.linear(x.rows.codes[:, own].float(), codes[:, own]) * scales[:, at]
            value += product if minima is None else product + x.wholes[:, at : at + 1].float() * minima[:, at]
        sums += value * x.rows.scales[:, group : group + 1]
    return sums


def _by_part(matrix: IntegerParts, part: int, has_zeros: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes (outputs, inputs) from their zero on, scales and minima (outputs, parts) in float32. Zeros of single groups become
    minima, which are exact: also those of one output with one group."""
    again = matrix.codes.shape[1] // matrix.scales.shape[1] // part  # parts that share a scale
    codes, scales, minima = matrix.codes.float(), matrix.scales, matrix.minima
    if has_zeros:
        minima = -(matrix.zeros * scales)
    else:
        codes = codes.sub_(matrix.zeros)
    shared = (None if one is None else one.repeat_interleave(again, dim=1) for one in (scales, minima))
    wide_scales, wide_minima = shared
    assert wide_scales is not None
    return codes, wide_scales, wide_minima


class _StoredInt8Product(ctypes.Structure):
    _fields_ = (("of", Factors), ("wholes", ctypes.c_void_p), ("matrix", MatrixInC))
