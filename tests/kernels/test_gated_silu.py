"""The gate of an mlp in C is torch's up to the last bits, also where values are not finite."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.kernels.gated_silu import gated_silu_twin
from h2o_flexgen.kernels.operations import gated_silu
from tests.all_of import all_of
from tests.kernels.variants import VARIANTS, used, without

LAST_BITS = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}
SPECIAL = (torch.nan, torch.inf, -torch.inf, 0.0, 1e-30, -1e-30, 80.0, -80.0, 88.0, -88.0, 3e4, -3e4)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": LAST_BITS, "shape": [(3, 5), (1, 16), (2, 7, 33), (0, 4), (130, 1030)]})
def test_values_are_gated_as_torch_does_it(variant: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(sum(shape))
    gate, up = (4 * torch.randn(shape, generator=draw) for _ in range(2))
    special = torch.tensor(SPECIAL)[: gate.numel()]
    gate.view(-1)[: len(special)] = special
    gate, up = gate.to(dtype), up.to(dtype)
    expected = gated_silu_twin(gate.clone(), up)
    with used(variant), without("gated_silu_twin"):
        found = gated_silu(gate.clone(), up)
    torch.testing.assert_close(found, expected, rtol=LAST_BITS[dtype], atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_value_has_the_same_bits_in_any_company(variant: str) -> None:
    gate, up = torch.randn(3, 5001), torch.randn(3, 5001)
    with used(variant):
        assert torch.equal(gated_silu(gate.clone(), up)[1:, -3:], gated_silu(gate[1:, -3:].clone(), up[1:, -3:].contiguous()))
