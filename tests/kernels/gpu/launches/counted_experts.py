"""Launches of a slice of OLMoE-1B-7B in 4 bits, of 8 rows."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from h2o_flexgen.formats.grouped import TILE, Tiled
from h2o_flexgen.formats.table import FORMATS, PLAIN
from h2o_flexgen.kernels.factor import CountedRows, Factor, Meeting
from h2o_flexgen.kernels.gpu.counted_experts import (
    add_counted,
    counted_plain_products,
    counted_stored_products,
    counted_tile_products,
    gather_counted,
)
from h2o_flexgen.kernels.routing import Chosen
from tests.kernels.gpu.launch import Launch

ROWS, EACH, EXPERTS, WIDTH, INNER = 8, 8, 8, 2048, 1024


def made(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def counted() -> CountedRows:
    return CountedRows(made(EXPERTS + 1, dtype=torch.int64), EXPERTS, ROWS)


def gathered() -> None:
    gather_counted(Chosen(made(ROWS, EACH).float(), made(ROWS, EACH).int()), made(ROWS, WIDTH), range(EXPERTS))


def multiplied() -> None:
    data = made(INNER // TILE, Tiled(4).tile_bytes(WIDTH), dtype=torch.uint8)
    x = Factor(made(ROWS * EACH, WIDTH), counted())
    counted_tile_products(Tiled(4), x, [Meeting(0, 0, data, None)] * EXPERTS, made(ROWS * EACH, INNER))


def multiplied_as_stored() -> None:
    data = made(2 * INNER, FORMATS["mxfp4"].nbytes((2 * INNER, WIDTH), 2) // (2 * INNER), dtype=torch.uint8)
    x = Factor(made(ROWS * EACH, WIDTH), counted())
    biased = Meeting(0, 0, data, made(2 * INNER))
    counted_stored_products(FORMATS["mxfp4"], x, [biased] * EXPERTS, made(ROWS * EACH, 2 * INNER))


def multiplied_plain(dtype: torch.dtype, rows: int = ROWS * EACH) -> None:
    own = CountedRows(made(EXPERTS + 1, dtype=torch.int64), EXPERTS, rows)
    meeting = Meeting(0, 0, made(INNER, WIDTH, dtype=dtype), made(INNER, dtype=dtype))
    counted_plain_products(
        FORMATS[PLAIN], Factor(made(rows, WIDTH, dtype=dtype), own), [meeting] * EXPERTS, made(rows, INNER, dtype=dtype)
    )


def added() -> None:
    sums, weights = made(ROWS, 2 * WIDTH).float()[:, :WIDTH], made(ROWS * EACH).float()
    add_counted(sums, made(ROWS * EACH, WIDTH), weights, made(ROWS * EACH).long(), counted())


PLAIN_LOADS = {"counted_plain_kernel": 16}
LAUNCHES = (
    Launch("rows of experts gathered", gathered, kernels=1),
    Launch("rows of experts multiplied", multiplied, 192, {"counted_tiles_kernel": 16}, kernels=1),
    Launch("rows of experts as stored", multiplied_as_stored, 192, kernels=1),
    Launch("rows of plain experts", partial(multiplied_plain, torch.float16), 128, PLAIN_LOADS, kernels=1),
    Launch("rows of plain experts, bfloat16", partial(multiplied_plain, torch.bfloat16), 128, PLAIN_LOADS, kernels=1),
    Launch("rows of plain experts, float32", partial(multiplied_plain, torch.float32), 128, PLAIN_LOADS, kernels=1),
    Launch("a row of plain experts", partial(multiplied_plain, torch.float16, 1), 128, PLAIN_LOADS, kernels=1),
    Launch("rows of experts summed up", added, kernels=1),
)
