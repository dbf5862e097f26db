"""Rows times a plain matrix: in C as in torch in float32, for every number of rows, wherever rows and matrix lie."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.formats.kernel_table import FUSED
from h2o_flexgen.formats.table import PlainFormat
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.products import wide_product, wide_product_twin
from tests.helpers.all_of import all_of
from tests.kernels.variants import VARIANTS, used

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}  # of the sum of what is added up: one rounding
SHAPES = [(1, 64), (3, 5), (16, 640), (130, 100), (33, 1024), (97, 577)]  # outputs, inputs
ROWS = (*range(1, 15), 24, 25, 40, 200)


def values(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)).to(dtype)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"of_x": list(TOLERANCES), "of_matrix": list(TOLERANCES), ("outputs", "inputs"): SHAPES})
def test_c_and_torch_agree(variant: str, of_x: torch.dtype, of_matrix: torch.dtype, outputs: int, inputs: int) -> None:
    matrix, bias = values(outputs, inputs, of_matrix), values(1, outputs, of_x)[0]
    for rows, added in ((1, bias), (7, None), (100, bias)):
        x = values(rows, inputs, of_x).view(rows, 1, inputs)
        with used(variant):
            found = wide_product(PlainFormat(), Factor(x), matrix, outputs, added)
        expected = functional.linear(x.double(), matrix.double(), None if added is None else added.double())
        twin = wide_product_twin(PlainFormat(), Factor(x), matrix, outputs, added)
        assert found.shape == twin.shape == (rows, 1, outputs) and found.dtype == twin.dtype == of_x
        summed = functional.linear(x.double().abs(), matrix.double().abs()) + 4
        for one in (found, twin):
            assert ((one.double() - expected).abs() <= TOLERANCES[of_x] * summed).all()


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_a_row_comes_out_the_same_in_any_company_and_library(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    matrix, x = values(outputs, inputs, dtype), values(max(ROWS), inputs)
    found = {}
    for variant in VARIANTS:
        with used(variant):
            found[variant] = wide_product(PlainFormat(), Factor(x), matrix, outputs, None)
            for rows in ROWS:
                part = wide_product(PlainFormat(), Factor(x[-rows:]), matrix, outputs, None)
                assert torch.equal(part, found[variant][-rows:]), (variant, rows)
    fused = [found[variant] for variant in VARIANTS if variant in FUSED]
    assert all(torch.equal(one, fused[0]) for one in fused)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": list(TOLERANCES), "rows": [1, 40]})
def test_the_place_of_the_matrix_changes_nothing(variant: str, dtype: torch.dtype, rows: int) -> None:
    matrix, x = values(50, 300, dtype), Factor(values(rows, 300))
    with used(variant):
        expected = wide_product(PlainFormat(), x, matrix, 50, None)
        for shift in range(1, 40, 3):
            moved = torch.full((50 * 300 + shift,), nan, dtype=dtype)[shift:].view(50, 300).copy_(matrix)
            assert torch.equal(wide_product(PlainFormat(), x, moved, 50, None), expected)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"rows": [1, 5, 60]})
def test_threads_change_nothing(variant: str, rows: int) -> None:
    matrix, before = values(130, 320, torch.bfloat16), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with used(variant):
                found.append(wide_product(PlainFormat(), Factor(values(rows, 320)), matrix, 130, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": list(TOLERANCES), "value": [nan, inf, -inf], "rows": [2, 40]})
def test_what_is_no_number_stays_none(variant: str, dtype: torch.dtype, value: float, rows: int) -> None:
    x, matrix = values(rows, 130, dtype), values(20, 130, dtype)
    x[1, 129] = value
    matrix[3, 5] = value
    with used(variant):
        found = wide_product(PlainFormat(), Factor(x), matrix, 20, None)
    assert not found[1].isfinite().any() and not found[:, 3].isfinite().any()
    assert found[:, [0, 1, 2, *range(4, 20)]][[0, *range(2, rows)]].isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": list(TOLERANCES)})
def test_a_nan_of_any_bits_is_stored_as_one(variant: str, dtype: torch.dtype) -> None:
    bias = torch.tensor([-1, 0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    with used(variant):
        found = wide_product(PlainFormat(), Factor(values(2, 64, dtype)), values(3, 64, dtype), 3, bias)
    assert bias.isnan().all() and found.isnan().all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_rows_come_to_nothing(variant: str) -> None:
    with used(variant):
        assert wide_product(PlainFormat(), Factor(torch.empty(0, 64)), values(20, 64), 20, None).shape == (0, 20)
    assert wide_product_twin(PlainFormat(), Factor(torch.empty(0, 64)), values(20, 64), 20, None).shape == (0, 20)
