"""Few rows times a packed matrix: in C as decoded to float32 in torch, for every number of rows, whatever lies beside them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_flexgen.kernels.group_product import group_product_twin
from h2o_flexgen.kernels.operations import encode, packed_product
from h2o_flexgen.kernels.table import FEW_ROWS
from h2o_flexgen.quant.grouped import Grouped
from tests.kernels.variants import VARIANTS, used

TOLERANCES = {
    torch.float32: 2e-6,
    torch.bfloat16: 4e-3,
    torch.float16: 6e-4,
}  # of the sum of what is added up: 16 bits are rounded to once


def packed(outputs: int, inputs: int, bits: int) -> Tensor:
    draw = torch.Generator().manual_seed(outputs + inputs)
    data = torch.empty(outputs, Grouped(bits).nbytes((1, inputs), 2), dtype=torch.uint8)
    encode(Grouped(bits).name, torch.randn(outputs, inputs, generator=draw), data)
    return data


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(1, 64), (3, 5), (7, 640), (130, 100), (33, 1024)])
@pytest.mark.parametrize("rows", [*range(1, 10), FEW_ROWS])
def test_c_and_torch_agree(variant: str, dtype: torch.dtype, bits: int, shape: tuple[int, int], rows: int) -> None:
    data, draw = packed(*shape, bits), torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 1, shape[1], generator=draw).to(dtype)
    bias = torch.randn(shape[0], generator=draw).to(dtype) if rows % 2 else None
    with used(variant):
        found = packed_product(Grouped(bits).name, x, data, bias)
    expected = group_product_twin(Grouped(bits), x, data, bias)
    assert found is not None and found.shape == expected.shape == (rows, 1, shape[0]) and found.dtype == dtype
    added = group_product_twin(Grouped(bits), x.abs().float(), data, None).abs() + x.abs().float().sum(-1, keepdim=True)
    assert ((found.double() - expected.double()).abs() <= TOLERANCES[dtype] * added).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_comes_out_the_same_in_any_company(variant: str, bits: int) -> None:
    data, x = packed(50, 192, bits), torch.randn(FEW_ROWS, 192, generator=torch.Generator().manual_seed(1)).bfloat16()
    with used(variant):
        alone = torch.cat([packed_product(Grouped(bits).name, row[None], data, None) for row in x])  # type: ignore[misc]
        for rows in range(1, FEW_ROWS + 1):
            together = packed_product(Grouped(bits).name, x[:rows], data, None)
            assert together is not None and torch.equal(together, alone[:rows])


@pytest.mark.parametrize("variant", VARIANTS)
def test_many_rows_no_rows_and_other_types_are_for_torch(variant: str) -> None:
    data = packed(8, 64, 4)
    with used(variant):
        assert packed_product("group4", torch.randn(FEW_ROWS + 1, 64), data, None) is None
        assert packed_product("group4", torch.randn(0, 64), data, None) is None
        assert packed_product("group4", torch.randn(1, 64).double(), data, None) is None
        assert packed_product("group4", torch.randn(1, 64), data, None) is not None


def test_without_the_library_torch_decodes() -> None:
    with used("torch"):
        assert packed_product("group4", torch.randn(1, 64), packed(8, 64, 4), None) is None
