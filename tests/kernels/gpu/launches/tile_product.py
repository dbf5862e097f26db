"""Launches of products with tiles, with the sizes of a layer of OPT-6.7B."""

from __future__ import annotations

from functools import partial

import torch

from h2o_flexgen.formats.grouped import TILE, Tiled
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.gpu.tile_product import tile_product, tile_products
from tests.kernels.gpu.launch import Launch

WIDTH, OUTPUTS = 4096, 16384


def product(dtype: torch.dtype, bits: int, rows: int) -> None:
    format, x = Tiled(bits), torch.empty(rows, WIDTH, dtype=dtype, device="meta")
    data = torch.empty(OUTPUTS // TILE, format.tile_bytes(WIDTH), dtype=torch.uint8, device="meta")
    tile_product(format, Factor(x), data, OUTPUTS, x.new_empty(OUTPUTS))


def of_three(rows: int) -> None:
    """Queries, keys and values of a layer whose heads share keys."""
    format, x = Tiled(4), torch.empty(rows, WIDTH, dtype=torch.float16, device="meta")
    outputs = (WIDTH, WIDTH // 4, WIDTH // 4)
    data = [torch.empty(own // TILE, format.tile_bytes(WIDTH), dtype=torch.uint8, device="meta") for own in outputs]
    tile_products(format, Factor(x), [(each, own, None) for each, own in zip(data, outputs)])


LAUNCHES = (
    Launch("one row, 4 bits", partial(product, torch.float16, 4, 1), 96, {"tile_product_kernel": 16}, kernels=1),
    Launch("eight rows, 4 bits", partial(product, torch.float16, 4, 8), 192, {"tile_product_kernel": 16}, kernels=1),
    Launch("eight rows, three matrices", partial(of_three, 8), 192, {"tile_products_kernel": 16}, kernels=1),
    Launch("four rows, 4 bits", partial(product, torch.bfloat16, 4, 4), 192, {"tile_product_kernel": 16}, is_rare=True),
    Launch("eight rows, 8 bits", partial(product, torch.float16, 8, 8), 192, {"tile_product_kernel": 16}),
)
