"""Dot products of few rows with a plain matrix are torch's up to the last bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.formats.kernel_table import ROWS_OF_PLAIN_DOTS
from h2o_flexgen.formats.table import PlainFormat
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.products import plain_dots
from tests.helpers.all_of import all_of
from tests.kernels.variants import VARIANTS, used

ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def product(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return plain_dots(PlainFormat("plain"), Factor(x), matrix, len(matrix), bias)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of(
    {
        "dtype": ROUNDING,
        "rows": range(ROWS_OF_PLAIN_DOTS + 4),
        "shape": [(37, 130), (1, 1), (64, 2048), (18, 7)],
        "has_bias": (True, False),
    }
)
def test_products_are_those_of_torch(
    variant: str, rows: int, shape: tuple[int, int], dtype: torch.dtype, has_bias: bool
) -> None:
    draw = torch.Generator().manual_seed(rows)
    x, matrix, bias = (torch.randn(*size, generator=draw).to(dtype) for size in ((rows, shape[1]), shape, shape[:1]))
    added = bias if has_bias else None
    wide = functional.linear(x.double(), matrix.double(), None if added is None else added.double())
    with used(variant):
        found = product(x, matrix, added)
        alone = [product(row[None], matrix, added) for row in x]
    least = ROUNDING[dtype] if dtype != torch.float32 else 2e-6 * shape[1] ** 0.5
    torch.testing.assert_close(found, wide.to(dtype), rtol=2 * ROUNDING[dtype], atol=least)
    assert torch.equal(found, torch.cat(alone) if alone else found), "a row's outcome depends on the rows beside it"
