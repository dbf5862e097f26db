"""Rows as int8: near their values, the same bits in C as in torch, and nothing but NaN where x is not finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_flexgen.kernels.int8_product import Int8Rows, int8_rows, int8_rows_twin
from tests.helpers.all_of import all_of
from tests.kernels.variants import VARIANTS, used


def same(one: Int8Rows, other: Int8Rows) -> bool:
    finite = (torch.equal(a.nan_to_num(nan=-1.0), b.nan_to_num(nan=-1.0)) for a, b in zip(one[1:], other[1:], strict=True))
    return torch.equal(one.codes, other.codes) and all(finite)


def values_of(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Values of all magnitudes: groups that are too small, that are large, and that are all zeros, among others."""
    draw = torch.Generator().manual_seed(rows * columns)
    magnitudes = torch.randint(-38, 38, (rows, columns // 64 + 1, 1), generator=draw).float()
    values = torch.randn(rows, columns // 64 + 1, 64, generator=draw) * 10**magnitudes
    values[:, 0] = torch.randn(rows, 64, generator=draw)
    values[::2, -1] = 0.0
    return values.flatten(1)[:, :columns].to(dtype)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of(
    {
        "dtype": [torch.float32, torch.bfloat16, torch.float16],
        "shape": [(1, 64), (3, 5), (7, 640), (130, 100), (600, 70), (2, 2880)],
    }
)
def test_c_and_torch_agree(variant: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    values = values_of(*shape, dtype)
    with used(variant):
        assert same(int8_rows(values), int8_rows_twin(values))


@pytest.mark.parametrize("variant", VARIANTS)
def test_ties_go_to_even_codes(variant: str) -> None:
    values = torch.tensor([127.0, 0.5, 1.5, -0.5, -2.5, 3.49, -127.0, 126.5])
    with used(variant):
        made = int8_rows(values)
    assert made.codes[0, :8].tolist() == [127, 0, 2, 0, -2, 3, -127, 126]
    assert made.scales.item() == 1 and made.sums.item() == made.codes.sum()


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_are_off_by_half_a_scale_at_most(variant: str) -> None:
    values = torch.randn(20, 192, generator=torch.Generator().manual_seed(1))
    with used(variant):
        made = int8_rows(values.view(4, 5, 192))
    back = made.codes.view(20, 3, 64) * made.scales[..., None]
    assert ((back - values.view(20, 3, 64)).abs() <= 0.5001 * made.scales[..., None]).all()


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": [torch.float32, torch.bfloat16], "wrong": [float("nan"), float("inf"), -float("inf")]})
def test_what_is_not_finite_makes_its_group_nan(variant: str, dtype: torch.dtype, wrong: float) -> None:
    values = torch.ones(3, 130, dtype=dtype)
    values[1, 70], values[2, 129] = wrong, wrong
    with used(variant):
        made = int8_rows(values)
        assert same(made, int8_rows_twin(values))
    assert made.scales.isnan().tolist() == [[False] * 3, [False, True, False], [False, False, True]]
    assert torch.equal(made.sums.isnan(), made.scales.isnan())
