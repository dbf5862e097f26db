"""Launches of products of some rows with tiles on tensor cores, with the sizes of a layer of OPT-6.7B."""

from __future__ import annotations

from functools import partial

import torch

from h2o_flexgen.formats.grouped import TILE, Tiled
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.gpu.tile_dots import tile_dots
from tests.kernels.gpu.launch import Launch

WIDTH, OUTPUTS = 4096, 65536
AMPERE = 80  # Triton makes products on tensor cores since


def product(dtype: torch.dtype, rows: int, outputs: int) -> None:
    format, x = Tiled(4), torch.empty(rows, WIDTH, dtype=dtype, device="meta")
    data = torch.empty(outputs // TILE, format.tile_bytes(WIDTH), dtype=torch.uint8, device="meta")
    tile_dots(format, Factor(x), data, outputs, x.new_empty(outputs))


LOADS, NARROWEST = {"tile_dots_kernel": 8, "join_parts_kernel": 16}, {"tile_dots_kernel": 2}
LAUNCHES = (
    Launch("16 rows", partial(product, torch.float16, 16, OUTPUTS), 96, LOADS, NARROWEST, AMPERE, kernels=1),
    Launch("16 rows, inputs shared out", partial(product, torch.bfloat16, 16, WIDTH), 96, LOADS, NARROWEST, AMPERE, kernels=2),
    Launch("32 rows", partial(product, torch.float16, 32, WIDTH), 128, LOADS, NARROWEST, AMPERE, True, kernels=2),
    Launch("64 rows", partial(product, torch.float16, 64, WIDTH), 160, LOADS, NARROWEST, AMPERE, kernels=2),
)
