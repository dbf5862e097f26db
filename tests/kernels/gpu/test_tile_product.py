"""Few rows times tiles on a GPU: as decoded to float32 in torch, and a row comes out the same in any company."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.grouped import Tiled
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.gpu.tile_product import product_of, products_of, tile_product, tile_products
from h2o_flexgen.kernels.products import tile_product_twin
from tests.helpers.pairwise import pairs_first
from tests.kernels.test_tile_product import TOLERANCES, packed, x_of

SHAPES = [(1, 64), (3, 5), (40, 100), (17, 1088)]  # outputs; inputs, also more than all warps read at once


@pytest.mark.parametrize("values", pairs_first({"dtype": list(TOLERANCES), "bits": [4, 8], "shape": SHAPES}))
def test_triton_and_torch_agree(gpu: torch.device, values: dict[str, Any]) -> None:
    dtype, bits, (outputs, inputs) = values["dtype"], values["bits"], values["shape"]
    data, bias = packed(outputs, inputs, bits).to(gpu), x_of(1, outputs, dtype)[0].to(gpu)
    for rows, added in ((1, bias), (2, None), (7, bias)):
        x = x_of(rows, inputs, dtype).view(rows, 1, inputs).to(gpu)
        found = tile_product(Tiled(bits), Factor(x), data, outputs, added)
        expected = tile_product_twin(Tiled(bits), Factor(x), data, outputs, added)
        assert found.shape == expected.shape == (rows, 1, outputs) and found.dtype == expected.dtype == dtype
        assert ((found.double() - expected.double()).abs() <= TOLERANCES[dtype] * summed(x, data, bits, outputs)).all()


def summed(x: Tensor, data: Tensor, bits: int, outputs: int) -> Tensor:
    """The magnitude of what is added up."""
    of_values = tile_product_twin(Tiled(bits), Factor(x.abs().float()), data, outputs, None).abs()
    return of_values + 4 * x.abs().float().sum(-1, keepdim=True)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_comes_out_the_same_in_any_company(gpu: torch.device, bits: int) -> None:
    data, x = packed(20, 320, bits).to(gpu), x_of(7, 320).to(gpu)
    alone = [tile_product(Tiled(bits), Factor(row[None]), data, 20, None) for row in x]
    for rows in (2, 3, 7):
        assert torch.equal(tile_product(Tiled(bits), Factor(x[:rows]), data, 20, None), torch.cat(alone[:rows])), rows


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_what_is_no_number_stays_none(gpu: torch.device, bits: int, value: float) -> None:
    x = x_of(3, 130).to(gpu)
    x[1, 129] = value
    found = tile_product(Tiled(bits), Factor(x), packed(20, 130, bits).to(gpu), 20, None)
    assert not found[1].isfinite().any() and found[0].isfinite().all() and found[2].isfinite().all()


def test_a_launch_is_kept_for_one_type_of_a_bias(gpu: torch.device) -> None:
    data, x, bias = packed(20, 64, 4).to(gpu), Factor(x_of(1, 64).to(gpu)), x_of(1, 20)[0].to(gpu)
    for kept in (product_of, products_of):
        kept.cache_clear()
    for added in (bias, bias.half(), bias.bfloat16(), None):
        expected = tile_product_twin(Tiled(4), x, data, 20, added)
        assert torch.allclose(tile_product(Tiled(4), x, data, 20, added), expected, rtol=1e-5, atol=1e-4)
        for found in tile_products(Tiled(4), x, [(data, 20, added)] * 2):
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-4)
    assert [kept.cache_info().currsize for kept in (product_of, products_of)] == [4, 4]


def test_no_rows_come_to_nothing(gpu: torch.device) -> None:
    data = packed(20, 64, 4).to(gpu)
    assert tile_product(Tiled(4), Factor(torch.empty(0, 64, device=gpu)), data, 20, None).shape == (0, 20)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("outputs", [(40, 24, 17), (33, 70)])
def test_several_matrices_at_once_give_what_each_gives_alone(gpu: torch.device, bits: int, outputs: tuple[int, ...]) -> None:
    x, biases = x_of(3, 320, torch.float16).to(gpu), (True, False)
    for has_bias in biases:
        matrices = [
            (packed(own, 320, bits).to(gpu), own, x_of(1, own, x.dtype)[0].to(gpu) if has_bias else None) for own in outputs
        ]
        found = tile_products(Tiled(bits), Factor(x), matrices)
        assert [each.shape for each in found] == [(3, own) for own in outputs]
        for each, (data, own, bias) in zip(found, matrices):
            assert torch.equal(each, tile_product(Tiled(bits), Factor(x), data, own, bias))
    empty = tile_products(Tiled(bits), Factor(x[:0]), [(packed(own, 320, bits).to(gpu), own, None) for own in outputs])
    assert [each.shape for each in empty] == [(0, own) for own in outputs]
