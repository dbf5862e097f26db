"""The activation of an mlp in C, and its product with a second factor, are torch's up to the last bits, also where values are
not finite."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from h2o_flexgen.kernels.operations import (
    gated_gelu,
    gated_gelu_tanh,
    gated_identity,
    gated_quick_gelu,
    gated_relu,
    gated_relu_squared,
    gated_sigmoid,
    gated_silu,
    xielu,
)
from h2o_flexgen.kernels.row_functions import (
    clamped_silu,
    clamped_silu_twin,
    gated_gelu_tanh_twin,
    gated_gelu_twin,
    gated_identity_twin,
    gated_quick_gelu_twin,
    gated_relu_squared_twin,
    gated_relu_twin,
    gated_sigmoid_twin,
    gated_silu_twin,
    xielu_twin,
)
from tests.helpers.all_of import all_of
from tests.kernels.variants import VARIANTS, used, without

Gating = Callable[[Tensor, Tensor | None], Tensor]

LAST_BITS = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}
SPECIAL = (torch.nan, torch.inf, -torch.inf, 0.0, 1e-30, -1e-30, 80.0, -80.0, 88.0, -88.0, 3e4, -3e4)
GATINGS = {
    gated_silu: gated_silu_twin,
    gated_gelu_tanh: gated_gelu_tanh_twin,
    gated_gelu: gated_gelu_twin,
    gated_quick_gelu: gated_quick_gelu_twin,
    gated_relu: gated_relu_twin,
    gated_relu_squared: gated_relu_squared_twin,
    gated_sigmoid: gated_sigmoid_twin,
    gated_identity: gated_identity_twin,
}


@pytest.mark.parametrize("variant", VARIANTS)
@all_of(
    {
        "gating": GATINGS,
        "has_up": (True, False),
        "dtype": LAST_BITS,
        "shape": [(3, 5), (1, 16), (2, 7, 33), (0, 4), (130, 1030)],
    }
)
def test_values_are_gated_as_torch_does_it(
    variant: str, gating: Gating, has_up: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(sum(shape))
    gate, up = (4 * torch.randn(shape, generator=draw) for _ in range(2))
    special = torch.tensor(SPECIAL)[: gate.numel()]
    gate.view(-1)[: len(special)] = special
    gate, other, twin = gate.to(dtype), up.to(dtype) if has_up else None, GATINGS[gating]
    wide = twin(gate.double(), None if other is None else other.double())  # torch's gelu of infinity is NaN in float32
    with used(variant), without(twin.__name__):
        found = gating(gate.clone(), other)
    torch.testing.assert_close(found, wide.to(dtype), rtol=LAST_BITS[dtype], atol=5e-6, equal_nan=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("gating", GATINGS)
def test_a_value_has_the_same_bits_in_any_company(variant: str, gating: Gating) -> None:
    gate, up = torch.randn(3, 5001), torch.randn(3, 5001)
    with used(variant):
        assert torch.equal(gating(gate.clone(), up)[1:, -3:], gating(gate[1:, -3:].clone(), up[1:, -3:].contiguous()))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", LAST_BITS)
@pytest.mark.parametrize("rising", [0.6, 25.0])
def test_xielu_is_torchs_with_numbers_that_are_learned(variant: str, dtype: torch.dtype, rising: float) -> None:
    x = 3 * torch.randn(7, 333, generator=torch.Generator().manual_seed(3))
    x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    x[3], x[4] = torch.linspace(-1.5, 0.0, 333), torch.linspace(-1e-5, 0.0, 333)
    x, learned = x.to(dtype), [torch.tensor([number]) for number in (rising, -0.4, 0.5, -1e-6)]
    expected = xielu_twin(x.double(), *(each.double() for each in learned))
    with used(variant), without("xielu_twin"):
        found = xielu(x.clone(), *learned)
    torch.testing.assert_close(found, expected.to(dtype), rtol=LAST_BITS[dtype], atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", LAST_BITS)
def test_a_clamped_silu_limits_and_rounds_as_torch_does(variant: str, dtype: torch.dtype) -> None:
    gate, up = (6 * torch.randn(7, 333, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    gate.view(-1)[: len(SPECIAL)] = up.view(-1)[5 : 5 + len(SPECIAL)] = torch.tensor(SPECIAL)
    gate, up = gate.to(dtype), up.to(dtype)
    expected = clamped_silu_twin(gate.clone(), up.clone(), 7.0, 1.702)
    with used(variant):
        found = clamped_silu(gate.clone(), up, 7.0, 1.702)
    torch.testing.assert_close(found, expected, rtol=LAST_BITS[dtype], atol=5e-6, equal_nan=True)
