"""Tiles hold what rows of the group codec hold, in C as in torch, wherever an output lies."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.formats.grouped import Tiled
from h2o_flexgen.kernels.group_codes import (
    group_decode_twin,
    group_encode_twin,
    tile_decode,
    tile_decode_rows,
    tile_decode_rows_twin,
    tile_decode_twin,
    tile_encode,
    tile_encode_twin,
)
from tests.helpers.all_of import all_of
from tests.kernels.variants import VARIANTS, used


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"bits": [4, 8], "shape": [(1, 64), (3, 5), (40, 576), (16, 130), (130, 100)]})
def test_values_are_those_of_the_group_codec(variant: str, bits: int, shape: tuple[int, int]) -> None:
    format, values = Tiled(bits), torch.randn(shape, generator=torch.Generator().manual_seed(bits)).bfloat16()
    rows = torch.empty(shape[0], format.as_rows.nbytes((shape[1],), 2), dtype=torch.uint8)
    group_encode_twin(format.as_rows, values, rows)
    group_decode_twin(format.as_rows, rows, expected := torch.empty_like(values))
    in_c, in_torch = (torch.full((-(-shape[0] // 16), format.tile_bytes(shape[1])), 9, dtype=torch.uint8) for _ in range(2))
    assert in_c.nbytes == format.nbytes(shape, 2)
    tile_encode_twin(format, values, in_torch)
    with used(variant):
        tile_encode(format, values, in_c)
        assert torch.equal(in_c, in_torch)
        tile_decode(format, in_c, found := torch.empty_like(values))
        numbers = torch.tensor([0, shape[0] - 1, shape[0] // 2, 0])
        tile_decode_rows(format, in_c, numbers, some := torch.empty(4, shape[1], dtype=values.dtype))
    tile_decode_twin(format, in_c, twin := torch.empty_like(values))
    tile_decode_rows_twin(format, in_c, numbers, some_twin := torch.empty_like(some))
    for one, other in ((found, expected), (twin, expected), (some, expected[numbers]), (some_twin, some)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("variant", VARIANTS)
@all_of({"bits": [4, 8], "number": [-1, 48, 1 << 40]})
def test_a_number_that_no_output_has_gives_nan(variant: str, bits: int, number: int) -> None:
    tiles = torch.zeros(3, Tiled(bits).tile_bytes(100), dtype=torch.uint8)
    with used(variant):
        tile_decode_rows(Tiled(bits), tiles, torch.tensor([47, number]), found := torch.empty(2, 100, dtype=torch.bfloat16))
    assert torch.equal(found[0], torch.zeros_like(found[0])) and found[1].isnan().all()
