"""Layer norm in C is torch's up to the last bits."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.kernels.operations import layer_norm
from h2o_flexgen.kernels.row_functions import layer_norm_twin
from tests.helpers.all_of import all_of
from tests.kernels.variants import VARIANTS, used, without

LAST_BITS = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@pytest.mark.parametrize("variant", VARIANTS)
@all_of(
    {
        "dtype": LAST_BITS,
        "shape": [(3, 1, 64), (2, 2, 3, 5), (1, 1100), (0, 16), (150, 577)],
        "has_weight": (True, False),
        "has_bias": (True, False),
    }
)
def test_rows_are_normalised_as_torch_does_it(
    variant: str, shape: tuple[int, ...], dtype: torch.dtype, has_weight: bool, has_bias: bool
) -> None:
    draw = torch.Generator().manual_seed(sum(shape))
    x = (torch.randn(shape, generator=draw) * 3 + 5).to(dtype)
    weight, bias = (torch.randn(shape[-1], generator=draw).to(dtype) if there else None for there in (has_weight, has_bias))
    if len(shape) == 4:
        x[0, 0, 0, 1], x[0, 0, 1, 0], x[1, 1, 2] = torch.nan, torch.inf, 0.0
    with used(variant), without("layer_norm_twin"):
        found = layer_norm(x, weight, bias, 1e-5)
    expected = layer_norm_twin(x, weight, bias, 1e-5)
    torch.testing.assert_close(found, expected, rtol=LAST_BITS[dtype], atol=LAST_BITS[dtype], equal_nan=True)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": LAST_BITS, "has_weight": (True, False), "has_bias": (True, False)})
def test_heads_may_have_weights_of_their_own(variant: str, dtype: torch.dtype, has_weight: bool, has_bias: bool) -> None:
    x = (torch.randn(2, 3, 4, 20) * 3 + 5).to(dtype)
    weight, bias = (torch.randn(4, 20).to(dtype) if there else None for there in (has_weight, has_bias))
    with used(variant), without("layer_norm_twin"):
        found = layer_norm(x, weight, bias, 1e-5)
    for head in range(4):
        own = (None if each is None else each[head] for each in (weight, bias))
        expected = layer_norm_twin(x[:, :, head], *own, 1e-5)
        torch.testing.assert_close(found[:, :, head], expected, rtol=LAST_BITS[dtype], atol=LAST_BITS[dtype])
    torch.testing.assert_close(found, layer_norm_twin(x, weight, bias, 1e-5), rtol=LAST_BITS[dtype], atol=LAST_BITS[dtype])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_has_the_same_bits_in_any_company(variant: str) -> None:
    x, weight, bias = torch.randn(300, 577), torch.randn(577), torch.randn(577)
    with used(variant):
        assert torch.equal(layer_norm(x, weight, bias, 1e-5)[3:4], layer_norm(x[3:4], weight, bias, 1e-5))


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_that_lie_apart_are_normalised_as_well(variant: str) -> None:
    for x in (torch.randn(6, 40).t(), torch.randn(5, 1, 80)[..., 40:]):
        with used(variant):
            assert torch.equal(layer_norm(x, None, None, 1e-5), layer_norm(x.contiguous(), None, None, 1e-5))
