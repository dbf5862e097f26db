"""Rows times tiles: in C as decoded to float32 in torch, for every number of rows, whatever lies beside them."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from h2o_flexgen.formats.grouped import Tiled
from h2o_flexgen.formats.kernel_table import FUSED
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.products import tile_product, tile_product_twin
from tests.helpers.all_of import all_of
from tests.kernels.tiles import packed, x_of
from tests.kernels.variants import VARIANTS, used

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}  # of the sum of what is added up: one rounding
SHAPES = [(1, 64), (3, 5), (16, 640), (130, 100), (33, 1024), (97, 576)]  # outputs, inputs
ROWS = (*range(1, 15), 24, 25, 40, 200)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"dtype": list(TOLERANCES), "bits": [4, 8], ("outputs", "inputs"): SHAPES})
def test_c_and_torch_agree(variant: str, dtype: torch.dtype, bits: int, outputs: int, inputs: int) -> None:
    data, bias = packed(outputs, inputs, bits), x_of(1, outputs, dtype)[0]
    for rows, added in ((1, bias), (7, None), (100, bias)):
        x = x_of(rows, inputs, dtype).view(rows, 1, inputs)
        with used(variant):
            found = tile_product(Tiled(bits), Factor(x), data, outputs, added)
        expected = tile_product_twin(Tiled(bits), Factor(x), data, outputs, added)
        assert found.shape == expected.shape == (rows, 1, outputs) and found.dtype == expected.dtype == dtype
        summed = tile_product_twin(Tiled(bits), Factor(x.abs().float()), data, outputs, None).abs()
        summed += 4 * x.abs().float().sum(-1, keepdim=True)
        assert ((found.double() - expected.double()).abs() <= TOLERANCES[dtype] * summed).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_a_row_comes_out_the_same_in_any_company_and_library(bits: int, outputs: int, inputs: int) -> None:
    data, x = packed(outputs, inputs, bits), x_of(max(ROWS), inputs)
    found = {}
    for variant in VARIANTS:
        with used(variant):
            found[variant] = tile_product(Tiled(bits), Factor(x), data, outputs, None)
            for rows in ROWS:
                part = tile_product(Tiled(bits), Factor(x[-rows:]), data, outputs, None)
                assert torch.equal(part, found[variant][-rows:]), (variant, rows)
    fused = [found[variant] for variant in VARIANTS if variant in FUSED]
    assert all(torch.equal(one, fused[0]) for one in fused)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"rows": [1, 5, 60]})
def test_threads_change_nothing(variant: str, rows: int) -> None:
    data, before = packed(130, 320, 4), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with used(variant):
                found.append(tile_product(Tiled(4), Factor(x_of(rows, 320)), data, 130, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"bits": [4, 8], "value": [nan, inf, -inf], "rows": [2, 40]})
def test_what_is_no_number_stays_none(variant: str, bits: int, value: float, rows: int) -> None:
    x = x_of(rows, 130)
    x[1, 129] = value
    with used(variant):
        found = tile_product(Tiled(bits), Factor(x), packed(20, 130, bits), 20, None)
    assert not found[1].isfinite().any() and found[0].isfinite().all() and found[2:].isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_rows_come_to_nothing(variant: str) -> None:
    with used(variant):
        assert tile_product(Tiled(4), Factor(torch.empty(0, 64)), packed(20, 64, 4), 20, None).shape == (0, 20)
    assert tile_product_twin(Tiled(4), Factor(torch.empty(0, 64)), packed(20, 64, 4), 20, None).shape == (0, 20)
