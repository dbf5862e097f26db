"""The product of few rows and a transposed matrix in a checkpoint's own format: dot products, straight from the bytes. Nothing
is rounded but the outcome to the type of the rows. What becomes of a row depends on nothing but the row and the matrix."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from h2o_flexgen.formats.sectioned import Fp4, Int4
from h2o_flexgen.kernels.factor import Factor, Meeting, Runs
from h2o_flexgen.kernels.native import KINDS, native_library, pointer
from h2o_flexgen.kernels.panels import Arranged, JoinedRuns
from h2o_flexgen.kernels.stored_matrix import Stored
from h2o_flexgen.kernels.stored_product import products_of_stored

PIECE = 32  # inputs that C reads at once


def stored_dots(format: Stored, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., inputs), data (rows, bytes of a row) or (1, bytes), bias (outputs,) -> (..., outputs)"""
    out = x.values.new_empty(*x.values.shape[:-1], outputs)
    stored_dot_products(format, x, Meeting.of_all(x, data, bias), out)
    return out


def stored_dot_products(format: Stored, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> None:
    """The same of rows that meet matrices of their own, into out (..., outputs)."""
    arrange = _in_pairs if isinstance(format, (Fp4, Int4)) else _in_order
    products_of_stored("stored_dots", format, x, arrange, meetings, out)


def _arranged(values: Tensor, runs: Runs, in_pairs: bool) -> Arranged:
    """Rows (..., inputs) as float32, filled up. `in_pairs`: of each 32 inputs even ones come first, as their codes do."""
    rows, _, places = JoinedRuns.of(values, runs)
    columns = -(-rows.shape[1] // PIECE) * PIECE
    out = torch.empty(len(rows), columns)
    numbers = map(ctypes.c_int, (KINDS[rows.dtype], in_pairs, torch.get_num_threads()))
    native_library().arrange_dots(pointer(rows), pointer(out), *map(ctypes.c_long, rows.shape), *numbers)
    return Arranged(out, columns, places)


_in_order, _in_pairs = partial(_arranged, in_pairs=False), partial(_arranged, in_pairs=True)
