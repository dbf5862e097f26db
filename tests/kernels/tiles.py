"""Random matrices in tiles, and rows that are multiplied with them: the same for all tests of a size."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.formats.grouped import TILE, Tiled
from h2o_flexgen.kernels.group_codes import tile_encode_twin


def packed(outputs: int, inputs: int, bits: int) -> Tensor:
    draw = torch.Generator().manual_seed(outputs + inputs)
    data = torch.empty(-(-outputs // TILE), Tiled(bits).tile_bytes(inputs), dtype=torch.uint8)
    tile_encode_twin(Tiled(bits), torch.randn(outputs, inputs, generator=draw), data)
    return data


def x_of(rows: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows + inputs)).to(dtype)
