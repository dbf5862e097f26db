"""Launches of decoding and encoding, with the sizes of a layer of OPT-6.7B."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.formats.grouped import TILE, Grouped, Tiled
from h2o_flexgen.kernels.gpu.group_codes import group_decode, group_encode, tile_decode, tile_decode_rows, tile_encode
from tests.kernels.gpu.launch import Launch

WIDTH, HEAD, HEADS = 4096, 128, 32


def bytes_of(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="meta")


def values_of(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def groups(dtype: torch.dtype, bits: int) -> None:
    values, format = values_of(dtype, 8 * HEADS, HEAD), Grouped(bits)
    rows = bytes_of(len(values), format.nbytes((HEAD,), 2))
    group_encode(format, values, rows)
    group_decode(format, rows, values)


def tiles(dtype: torch.dtype, bits: int) -> None:
    values, format = values_of(dtype, WIDTH, WIDTH), Tiled(bits)
    data = bytes_of(WIDTH // TILE, format.tile_bytes(WIDTH))
    tile_encode(format, values, data)
    tile_decode(format, data, values)
    numbers = torch.empty(8, dtype=torch.int64, device="meta")
    tile_decode_rows(format, data, numbers, values[:8])


WIDEST = {"tile_decode_kernel": 16, "group_encode_kernel": 8, "tile_encode_kernel": 8}
NARROWEST = {"group_decode_kernel": 2, "tile_decode_kernel": 8, "group_encode_kernel": 8, "tile_encode_kernel": 8}
LAUNCHES = (
    Launch("groups of 4 bits, float16", lambda: groups(torch.float16, 4), 64, WIDEST, NARROWEST),
    Launch("tiles of 4 bits, bfloat16", lambda: tiles(torch.bfloat16, 4), 64, WIDEST, NARROWEST),
)
