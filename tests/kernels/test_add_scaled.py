"""Values that are limited, scaled, added to others and multiplied: in C and in torch they have the same bits."""

from __future__ import annotations

from math import inf

import pytest
import torch

from h2o_flexgen.kernels.operations import add_scaled
from h2o_flexgen.kernels.row_functions import add_scaled_twin
from tests.helpers.all_of import all_of
from tests.kernels.variants import VARIANTS, used, without

SPECIAL = (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40, 3e4, -3e4)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of(
    {
        "dtype": [torch.float32, torch.float16, torch.bfloat16],
        "shape": [(3, 1, 64), (2, 2, 3, 5), (1, 2100), (0, 16)],
        "scale": (1.0, 0.7, -3.3),
        "limit": (inf, 1.3),
        "is_added": (True, False),
        "number": (None, -0.3),
    }
)
def test_c_and_torch_give_the_same_bits(
    variant: str, shape: tuple[int, ...], dtype: torch.dtype, scale: float, limit: float, is_added: bool, number: float | None
) -> None:
    draw = torch.Generator().manual_seed(sum(shape))
    x, added = (2 * torch.randn(shape, generator=draw) for _ in range(2))
    special = torch.tensor(SPECIAL)[: x.numel()]
    x.view(-1)[: len(special)] = special
    x, other = x.to(dtype), added.to(dtype) if is_added else None
    by = None if number is None else torch.tensor([number])
    with used(variant), without("add_scaled_twin"):
        found = add_scaled(x.clone(), other, scale, limit, by)
    expected = add_scaled_twin(x.clone(), other, scale, limit, by)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_may_lie_between_others(variant: str) -> None:
    wide, added = torch.randn(4, 1, 90), torch.randn(4, 1, 90)
    expected = wide.clone()
    expected[..., 30:60].mul_(0.3).add_(added[..., 60:])
    with used(variant):
        add_scaled(wide[..., 30:60], added[..., 60:], 0.3)
    assert torch.equal(wide, expected)
