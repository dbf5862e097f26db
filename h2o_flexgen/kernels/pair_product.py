"""The product of rows and a transposed matrix by instructions for pairs of bfloat16: plain values, or tiles with values
that are rounded to bfloat16 as decoding does. The result of a row depends on nothing but the row and the matrix."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.formats.grouped import GROUP, groups_of
from h2o_flexgen.formats.plain import PlainFormat
from h2o_flexgen.formats.tiled import Tiled
from h2o_flexgen.kernels.factor import Factor, Meeting, Runs
from h2o_flexgen.kernels.native import native_library, pointer
from h2o_flexgen.kernels.panels import PLAIN_BITS, Arranged, JoinedRuns, in_c, panel_products
from h2o_flexgen.kernels.tile_rows import tile_decode_twin


def pair_product(format: PlainFormat | Tiled, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., inputs), data (outputs, inputs) or (tiles, bytes of a tile), bias (outputs,) -> (..., outputs)"""
    out = x.values.new_empty(*x.values.shape[:-1], outputs)
    pair_products(format, x, Meeting.of_all(x, data.contiguous(), bias), out)
    return out


def pair_products(format: PlainFormat | Tiled, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> None:
    """The same of rows that meet matrices of their own, into out (..., outputs)."""
    bits = format.bits if isinstance(format, Tiled) else PLAIN_BITS
    assert x.values.dtype == torch.bfloat16 and (bits or all(meeting.data.dtype == torch.bfloat16 for meeting in meetings))
    panel_products("pair_product", x, paired, meetings, out, told=bits)


def pair_product_twin(format: PlainFormat | Tiled, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    values = data.float()
    if isinstance(format, Tiled):
        decoded = torch.empty(outputs, x.values.shape[-1], dtype=torch.bfloat16)
        tile_decode_twin(format, data, decoded)
        values = decoded.float()
    return functional.linear(x.values.float(), values, None if bias is None else bias.float()).to(x.values.dtype)


def paired(values: Tensor, runs: Runs) -> Arranged:
    """Rows (..., inputs) block by block, in pairs of inputs: panels.c says how."""
    inputs, native = values.shape[-1], native_library()
    (rows, own, places), pairs = JoinedRuns.of(values, runs), groups_of(inputs) * GROUP // 2
    out = torch.empty(len(rows), 2 * pairs, dtype=values.dtype)
    sizes = (*in_c(own), ctypes.c_long(inputs), ctypes.c_int(torch.get_num_threads()))
    native.arrange_row_pairs(pointer(rows), pointer(out), *sizes)
    return Arranged(out, pairs, places)
