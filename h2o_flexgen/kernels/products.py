"""Products with transposed matrices of plain values, or of tiles of 4 or 8 bits. In C and in torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.formats.grouped import GROUP, TILE, Tiled, groups_of
from h2o_flexgen.formats.kernel_sizes import TWIN_VALUES, twin_values
from h2o_flexgen.formats.table import PlainFormat
from h2o_flexgen.kernels.factor import Factor, Meeting, Runs
from h2o_flexgen.kernels.group_codes import tile_decode_twin
from h2o_flexgen.kernels.native import KINDS, RECORDER, pointer, run
from h2o_flexgen.kernels.panels import ARRANGED, PLAIN_BITS, Arrange, Arranged, JoinedRuns, RowsInRuns, call, panel_products
from h2o_flexgen.kernels.raw_memory import address_of

# -- plain product ---------------------------------------------------------------------------------------------------------
# Plain values: encoding and decoding are copies, and a product is torch's.


def plain_encode(format: PlainFormat, values: Tensor, out: Tensor) -> None:
    out.view(values.dtype).view(values.shape).copy_(values)


def plain_decode(format: PlainFormat, data: Tensor, out: Tensor) -> None:
    out.copy_(data.view(out.dtype).view(out.shape))


def plain_product(format: PlainFormat, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    if (recorder := RECORDER.get()) is None:
        return functional.linear(x.values, data, bias)
    out = x.values.new_empty(*x.values.shape[:-1], outputs)
    recorder.by_torch(_into, (x.values, data, bias), out)
    return out


def counted_plain_products(format: PlainFormat, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> None:
    """The same of rows that meet matrices of their own, of which memory says how many there are, into out (rows, outputs)."""
    recorder, counted = RECORDER.get(), x.counted
    assert counted is not None
    biases = [each.bias for each in meetings if each.bias is not None]
    given = [x.values, counted.begins, *(each.data for each in meetings), *biases]
    work = EachInto(counted.runs, counted.least, counted.most)
    if recorder is None:
        work(out, *given)
    else:
        recorder.by_torch(work, given, out)


@dataclass(frozen=True)
class EachInto:
    """Products of torch for runs of rows. A recording keeps it for all layers that are alike, so it refers to no memory."""

    runs: int
    least: int
    most: int

    def __call__(self, out: Tensor, x: Tensor, begins: Tensor, *given: Tensor) -> None:
        """`given`: the matrices, and behind them their biases, if there are any."""
        matrices, biases, places = given[: self.runs], given[self.runs :] or repeat(None), begins.tolist()
        for first, behind, matrix, bias in zip(places, places[1:], matrices, biases):
            if self.least <= behind - first <= self.most:
                _into(out[first:behind], x[first:behind].clone(), matrix, bias)


def _into(out: Tensor, x: Tensor, matrix: Tensor, bias: Tensor | None) -> None:
    out.copy_(functional.linear(x, matrix, bias))


# -- plain dots ------------------------------------------------------------------------------------------------------------
# The product of few rows and a transposed plain matrix, read as it lies. Sums are in float32; C and torch sum in different
# orders. With C what becomes of a row depends on nothing but the row and the matrix.


def plain_dots(format: PlainFormat, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., inputs), data (outputs, inputs), bias (outputs,) -> (..., outputs)"""
    out = x.values.new_empty(*x.values.shape[:-1], outputs)
    plain_dot_products(format, x, Meeting.of_all(x, data.contiguous(), bias), out)
    return out


def plain_dot_products(format: PlainFormat, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> None:
    """The same of rows that meet matrices of their own, into out (..., outputs)."""
    rows, outcome = x.values.reshape(-1, x.values.shape[-1]).contiguous(), out.view(-1, out.shape[-1])
    of_row, of_outcome = (each.shape[1] * each.itemsize for each in (rows, outcome))
    from_rows, to = address_of(rows), address_of(outcome)
    asked = (_Dots * len(meetings))()
    for told, (first, count, data, bias) in zip(asked, meetings):
        assert data.shape == (outcome.shape[1], rows.shape[1]) and data.dtype == rows.dtype == outcome.dtype
        assert bias is None or (bias.dtype == rows.dtype and bias.shape == outcome.shape[1:])
        added = None if bias is None else pointer(bias)
        places = from_rows + first * of_row, address_of(data), added, to + first * of_outcome
        told.x, told.data, told.bias, told.out = places
        told.rows, told.inputs, told.outputs = count, rows.shape[1], outcome.shape[1]
    if x.counted is not None:
        placed = {_Dots.x.offset: (from_rows, of_row), _Dots.out.offset: (to, of_outcome)}
        x.counted.place_each(asked, _Dots.rows.offset, placed)
    call("plain_dots", asked, KINDS[rows.dtype])


class _Dots(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "data", "bias", "out")),
        *((name, ctypes.c_long) for name in ("rows", "inputs", "outputs")),
    )


