"""Some rows times tiles of 4 bits on tensor cores: as decoded in torch and multiplied, however inputs are shared out."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.grouped import GROUP, Tiled
from h2o_flexgen.formats.kernel_sizes import DOT_PROGRAMS
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.gpu import tile_dots as module
from h2o_flexgen.kernels.gpu.tile_dots import groups_of_part, place_of_input, product_of, tile_dots
from h2o_flexgen.kernels.group_codes import tile_decode_twin
from tests.helpers.pairwise import pairs_first
from tests.kernels.tiles import packed, x_of

FORMAT = Tiled(4)
ROUNDED = {torch.float16: 2**-11, torch.bfloat16: 2**-8}
SHAPES = [(1, 64), (3, 5), (40, 100), (70, 640)]  # outputs; inputs


@pytest.fixture
def shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are shared out among several programs, also where there are few of them."""
    monkeypatch.setattr(module, "LEAST_GROUPS", 3)
    product_of.cache_clear()


@pytest.mark.usefixtures("shared_out")
@pytest.mark.parametrize(
    "values", pairs_first({"dtype": list(ROUNDED), "rows": [1, 9, 17, 70], "shape": SHAPES, "has_bias": [True, False]})
)
def test_triton_and_torch_agree(gpu: torch.device, values: dict[str, Any]) -> None:
    dtype, rows, (outputs, inputs) = values["dtype"], values["rows"], values["shape"]
    data, bias = packed(outputs, inputs, 4).to(gpu), x_of(1, outputs, dtype)[0].to(gpu) if values["has_bias"] else None
    x = x_of(rows, inputs, dtype).view(rows, 1, inputs).to(gpu)
    found = tile_dots(FORMAT, Factor(x), data, outputs, bias)
    assert found.shape == (rows, 1, outputs) and found.dtype == dtype
    decoded = values_of(data, outputs, inputs, dtype)
    expected = torch.nn.functional.linear(x.double(), decoded, None if bias is None else bias.double())
    summed = torch.nn.functional.linear(x.double().abs(), decoded.abs())
    assert ((found.double() - expected).abs() <= 2e-6 * summed + ROUNDED[dtype] * expected.abs() + 1e-7).all()


def values_of(data: Tensor, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """What the twin decodes to the type of the rows."""
    decoded = torch.empty(outputs, inputs, dtype=dtype, device=data.device)
    tile_decode_twin(FORMAT, data, decoded)
    return decoded.double()


@pytest.mark.usefixtures("shared_out")
def test_a_row_comes_out_the_same_in_any_company_of_one_size_of_program(gpu: torch.device) -> None:
    data, x = packed(20, 320, 4).to(gpu), x_of(16, 320, torch.float16).to(gpu)
    whole = tile_dots(FORMAT, Factor(x), data, 20, None)
    assert torch.equal(tile_dots(FORMAT, Factor(x[:9]), data, 20, None), whole[:9])
    assert torch.equal(tile_dots(FORMAT, Factor(x[7:8]), data, 20, None), whole[7:8])


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_what_is_no_number_stays_none(gpu: torch.device, value: float) -> None:
    x = x_of(9, 130, torch.float16).to(gpu)
    x[1, 129] = value
    found = tile_dots(FORMAT, Factor(x), packed(20, 130, 4).to(gpu), 20, None)
    assert not found[1].isfinite().any() and found[0].isfinite().all() and found[2:].isfinite().all()


def test_no_rows_come_to_nothing(gpu: torch.device) -> None:
    none = torch.empty(0, 64, dtype=torch.float16, device=gpu)
    assert tile_dots(FORMAT, Factor(none), packed(20, 64, 4).to(gpu), 20, None).shape == (0, 20)


def test_tiles_of_8_bits_are_refused(gpu: torch.device) -> None:
    with pytest.raises(AssertionError, match="tiles of 8 bits"):
        tile_dots(Tiled(8), Factor(x_of(9, 64, torch.float16).to(gpu)), packed(20, 64, 8).to(gpu), 20, None)


@pytest.mark.parametrize(("groups", "programs"), [(64, 64), (224, 64), (64, 224), (1, 1), (9, 600), (17, 3)])
def test_inputs_are_shared_out_whole(groups: int, programs: int) -> None:
    of_part = groups_of_part(groups, programs)
    parts = -(-groups // of_part)
    assert (parts - 1) * of_part < groups <= parts * of_part and (parts == 1 or parts * programs <= DOT_PROGRAMS)


def test_threads_hold_whole_words() -> None:
    """Of 16 inputs that tensor cores meet at once, thread t of four holds 2t, 2t + 1, 2t + 8 and 2t + 9."""
    place = getattr(place_of_input, "fn", place_of_input)
    by_number = [place(number) for number in range(GROUP)]
    assert sorted(by_number) == list(range(GROUP))
    for thread in range(4):
        held = [by_number[16 * step + 2 * thread + more] for step in range(4) for more in (0, 1, 8, 9)]
        assert sorted(held) == [word * 8 + code for word in (thread, thread + 4) for code in range(8)]
