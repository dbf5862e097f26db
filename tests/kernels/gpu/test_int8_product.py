"""Products with rows of int8 on a GPU: rows, and outcomes of any number of them, have the bits that torch gives."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from h2o_flexgen.formats.grouped import TILE, Tiled
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.gpu.int8_product import int8_product, int8_rows, product_of
from h2o_flexgen.kernels.int8_product import int8_product_twin, int8_rows_twin
from tests.helpers.samples import first_of
from tests.kernels.test_int8_product import packed, same, x_of

SHAPES = [(1, 64), (3, 5), (130, 100), (33, 576)]  # outputs, inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 64, 1100])
def test_rows_have_the_bits_of_torch(gpu: torch.device, dtype: torch.dtype, columns: int) -> None:
    x = x_of(8, columns) * torch.logspace(-36, 4, 8)[:, None]
    x[2, 0], x[3, columns // 2], x[4], x[5, -1] = nan, inf, 0.0, -inf
    x = x.to(gpu, dtype)
    assert all(same(one.float(), other.float()) for one, other in zip(int8_rows(x), int8_rows_twin(x)))


@pytest.mark.parametrize("bits", first_of([4, 8], 1))
@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_triton_and_torch_agree_for_any_number_of_rows(gpu: torch.device, bits: int, outputs: int, inputs: int) -> None:
    data, x = packed(outputs, inputs, bits).to(gpu), x_of(40, inputs).to(gpu)
    expected = int8_product_twin(Tiled(bits), Factor(x), data, outputs, None)
    for rows in (1, 3, 17, 40):
        assert same(int8_product(Tiled(bits), Factor(x[:rows]), data, outputs, None), expected[:rows])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_bias_and_what_is_not_finite(gpu: torch.device, bits: int, dtype: torch.dtype) -> None:
    data, bias = packed(50, 200, bits).to(gpu), x_of(1, 50, dtype)[0].to(gpu)
    x = x_of(7, 200, dtype).view(7, 1, 200).to(gpu)
    x[1, 0, 199], x[2, 0, 3] = nan, inf
    data.view(len(data), -1, Tiled(bits).block_bytes)[1, 0, -2 * TILE :].view(torch.bfloat16)[2] = inf  # a minimum
    found = int8_product(Tiled(bits), Factor(x), data, 50, bias)
    assert found.shape == (7, 1, 50) and found.dtype == dtype and not found[1:3].isfinite().any()
    assert same(found, int8_product_twin(Tiled(bits), Factor(x), data, 50, bias))


@pytest.mark.parametrize("bits", [4, 8])
def test_extreme_codes_stay_exact(gpu: torch.device, bits: int) -> None:
    format = Tiled(bits)
    blocks = torch.zeros(1, 2, format.block_bytes, dtype=torch.uint8)
    blocks[..., : TILE * format.as_rows.code_bytes] = 255
    blocks[..., TILE * format.as_rows.code_bytes + 1 :: 2][..., : 2 * TILE] = 0x3F  # scales and minima of 0.5
    x, data = torch.full((3, 128), -1.0, device=gpu), blocks.flatten(1).to(gpu)
    found = int8_product(format, Factor(x), data, 16, None)
    assert same(found, int8_product_twin(format, Factor(x), data, 16, None)) and (found < 0).all()


def test_a_launch_is_kept_for_one_type_of_a_bias(gpu: torch.device) -> None:
    data, x, bias = packed(20, 64, 4).to(gpu), Factor(x_of(1, 64).to(gpu)), x_of(1, 20)[0].to(gpu)
    product_of.cache_clear()
    for added in (bias, bias.half(), bias.bfloat16(), None):
        assert same(int8_product(Tiled(4), x, data, 20, added), int8_product_twin(Tiled(4), x, data, 20, added))
    assert product_of.cache_info().currsize == 4


def test_no_rows_are_no_rows(gpu: torch.device) -> None:
    data = packed(8, 64, 4).to(gpu)
    assert int8_product(Tiled(4), Factor(torch.empty(0, 64, device=gpu)), data, 8, None).shape == (0, 8)