# -- wide product ----------------------------------------------------------------------------------------------------------
# The product of rows and a transposed plain matrix, which is widened to float32 piece by piece: for float32, and where the
# processor has no instructions that multiply the matrix's type. Sums are in float32; C and torch sum in different orders.
# With C what becomes of a row depends on nothing but the row and the matrix.


def wide_product(format: PlainFormat, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., inputs), data (outputs, inputs), bias (outputs,) -> (..., outputs)"""
    out = x.values.new_empty(*x.values.shape[:-1], outputs)
    wide_products(format, x, Meeting.of_all(x, data.contiguous(), bias), out)
    return out


def wide_products(format: PlainFormat, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> None:
    """The same of rows that meet matrices of their own and of one type, into out (..., outputs)."""
    shape = out.shape[-1], x.values.shape[-1]
    assert all(meeting.data.shape == shape for meeting in meetings)
    if meetings:
        panel_products("wide_product", x, ARRANGED[PLAIN_BITS], meetings, out, told=KINDS[meetings[0].data.dtype])


def wide_product_twin(format: PlainFormat, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    wide = x.made(Tensor.float)
    out = x.values.new_empty(*x.values.shape[:-1], outputs)
    step = max(1, TWIN_VALUES // max(1, data.shape[1]))
    for first in range(0, outputs, step):
        part = slice(first, first + step)
        added = None if bias is None else bias[part].float()
        out[..., part] = functional.linear(wide, data[part].float(), added)
    return out


# -- tile product ----------------------------------------------------------------------------------------------------------
# The product of rows and a transposed matrix in tiles of 4 or 8 bits, without rounding anything but the outcome to the type
# of the rows. C and torch sum in different orders. With C what becomes of a row depends on nothing but the row and the
# matrix.


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


# -- pair product ----------------------------------------------------------------------------------------------------------
# The product of rows and a transposed matrix by instructions for pairs of bfloat16: plain values, or tiles with values that
# are rounded to bfloat16 as decoding does. The result of a row depends on nothing but the row and the matrix.


def pair_product(format: PlainFormat | Tiled, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., inputs), data (outputs, inputs) or (tiles, bytes of a tile), bias (outputs,) -> (..., outputs)"""
    out = x.values.new_empty(*x.values.shape[:-1], outputs)
    pair_products(format, x, Meeting.of_all(x, data.contiguous(), bias), out)
    return out


def pair_products(format: PlainFormat | Tiled, x: Factor, meetings: Sequence[Meeting], out: Tensor) -> None:
    """The same of rows that meet matrices of their own, into out (..., outputs)."""
    bits = format.bits if isinstance(format, Tiled) else PLAIN_BITS
    assert x.values.dtype == torch.bfloat16 and (bits or all(meeting.data.dtype == torch.bfloat16 for meeting in meetings))
    panel_products("pair_product", x, paired if bits else paired_in_lines, meetings, out, told=bits)


def pair_product_twin(format: PlainFormat | Tiled, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    values = data.float()
    if isinstance(format, Tiled):
        decoded = torch.empty(outputs, x.values.shape[-1], dtype=torch.bfloat16)
        tile_decode_twin(format, data, decoded)
        values = decoded.float()
    return functional.linear(x.values.float(), values, None if bias is None else bias.float()).to(x.values.dtype)


def _paired(values: Tensor, runs: Runs, bits: int) -> Arranged:
    """Rows (..., inputs) block by block, in pairs of inputs: pair_rows.c says how."""
    joined, pairs = JoinedRuns.of(values, runs), groups_of(values.shape[-1]) * GROUP // 2
    out = torch.empty(len(joined.rows), 2 * pairs, dtype=values.dtype)
    run("arrange_row_pairs", RowsInRuns.of(joined, out, pairs, bits), torch.get_num_threads())
    return Arranged(out, pairs, joined.places)


paired: Arrange = partial(_paired, bits=4)  # or any other number of bits
paired_in_lines: Arrange = partial(_paired, bits=PLAIN_BITS)  # for matrices with outputs that lie row by row
