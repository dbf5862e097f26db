"""RMS norm in C is torch's up to the last bits."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.kernels.operations import rms_norm
from h2o_flexgen.kernels.row_functions import rms_norm_twin
from tests.helpers.all_of import all_of
from tests.kernels.variants import VARIANTS, used, without

LAST_BITS = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}  # one unit of a type, or a dozen of fp32


@pytest.mark.parametrize("variant", VARIANTS)
@all_of(
    {
        "dtype": LAST_BITS,
        "shape": [(3, 1, 64), (2, 2, 3, 5), (1, 1100), (0, 16), (4, 1), (150, 576)],
        "weighing": ["usual", "from one", "wide", "none"],
    }
)
def test_rows_are_normalised_as_torch_does_it(variant: str, shape: tuple[int, ...], dtype: torch.dtype, weighing: str) -> None:
    from_one = weighing == "from one"
    draw = torch.Generator().manual_seed(sum(shape))
    x, drawn = torch.randn(shape, generator=draw).to(dtype), torch.randn(shape[-1], generator=draw)
    weight = None if weighing == "none" else drawn if weighing == "wide" else drawn.to(dtype)
    if len(shape) == 4:
        x[0, 0, 0, 1], x[0, 0, 1, 0], x[1, 1, 2] = torch.nan, torch.inf, 0.0
    with used(variant), without("rms_norm_twin"):
        found = rms_norm(x, weight, 1e-6, from_one)
    torch.testing.assert_close(
        found, rms_norm_twin(x, weight, 1e-6, from_one), rtol=LAST_BITS[dtype], atol=1e-6, equal_nan=True
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_has_the_same_bits_in_any_company(variant: str) -> None:
    x, weight = torch.randn(300, 577), torch.randn(577)
    with used(variant):
        assert torch.equal(rms_norm(x, weight, 1e-5)[3:4], rms_norm(x[3:4], weight, 1e-5))


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_that_lie_apart_are_normalised_as_well(variant: str) -> None:
    x = torch.randn(6, 40).t()
    with used(variant):
        assert torch.equal(rms_norm(x, torch.ones(6), 1e-5), rms_norm(x.contiguous(), torch.ones(6), 1e-5))
