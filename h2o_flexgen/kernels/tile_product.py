"""The product of rows and a transposed matrix in tiles of 4 or 8 bits, without rounding anything but the outcome to the type of
the rows. C and torch sum in different orders. With C what becomes of a row depends on nothing but the row and the matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.formats.kernel_sizes import twin_values
from h2o_flexgen.formats.tiled import TILE, Tiled
from h2o_flexgen.kernels.factor import Factor, Meeting
from h2o_flexgen.kernels.panels import ARRANGED, panel_products
from h2o_flexgen.kernels.tile_rows import tile_decode_twin


def tile_product(format: Tiled, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., inputs), data (tiles, bytes of a tile), bias (outputs,) -> (..., outputs)"""
    out = x.values.new_empty(*x.values.shape[:-1], outputs)
    tile_products(format, x, Meeting.of_all(x, data, bias), out)
    return out


def tile_products(format: Tiled, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> None:
    """The same of rows that meet matrices of their own, into out (..., outputs)."""
    shape = -(-out.shape[-1] // TILE), format.tile_bytes(x.values.shape[-1])
    assert all(meeting.data.shape == shape for meeting in meetings)
    panel_products("tile_product", x, ARRANGED[format.bits], meetings, out, told=format.bits)


def tile_product_twin(format: Tiled, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """Multiplies with values that are decoded to float32, some tiles at a time."""
    wide, inputs = x.made(Tensor.float), x.values.shape[-1]
    out = x.values.new_empty(*x.values.shape[:-1], outputs)
    step = max(1, twin_values(data.device.type) // (TILE * inputs))
    for first in range(0, len(data), step):
        part = slice(first * TILE, min(outputs, (first + step) * TILE))
        values = torch.empty(part.stop - part.start, inputs, device=data.device)
        tile_decode_twin(format, data[first : first + step], values)
        out[..., part] = functional.linear(wide, values, None if bias is None else bias[part].float())
    return out
