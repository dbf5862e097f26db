"""Products with transposed matrices in a checkpoint's own format: for many rows, for few, and by instructions for pairs.

Rows of int8 have a product of their own with formats of whole numbers. There C and torch give the same bits, and what becomes
of a row depends on nothing but the row and the matrix (stored_int8_product.c).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.formats.blocked import Blocked
from h2o_flexgen.formats.grouped import GROUP
from h2o_flexgen.formats.kernel_sizes import twin_values
from h2o_flexgen.formats.table import Stored
from h2o_flexgen.kernels.copies import take_rows
from h2o_flexgen.kernels.factor import Factor, Meeting, Runs
from h2o_flexgen.kernels.int8_product import FactorRows, Factors, Int8Parts, int8_parts, int8_parts_twin
from h2o_flexgen.kernels.native import KINDS, pointer, run
from h2o_flexgen.kernels.panels import ARRANGED, PLAIN_BITS, Arrange, Arranged, JoinedRuns, Product, Run, call, place, products
from h2o_flexgen.kernels.products import paired_in_lines
from h2o_flexgen.kernels.stored_values import (
    IntegerParts,
    MatrixInC,
    blocked_parts,
    number_in_c,
    order_of,
    sectioned_parts,
    stored_decode_twin,
)

# -- stored product --------------------------------------------------------------------------------------------------------
# The product of rows and a transposed matrix in a checkpoint's own format. Nothing is rounded but the outcome to the type
# of the rows. C and torch sum in different orders. With C what becomes of a row depends on nothing but the row and the
# matrix.


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
    asked, arranged = products(x, arrange, meetings, out)
    sizes = out.shape[-1], x.values.shape[-1]
    matrices = (MatrixInC.of(format, meeting.data, *sizes) for meeting in meetings)
    given = (_ProductOfStored * len(asked))(*(_ProductOfStored(*both) for both in zip(asked, matrices)))
    place(given, x, arranged, out)
    call(function, given, number_in_c(format))


class _ProductOfStored(ctypes.Structure):
    _fields_ = (("given", Product), ("matrix", MatrixInC))


# -- stored dots -----------------------------------------------------------------------------------------------------------
# The product of few rows and a transposed matrix in a checkpoint's own format: dot products, straight from the bytes.
# Nothing is rounded but the outcome to the type of the rows. What becomes of a row depends on nothing but the row and the
# matrix.

PIECE = 32  # inputs that C reads at once


def stored_dots(format: Stored, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., inputs), data (rows, bytes of a row) or (1, bytes), bias (outputs,) -> (..., outputs)"""
    out = x.values.new_empty(*x.values.shape[:-1], outputs)
    stored_dot_products(format, x, Meeting.of_all(x, data, bias), out)
    return out


def stored_dot_products(format: Stored, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> None:
    """The same of rows that meet matrices of their own, into out (..., outputs)."""
    arrange = _in_pairs if format.layout.takes_turns else _in_order
    products_of_stored("stored_dots", format, x, arrange, meetings, out)


def _arranged(values: Tensor, runs: Runs, in_pairs: bool) -> Arranged:
    """Rows (..., inputs) as float32, filled up. `in_pairs`: of each 32 inputs even ones come first, as their codes do."""
    rows, own, places = JoinedRuns.of(values, runs)
    columns = -(-rows.shape[1] // PIECE) * PIECE
    out = torch.empty(len(rows), columns)
    given = _Arranging(pointer(rows), pointer(out), own, len(own), rows.shape[1], columns, KINDS[rows.dtype], in_pairs)
    given.kept = own
    run("arrange_dots", given, torch.get_num_threads())
    return Arranged(out, columns, places)


class _Arranging(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        ("runs", ctypes.POINTER(Run)),
        *((name, ctypes.c_long) for name in ("count", "inputs", "columns")),
        *((name, ctypes.c_int) for name in ("kind", "in_pairs")),
    )
    kept: object  # what it points to


_in_order, _in_pairs = partial(_arranged, in_pairs=False), partial(_arranged, in_pairs=True)


# -- stored pairs ----------------------------------------------------------------------------------------------------------
# The product of rows and a transposed matrix in a checkpoint's own format by instructions for pairs of bfloat16: values are
# rounded to bfloat16 as decoding does. What becomes of a row depends on nothing but the row and the matrix.


def stored_pairs(format: Stored, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., inputs), data (rows, bytes of a row) or (1, bytes), bias (outputs,) -> (..., outputs)"""
    out = x.values.new_empty(*x.values.shape[:-1], outputs)
    stored_pair_products(format, x, Meeting.of_all(x, data, bias), out)
    return out


def stored_pair_products(format: Stored, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> None:
    """The same of rows that meet matrices of their own, into out (..., outputs)."""
    assert x.values.dtype == torch.bfloat16
    products_of_stored("stored_pairs", format, x, paired_in_lines, meetings, out)


def stored_pairs_twin(format: Stored, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    values = torch.empty(outputs, x.values.shape[-1], dtype=torch.bfloat16)
    stored_decode_twin(format, data, values)
    return functional.linear(x.values.float(), values.float(), None if bias is None else bias.float()).to(x.values.dtype)


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
