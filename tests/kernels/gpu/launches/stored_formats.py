"""Launches of decoding and of products with forms of checkpoints, with the sizes of a layer of LLaMA-7B."""

from __future__ import annotations

from functools import partial

import torch

from h2o_flexgen.formats.table import FORMATS
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.gpu.stored_product import stored_product
from h2o_flexgen.kernels.gpu.stored_values import stored_decode
from tests.kernels.gpu.launch import Launch

SHAPE = OUTPUTS, INPUTS = 11008, 4096


def data_of(format: str) -> torch.Tensor:
    rows = OUTPUTS if FORMATS[format].rows_together == 1 else 1
    return torch.empty(rows, FORMATS[format].nbytes(SHAPE, 2) // rows, dtype=torch.uint8, device="meta")


def decoded(format: str, dtype: torch.dtype) -> None:
    stored_decode(FORMATS[format], data_of(format), torch.empty(SHAPE, dtype=dtype, device="meta"))


def multiplied(format: str, dtype: torch.dtype, rows: int) -> None:
    x = torch.empty(rows, INPUTS, dtype=dtype, device="meta")
    stored_product(FORMATS[format], Factor(x), data_of(format), OUTPUTS, None)


READ = {"decode_kernel": 4, "product_kernel": 8}  # values of x are read by fours at least
BY_FOURS = {"product_kernel": 4}
LAUNCHES = (
    Launch("q4_K decoded", partial(decoded, "q4_K", torch.bfloat16), 64, READ, {"decode_kernel": 2}),
    Launch("int4, one row", partial(multiplied, "int4-128-float16-zeros", torch.float16, 1), 96, READ, is_rare=True),
    Launch("fp8, one row", partial(multiplied, "fp8-128x128-float32", torch.bfloat16, 1), 96, READ, BY_FOURS, is_rare=True),
    Launch("iq4_nl, one row", partial(multiplied, "iq4_nl", torch.bfloat16, 1), 96, READ, {"product_kernel": 2}, is_rare=True),
    Launch("iq4_xs decoded", partial(decoded, "iq4_xs", torch.bfloat16), 64, READ, {"decode_kernel": 4}, is_rare=True),
    Launch("q6_K, four rows", partial(multiplied, "q6_K", torch.float32, 4), 232, READ),
)
