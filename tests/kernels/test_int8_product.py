"""Products with rows of int8: the same bits in every library as in torch, for any number of rows and threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.grouped import TILE, Tiled
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.group_codes import tile_decode_twin
from h2o_flexgen.kernels.int8_product import int8_product, int8_product_twin
from tests.helpers.all_of import all_of
from tests.kernels.tiles import packed, x_of
from tests.kernels.variants import VARIANTS, used

ROWS = (*range(1, 14), *range(17, 33), 64, 257, 600)
SHAPES = [(1, 64), (3, 5), (16, 640), (130, 100), (33, 576), (576, 70)]  # outputs, inputs


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(nan=-1e30), other.nan_to_num(nan=-1e30))


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"bits": [4, 8], ("outputs", "inputs"): SHAPES})
def test_c_and_torch_agree_for_any_number_of_rows(variant: str, bits: int, outputs: int, inputs: int) -> None:
    data, x = packed(outputs, inputs, bits), x_of(max(ROWS), inputs)
    expected = int8_product_twin(Tiled(bits), Factor(x), data, outputs, None)
    with used(variant):
        for rows in ROWS:
            assert same(int8_product(Tiled(bits), Factor(x[:rows]), data, outputs, None), expected[:rows])


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"bits": [4, 8], "dtype": [torch.float32, torch.bfloat16, torch.float16], "rows": [1, 7, 40]})
def test_types_and_bias(variant: str, bits: int, dtype: torch.dtype, rows: int) -> None:
    data, x, bias = packed(50, 200, bits), x_of(rows, 200, dtype).view(rows, 1, 200), x_of(1, 50, dtype)[0]
    expected = int8_product_twin(Tiled(bits), Factor(x), data, 50, bias)
    with used(variant):
        found = int8_product(Tiled(bits), Factor(x), data, 50, bias)
    assert found.shape == (rows, 1, 50) and found.dtype == dtype and same(found, expected)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"bits": [4, 8], "rows": [1, 5, 33]})
def test_threads_change_nothing(variant: str, bits: int, rows: int) -> None:
    data, x, before = packed(130, 320, bits), Factor(x_of(rows, 320)), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with used(variant):
                found.append(int8_product(Tiled(bits), Factor(x.values), data, 130, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"bits": [4, 8]})
def test_extreme_codes_do_not_saturate(variant: str, bits: int) -> None:
    """All codes are the largest and x has the largest magnitude: sums reach their limits."""
    format = Tiled(bits)
    blocks = torch.zeros(1, 2, format.block_bytes, dtype=torch.uint8)
    blocks[..., : TILE * format.as_rows.code_bytes] = 255
    blocks[..., TILE * format.as_rows.code_bytes + 1 :: 2][..., : 2 * TILE] = 0x3F  # scales and minima of 0.5
    for sign in (1.0, -1.0):
        x = torch.full((17, 128), sign)
        with used(variant):
            found = int8_product(format, Factor(x), blocks.flatten(1), 16, None)
        dot = 128 * 127 * (2**bits - 1)
        assert torch.allclose(found, torch.full((17, 16), sign * (dot + 128 * 127) * 0.5 / 127), rtol=1e-6)
        assert torch.equal(found, int8_product_twin(format, Factor(x), blocks.flatten(1), 16, None))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_product_is_near_that_of_the_values(bits: int) -> None:
    data, x = packed(40, 256, bits), x_of(20, 256)
    tile_decode_twin(Tiled(bits), data, values := torch.empty(40, 256))
    found, exact = int8_product_twin(Tiled(bits), Factor(x), data, 40, None), x @ values.T
    assert (found - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"bits": [4, 8], "wrong": [float("nan"), float("inf")], "rows": [3, 20]})
def test_what_is_not_finite_stays_so(variant: str, bits: int, wrong: float, rows: int) -> None:
    data, x = packed(20, 130, bits), x_of(rows, 130)
    x[1, 129] = wrong
    with used(variant):
        found = int8_product(Tiled(bits), Factor(x), data, 20, None)
        assert same(found, int8_product_twin(Tiled(bits), Factor(x), data, 20, None))
    assert not found[1].isfinite().any() and found[0].isfinite().all() and found[2:].isfinite().all()
    block = data.view(len(data), -1, Tiled(bits).block_bytes)[1, 0, -2 * TILE :].view(torch.bfloat16)
    block[2] = wrong  # the minimum of output 18
    with used(variant):
        found = int8_product(Tiled(bits), Factor(x_of(rows, 130)), data, 20, None)
    assert not found[:, 18].isfinite().any() and found[:, :18].isfinite().all() and found[:, 19].isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_rows_are_no_rows(variant: str) -> None:
    with used(variant):
        assert int8_product(Tiled(4), Factor(torch.empty(0, 64)), packed(8, 64, 4), 8, None).shape == (0, 8)
