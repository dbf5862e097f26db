"""The product of rows and a transposed matrix in a checkpoint's own format by instructions for pairs of bfloat16: values are
rounded to bfloat16 as decoding does. What becomes of a row depends on nothing but the row and the matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.kernels.factor import Factor, Meeting
from h2o_flexgen.kernels.pair_product import paired
from h2o_flexgen.kernels.stored_decode import stored_decode_twin
from h2o_flexgen.kernels.stored_matrix import Stored
from h2o_flexgen.kernels.stored_product import products_of_stored


def stored_pairs(format: Stored, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., inputs), data (rows, bytes of a row) or (1, bytes), bias (outputs,) -> (..., outputs)"""
    out = x.values.new_empty(*x.values.shape[:-1], outputs)
    stored_pair_products(format, x, Meeting.of_all(x, data, bias), out)
    return out


def stored_pair_products(format: Stored, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> None:
    """The same of rows that meet matrices of their own, into out (..., outputs)."""
    assert x.values.dtype == torch.bfloat16
    products_of_stored("stored_pairs", format, x, paired, meetings, out)


def stored_pairs_twin(format: Stored, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    values = torch.empty(outputs, x.values.shape[-1], dtype=torch.bfloat16)
    stored_decode_twin(format, data, values)
    return functional.linear(x.values.float(), values.float(), None if bias is None else bias.float()).to(x.values.dtype)
