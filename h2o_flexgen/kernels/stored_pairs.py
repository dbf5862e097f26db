"""The product of rows and a transposed matrix in a checkpoint's own form by instructions for pairs of bfloat16: values are
rounded to bfloat16 as decoding does. What becomes of a row depends on nothing but the row and the matrix."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.pair_product import paired
from h2o_flexgen.kernels.stored_decode import stored_decode_twin
from h2o_flexgen.kernels.stored_matrix import Stored
from h2o_flexgen.kernels.stored_product import product_of_stored


def stored_pairs(codec: Stored, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., inputs), data (rows, bytes of a row) or (1, bytes), bias (outputs,) -> (..., outputs)"""
    assert x.values.dtype == torch.bfloat16
    return product_of_stored("stored_pairs", codec, x, paired, data, outputs, bias)


def stored_pairs_twin(codec: Stored, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    values = torch.empty(outputs, x.values.shape[-1], dtype=torch.bfloat16)
    stored_decode_twin(codec, data, values)
    return functional.linear(x.values.float(), values.float(), None if bias is None else bias.float()).to(x.values.dtype)
