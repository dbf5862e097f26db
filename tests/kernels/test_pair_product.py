"""Rows times pairs of bfloat16: as in torch in float32, for every number of rows, where a processor has instructions for it."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.grouped import TILE, Tiled
from h2o_flexgen.formats.table import PlainFormat
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.group_codes import tile_encode_twin
from h2o_flexgen.kernels.products import pair_product, pair_product_twin
from tests.kernels.variants import WITH_PAIRS, used

FORMATS: list[PlainFormat | Tiled] = [PlainFormat(), Tiled(4), Tiled(8)]
SHAPES = [(1, 64), (3, 5), (16, 640), (130, 100), (33, 1024), (97, 577)]  # outputs, inputs
ROWS = (*range(1, 18), 24, 25, 31, 32, 33, 40, 800)
TOLERANCE = 4e-3  # of the sum of what is added up: one rounding

pytestmark = pytest.mark.parametrize("variant", WITH_PAIRS)


def values(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)).bfloat16()


def stored(format: PlainFormat | Tiled, outputs: int, inputs: int) -> Tensor:
    matrix = values(outputs, inputs)
    if isinstance(format, PlainFormat):
        return matrix
    data = torch.empty(-(-outputs // TILE), format.tile_bytes(inputs), dtype=torch.uint8)
    tile_encode_twin(format, matrix, data)
    return data


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_c_and_torch_agree_for_any_number_of_rows(variant: str, format: PlainFormat | Tiled, outputs: int, inputs: int) -> None:
    data, x, bias = stored(format, outputs, inputs), values(max(ROWS), inputs), values(1, outputs)[0]
    with used(variant):
        found = pair_product(format, Factor(x), data, outputs, bias)
        for rows in ROWS:
            assert torch.equal(pair_product(format, Factor(x[-rows:]), data, outputs, bias), found[-rows:]), rows
    expected = pair_product_twin(format, Factor(x), data, outputs, bias)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    summed = (
        pair_product_twin(format, Factor(x.abs()), data, outputs, None).double().abs() + 4 * x.double().abs().sum(-1)[:, None]
    )
    assert ((found.double() - expected.double()).abs() <= TOLERANCE * summed).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_what_is_no_number_stays_none(variant: str, format: PlainFormat | Tiled, value: float) -> None:
    x = values(30, 130)
    x[1, 129] = value
    with used(variant):
        found = pair_product(format, Factor(x.view(30, 1, 130)), stored(format, 20, 130), 20, None).view(30, 20)
    assert not found[1].isfinite().any() and found[[0, *range(2, 30)]].isfinite().all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [20, 40])
def test_threads_change_nothing(variant: str, format: PlainFormat | Tiled, rows: int) -> None:
    data, before = stored(format, 130, 320), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with used(variant):
                found.append(pair_product(format, Factor(values(rows, 320)), data, 130, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
