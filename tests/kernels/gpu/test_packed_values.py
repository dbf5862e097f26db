"""Packed values on a GPU: decoded to the bits, and encoded to the bytes, that torch gives, by rows and in tiles."""

from __future__ import annotations

from itertools import product
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen.formats.grouped import TILE, Grouped, Tiled
from h2o_flexgen.kernels.gpu.group_codes import group_decode, group_encode, tile_decode, tile_decode_rows, tile_encode
from h2o_flexgen.kernels.group_codes import (
    group_decode_twin,
    group_encode_twin,
    tile_decode_rows_twin,
    tile_decode_twin,
    tile_encode_twin,
)
from tests.helpers.pairwise import pairs_first
from tests.helpers.samples import first_of
from tests.kernels.test_group_encode import SPREADS

SHAPES = [(1, 64), (3, 5), (37, 130), (18, 640), (2, 4160), (70, 63)]
ENCODED = [(3, 1), (18, 130), (20, 192)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def room_for_rows(values: Tensor, bits: int) -> Tensor:
    nbytes = Grouped(bits).nbytes((values.shape[1],), values.itemsize)
    return torch.full((len(values), nbytes), 77, dtype=torch.uint8, device=values.device)


def room_for_tiles(values: Tensor, bits: int) -> Tensor:
    shape = -(-len(values) // TILE), Tiled(bits).tile_bytes(values.shape[1])
    return torch.full(shape, 77, dtype=torch.uint8, device=values.device)


def drawn(shape: tuple[int, int], device: torch.device) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])) * torch.logspace(-4, 4, shape[0])[:, None]
    if len(values) > 5:
        values[3, 2], values[5, 1], values[5, 0] = nan, inf, -inf
    return values.to(device)


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(1.5), other.nan_to_num(1.5))


@pytest.mark.parametrize("given", pairs_first({"bits": [4, 8], "dtype": DTYPES, "shape": SHAPES}))
def test_decoding_gives_the_bits_of_torch(gpu: torch.device, given: dict[str, Any]) -> None:
    bits, dtype, shape = given["bits"], given["dtype"], given["shape"]
    values = drawn(shape, gpu)
    group_encode_twin(Grouped(bits), values, rows := room_for_rows(values, bits))
    tile_encode_twin(Tiled(bits), values, tiles := room_for_tiles(values, bits))
    numbers = torch.tensor([0, shape[0] - 1, shape[0] // 2, 0], device=gpu)
    for kernel, twin, format, stored, count in (
        (group_decode, group_decode_twin, Grouped(bits), (rows,), shape[0]),
        (tile_decode, tile_decode_twin, Tiled(bits), (tiles,), shape[0]),
        (tile_decode_rows, tile_decode_rows_twin, Tiled(bits), (tiles, numbers), len(numbers)),
    ):
        found, expected = (torch.full((count + 1, shape[1]), 7.0, dtype=dtype, device=gpu) for _ in range(2))
        kernel(format, *stored, found[:count])
        twin(format, *stored, expected[:count])
        assert same(found, expected) and (found[count] == 7.0).all(), kernel


@pytest.mark.parametrize("bits", first_of([4, 8], 1))
@pytest.mark.parametrize(
    ("spread", "dtype"), [*product(SPREADS, DTYPES[:1]), *product(["no numbers", "subnormal"], DTYPES[1:])]
)
def test_encoding_gives_the_bytes_of_torch(gpu: torch.device, bits: int, spread: str, dtype: torch.dtype) -> None:
    torch.manual_seed(len(spread))
    for shape in ENCODED:
        values = SPREADS[spread](shape).to(gpu, dtype)
        for kernel, twin, format, room in (
            (group_encode, group_encode_twin, Grouped(bits), room_for_rows),
            (tile_encode, tile_encode_twin, Tiled(bits), room_for_tiles),
        ):
            kernel(format, values, found := room(values, bits))
            twin(format, values, expected := room(values, bits))
            assert torch.equal(found, expected), (kernel, shape)


@pytest.mark.parametrize("bits", [4, 8])
def test_strided_values_are_encoded_as_they_are_seen(gpu: torch.device, bits: int) -> None:
    values = torch.randn(64, 30, device=gpu).T
    group_encode(Grouped(bits), values, found := room_for_rows(values, bits))
    group_encode_twin(Grouped(bits), values.contiguous(), expected := room_for_rows(values, bits))
    assert torch.equal(found, expected)


def test_no_rows_are_no_rows(gpu: torch.device) -> None:
    nothing, none = torch.empty(0, 64, device=gpu), torch.empty(0, dtype=torch.int64, device=gpu)
    group_encode(Grouped(4), nothing, rows := room_for_rows(nothing, 4))
    tile_encode(Tiled(4), nothing, tiles := room_for_tiles(nothing, 4))
    group_decode(Grouped(4), rows, nothing)
    tile_decode(Tiled(4), tiles, nothing)
    tile_decode_rows(Tiled(4), room_for_tiles(torch.empty(16, 64, device=gpu), 4), none, nothing)
