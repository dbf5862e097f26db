"""The product of rows of int8 and a transposed matrix in tiles of 4 or 8 bits. C and torch give the same bits, and what becomes
of a row depends on nothing but the row and the matrix: int8_product.c says how."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.formats.grouped import GROUP, groups_of
from h2o_flexgen.formats.kernel_sizes import twin_values
from h2o_flexgen.formats.tiled import TILE, Tiled
from h2o_flexgen.kernels.factor import Factor, Meeting
from h2o_flexgen.kernels.int8_rows import FactorRows, Factors, Int8Rows, int8_rows, int8_rows_twin
from h2o_flexgen.kernels.native import pointer
from h2o_flexgen.kernels.panels import call


def int8_product(format: Tiled, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., columns), data (tiles, bytes of a tile), bias (outputs,) -> (..., outputs)"""
    out = x.values.new_empty(*x.values.shape[:-1], outputs)
    int8_products(format, x, Meeting.of_all(x, data, bias), out)
    return out


def int8_products(format: Tiled, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> None:
    """The same of rows that meet matrices of their own, into out (..., outputs)."""
    made, shape = x.made(int8_rows), (-(-out.shape[-1] // TILE), format.tile_bytes(x.values.shape[-1]))
    given, asked = FactorRows(made, made.sums, out), list[_Int8Product]()
    for first, rows, data, bias in meetings:
        assert data.shape == shape
        asked.append(_Int8Product(given.factors(first, rows, bias), pointer(data), given.sums(first)))
    call("int8_product", (_Int8Product * len(asked))(*asked), format.bits)


def int8_product_twin(format: Tiled, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    rows = x.made(int8_rows_twin)
    step = max(1, twin_values(data.device.type) // max(TILE * rows.codes.shape[1], TILE * len(rows.codes)))
    parts = [_product_of_tiles(format, rows, data[start : start + step]) for start in range(0, len(data), step)]
    out = torch.cat(parts, dim=1)[:, :outputs]
    added = out if bias is None else out + bias.float()
    return added.to(x.values.dtype).reshape(*x.values.shape[:-1], outputs)


def _product_of_tiles(format: Tiled, x: Int8Rows, tiles: Tensor) -> Tensor:
    """The sums of some tiles (rows, tiles * 16), group behind group. Dot products are whole numbers below 2 ** 24, which
    float32 holds, in any order of their sums."""
    sums = torch.zeros(len(x.codes), len(tiles) * TILE, device=tiles.device)
    for group in range(groups_of(x.codes.shape[1])):
        codes, scales, minima = _block(format, tiles, group)
        dots = functional.linear(x.codes[:, group * GROUP : (group + 1) * GROUP].float(), codes)
        own = slice(group, group + 1)
        sums += dots * x.scales[:, own] * scales + x.sums[:, own] * minima
    return sums


def _block(format: Tiled, tiles: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """The codes (tiles * 16, 64), scales and minima (tiles * 16,) of a group, as float32."""
    blocks = tiles[:, group * format.block_bytes : (group + 1) * format.block_bytes]
    words, scales, minima = blocks.split((TILE * format.as_rows.code_bytes, 2 * TILE, 2 * TILE), dim=1)
    codes = words.reshape(len(tiles), -1, TILE, 4)
    if format.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1, 2)
    shared = (part.contiguous().view(torch.bfloat16).float().flatten() for part in (scales, minima))
    return codes.transpose(1, 2).reshape(len(tiles) * TILE, GROUP).float(), *shared


class _Int8Product(ctypes.Structure):
    _fields_ = (("of", Factors), ("data", ctypes.c_void_p), ("sums", ctypes.c_void_p))
