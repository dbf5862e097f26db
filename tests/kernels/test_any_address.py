"""Blocks of GGUF files and plain values of 16 bits lie at any address, since whole pages of a file are read to where they
belong. All that reads them gets the same from there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.blocked import LARGE, Blocked
from h2o_flexgen.formats.kernel_table import HALVES, INT8_PRODUCT, PRODUCT, TORCH
from h2o_flexgen.formats.table import BLOCKED
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.operations import decode, packed_product, plain_product, steady_product
from h2o_flexgen.memory.pack import TORCH_DTYPES
from tests.helpers.all_of import all_of
from tests.kernels.stored import random_matrix
from tests.kernels.variants import VARIANTS, used

OUTPUTS, INPUTS = 35, 2 * LARGE
SHIFTS = 1, 2, 34  # bytes
ROWS = 1, 4, 20  # dot products, few rows and many


@pytest.mark.parametrize("variant", [TORCH, *VARIANTS])
@all_of({"format": BLOCKED})
def test_blocks_say_the_same_from_any_address(variant: str, format: Blocked) -> None:
    aligned = random_matrix(format, OUTPUTS, INPUTS)
    with used(variant):
        expected = all_made_of(format, aligned)
        for shift in SHIFTS:
            room = torch.empty(aligned.numel() + shift, dtype=torch.uint8)
            moved = room[shift:].copy_(aligned.flatten()).view(aligned.shape)
            assert all(torch.equal(*pair) for pair in zip(all_made_of(format, moved), expected, strict=True))


def all_made_of(format: Blocked, data: Tensor) -> list[Tensor]:
    """Its values, and the products that there are of them here."""
    values = torch.empty(OUTPUTS, INPUTS)
    decode(format.name, data, values)
    draw = torch.Generator().manual_seed(1)
    factors = [Factor(torch.randn(rows, INPUTS, generator=draw)) for rows in ROWS]
    products = (packed_product(op, format.name, x, data, OUTPUTS, None) for op in (PRODUCT, INT8_PRODUCT) for x in factors)
    return [values, *(product for product in products if product is not None)]


@pytest.mark.parametrize("variant", [TORCH, *VARIANTS])
@all_of({"dtype": HALVES, "rows": (1, 2, 4, 20, 40, 200), "shape": ((35, 512), (704, 256))})
def test_products_with_plain_values_of_16_bits_are_the_same_from_any_address(
    variant: str, dtype: str, rows: int, shape: tuple[int, int]
) -> None:
    draw = torch.Generator().manual_seed(2)
    aligned = torch.randn(shape, generator=draw).to(TORCH_DTYPES[dtype])
    x, bias = (torch.randn(*size, generator=draw).to(TORCH_DTYPES[dtype]) for size in ((rows, shape[1]), (shape[0],)))
    with used(variant), torch.inference_mode():
        for product in (plain_product, steady_product):
            expected = product(Factor(x), aligned, bias)
            for shift in (2, 8, 34):
                room = torch.empty(aligned.nbytes + shift, dtype=torch.uint8)
                moved = room[shift:].view(aligned.dtype).view(shape).copy_(aligned)
                assert torch.equal(product(Factor(x), moved, bias), expected), (product.__name__, shift)
