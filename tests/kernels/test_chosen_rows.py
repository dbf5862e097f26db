"""Rows that are chosen by their numbers are the same in C and in torch, along any axis and of any type."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.kernels.copies import put_rows_twin, take_rows_twin
from h2o_flexgen.kernels.operations import put_rows, take_rows
from tests.helpers.all_of import all_of
from tests.kernels.variants import VARIANTS, used, without

SHAPE = 3, 2, 9, 4, 5
TYPES = torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": TYPES, "axis": range(len(SHAPE)), "count": (0, 1, 7)})
def test_rows_are_taken_and_put_as_torch_does_it(variant: str, dtype: torch.dtype, axis: int, count: int) -> None:
    draw = torch.Generator().manual_seed(axis)
    values = torch.randint(0, 99, SHAPE, generator=draw).to(dtype)
    numbers = torch.randint(0, SHAPE[axis], (count,), generator=draw)
    single = torch.randperm(SHAPE[axis], generator=draw)[:count]
    expected, found = values.clone(), values.clone()
    with used(variant), without("take_rows_twin"), without("put_rows_twin"):
        taken = take_rows(values, numbers, axis)
        put_rows(found, single, axis, rows := take_rows(values, single, axis) + 1)
    put_rows_twin(expected, single, axis, rows)
    assert torch.equal(taken, take_rows_twin(values, numbers, axis, 0)) and torch.equal(found, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_a_table_are_counted_from_the_first(variant: str) -> None:
    table, numbers = torch.randn(9, 5), torch.tensor([[4, 0], [6, 2]])
    with used(variant):
        assert torch.equal(take_rows(table, numbers.int(), first=2), table[numbers + 2])
        assert torch.equal(take_rows(table, numbers, first=2), table[numbers + 2])


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": [torch.float32, torch.bfloat16, torch.float16]})
def test_a_number_that_no_row_has_gives_no_value(variant: str, dtype: torch.dtype) -> None:
    """Nothing is read beside the table."""
    table = torch.zeros(3, 5, dtype=dtype)
    with used(variant):
        found = take_rows(table, torch.tensor([1, 3, -1]))
    assert not found[0].any() and found[1:].isnan().all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_may_lie_between_others(variant: str) -> None:
    wide, heads = torch.randn(3, 2, 4, 30), torch.tensor([1, 0])
    with used(variant):
        for values in (wide[..., 10:20], wide[:, :, 1:], wide.transpose(1, 2), wide.transpose(2, 3)):
            assert torch.equal(take_rows(values, heads, axis=2), values.index_select(2, heads))
        target = wide.clone()
        put_rows(target[..., 10:20], heads, 2, rows := torch.randn(3, 2, 2, 10))
    expected = wide.clone()
    expected[..., 10:20][:, :, heads] = rows
    assert torch.equal(target, expected)
