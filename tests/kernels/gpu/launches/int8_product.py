"""Launches of products of rows of int8 with tiles, with the sizes of a layer of OPT-6.7B."""

from __future__ import annotations

from functools import partial

import torch

from h2o_flexgen.formats.grouped import TILE, Tiled
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.gpu.int8_product import int8_product
from tests.kernels.gpu.launch import Launch

WIDTH, OUTPUTS = 4096, 16384


def product(bits: int, rows: int) -> None:
    format, x = Tiled(bits), torch.empty(rows, WIDTH, dtype=torch.float16, device="meta")
    data = torch.empty(OUTPUTS // TILE, format.tile_bytes(WIDTH), dtype=torch.uint8, device="meta")
    int8_product(format, Factor(x), data, OUTPUTS, x.new_empty(OUTPUTS))


LAUNCHES = (
    Launch("eight rows, 4 bits", partial(product, 4, 8), 192, {"int8_rows_kernel": 8}, kernels=2),
    Launch("64 rows, 4 bits", partial(product, 4, 64), 192, {"int8_product_kernel": 8}, kernels=2),
    Launch("many rows, 8 bits", partial(product, 8, 512), 192, {"int8_product_kernel": 8}),
)
