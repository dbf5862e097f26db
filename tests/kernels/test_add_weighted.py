"""Weighted rows added to sums: in their order, whatever comes at once, in C as in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_flexgen.kernels.row_functions import add_weighted, add_weighted_twin
from tests.kernels.variants import VARIANTS, used

SUMS, WIDTH, COUNTS = 7, 1037, (3, 7, 1, 5)


def given(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(COUNTS), WIDTH, generator=made).to(dtype)
    to = torch.cat([torch.randperm(SUMS, generator=made)[:count] for count in COUNTS])
    return rows, torch.rand(len(rows), generator=made), to


def sums() -> Tensor:
    """A view into something wider, as mixtures have it."""
    return torch.randn(SUMS, WIDTH + 9, generator=torch.Generator().manual_seed(5))[:, 3 : 3 + WIDTH]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_c_and_torch_give_the_same_bits(variant: str, dtype: torch.dtype) -> None:
    rows, weights, to = given(dtype)
    expected, found = sums(), sums()
    add_weighted_twin(expected, rows, weights, to, COUNTS)
    with used(variant):
        add_weighted(found, rows, weights, to, COUNTS)
    assert torch.equal(found, expected) and not torch.equal(found, sums())


def test_what_comes_at_once_and_threads_change_nothing() -> None:
    rows, weights, to = given(torch.bfloat16)
    whole, parts, before = sums(), sums(), torch.get_num_threads()
    with used(VARIANTS[0]):
        try:
            torch.set_num_threads(3)
            add_weighted(whole, rows, weights, to, COUNTS)
        finally:
            torch.set_num_threads(before)
        for own in (slice(0, 3), slice(3, 11), slice(11, 16)):
            add_weighted(parts, rows[own], weights[own], to[own], [own.stop - own.start])
        nothing = sums()
        add_weighted(nothing, rows[:0], weights[:0], to[:0], [])
    assert torch.equal(whole, parts) and torch.equal(nothing, sums())
