"""The product of few rows and a transposed matrix in a checkpoint's own format, which is read once and never decoded to memory.

A program has some outputs of up to four rows and all inputs. Each thread takes words of all these outputs, and multiplies their
codes with the rows in float32; the sums are multiplied with what the codes share. Sums are added in an order that depends on
shapes alone, and a row's outcome on nothing but row and matrix: all that is fused is written as such.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats.table import Stored
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.gpu.codes import as_float32
from h2o_flexgen.kernels.gpu.launching import ALIGNED, Launch, Type, kept_by_shape, launcher, type_of
from h2o_flexgen.kernels.gpu.stored_values import (
    as_float,
    block_at,
    codes_of,
    first_input,
    layout_of,
    load_bytes,
    parts_of,
    shared_by,
    upper_of,
    words_of,
)
from h2o_flexgen.kernels.raw_memory import begins_behind

ROWS_AT_ONCE = 4  # that meet a code while it is in a register
OUTPUTS_AT_ONCE, WITH_HALVES = 8, 4  # outputs that meet what was loaded of the rows
MOST_WARPS, FEWEST_WARPS = 8, 4
PROGRAMS_THAT_FILL = 1024  # so many keep any GPU busy with few warps each


def stored_product(format: Stored, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., inputs), data (rows, bytes of a row) or (1, bytes) of a format in sections, bias (outputs,) -> (..., outputs)"""
    inputs = x.values.shape[-1]
    rows = x.values.reshape(-1, inputs).contiguous()
    out = rows.new_empty(len(rows), outputs)
    if out.numel():
        _launch(format, rows, data, bias, out)
    return out.view(*x.values.shape[:-1], outputs)


def _launch(format: Stored, rows: Tensor, data: Tensor, bias: Tensor | None, out: Tensor) -> None:
    parts = parts_of(format, data, out.shape[1], rows.shape[1])
    given = rows.index_select(1, parts.order) if format.layout.is_ordered else rows
    scales, zeros = parts.scales.dtype, parts.zeros.dtype
    begins = begins_behind(ALIGNED, parts.codes)
    launch = product_of(format.name, begins, scales, zeros, rows.shape, rows.dtype, out.shape[1], type_of(bias))
    launch(*parts[:3], given, out if bias is None else bias, out)


@kept_by_shape
def product_of(
    format: str,
    begins: int,
    scales: torch.dtype,
    zeros: torch.dtype,
    shape: torch.Size,
    dtype: torch.dtype,
    outputs: int,
    bias: Type,
) -> Launch:
    rows, inputs = shape
    sizes = Sizes.of(format, begins, rows, outputs, inputs)
    grid = sizes.blocks, triton.cdiv(rows, sizes.rows)
    return launcher(
        product_kernel, grid, (rows, outputs, inputs, sizes.row_bytes), HAS_BIAS=bias is not None, **sizes.constants
    )


class Sizes(NamedTuple):
    """What programs of a product with a format have, and the constants of a kernel that say so."""

    blocks: int  # of outputs
    rows: int
    row_bytes: int
    constants: dict[str, Any]

    @classmethod
    def of(cls, format: str, begins: int, rows: int, outputs: int, inputs: int) -> Sizes:
        layout = layout_of(format)
        row_bytes = layout.row_bytes(inputs)
        outputs_at_once = WITH_HALVES if layout.has_halves else OUTPUTS_AT_ONCE
        rows_at_once = min(ROWS_AT_ONCE, triton.next_power_of_2(rows))
        blocks = triton.cdiv(outputs, outputs_at_once)
        warps = _warps(blocks, triton.cdiv(inputs * layout.bits, 32 * 32 * layout.words_together))
        constants = {"LAYOUT": layout, "AT_ONCE": load_bytes(layout, begins, row_bytes), "ROWS": rows_at_once}
        constants |= {"OUTPUTS": outputs_at_once, "LANES": warps * 32, "num_warps": warps, "enable_fp_fusion": False}
        return cls(blocks, rows_at_once, row_bytes, constants)


def _warps(programs: int, parts: int) -> int:
    """Warps of a program: more where there are few programs, but none without work."""
    wanted = MOST_WARPS if programs < PROGRAMS_THAT_FILL else FEWEST_WARPS
    return int(triton.next_power_of_2(max(1, min(wanted, parts))))


@triton.jit(do_not_specialize=["rows", "outputs"])
def product_kernel(
    data, scales, zeros, x, bias, out, rows, outputs, inputs, row_bytes,
    HAS_BIAS: tl.constexpr, LAYOUT: tl.constexpr, AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    output, row = tl.program_id(0) * OUTPUTS, tl.program_id(1) * ROWS
    multiply_rows(
        data, scales, zeros, x, bias, out, output, row, rows, outputs, inputs, row_bytes,
        HAS_BIAS, LAYOUT, AT_ONCE, ROWS, OUTPUTS, LANES,
    )  # fmt: skip


@triton.jit
def multiply_rows(
    data, scales, zeros, x, bias, out, output, row, rows, outputs, inputs, row_bytes,
    HAS_BIAS: tl.constexpr, LAYOUT: tl.constexpr, AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Some outputs from `output` on, times some rows from `row` on, of those before `rows`."""
    output, row = output + tl.arange(0, OUTPUTS), row + tl.arange(0, ROWS)
    own = tl.minimum(output, outputs - 1)[:, None]  # behind the last one it is repeated, and nothing of it is stored
    of_rows = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * inputs
    lane = tl.arange(0, LANES)
    of_lane = lane // LAYOUT.apart * (LAYOUT.apart * LAYOUT.words_together) + lane % LAYOUT.apart
    total = tl.zeros([ROWS, OUTPUTS, LANES], tl.float32)
    for first in range(0, tl.cdiv(inputs * LAYOUT.bits, 32), LANES * LAYOUT.words_together):
        word = (first + of_lane)[None, :]
        block = block_at(data, own, word, row_bytes, LAYOUT)
        if LAYOUT.has_halves:
            for half in tl.static_range(2):
                shared = shared_by(block, scales, zeros, own, word, inputs, half, LAYOUT, AT_ONCE)
                dots, of_x = _products(total, block, of_rows, word, inputs, half, half + 1, LAYOUT, AT_ONCE)
                total = _scaled(total, dots, of_x, shared, LAYOUT)
        else:
            dots, of_x = _products(total, block, of_rows, word, inputs, 0, 8 // LAYOUT.bits, LAYOUT, AT_ONCE)
            # last: scales that were loaded before would take registers while codes meet rows
            shared = shared_by(block, scales, zeros, own, word, inputs, 0, LAYOUT, AT_ONCE)
            total = _scaled(total, dots, of_x, shared, LAYOUT)
    sums = tl.sum(total, 2)
    if HAS_BIAS:
        sums += as_float32(bias + output, output < outputs)[None, :]
    there = (row < rows)[:, None] & (output < outputs)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * outputs + output[None, :], sums.to(out.dtype.element_ty), mask=there)


@triton.jit
def _products(
    total, block, x, word, inputs, FIRST: tl.constexpr, END: tl.constexpr, LAYOUT: tl.constexpr, AT_ONCE: tl.constexpr
):
    """The sums of the products of the codes of these halves of words (rows, outputs, lanes), and of the values of x (rows,
    lanes), for all words that share their scales."""
    dots, of_x = tl.zeros_like(total), tl.zeros([total.shape[0], total.shape[2]], tl.float32)
    together: tl.constexpr = LAYOUT.words_together
    for step in tl.static_range(together):
        own = word + step * LAYOUT.apart
        words = words_of(block, own, inputs, LAYOUT, AT_ONCE)
        upper = upper_of(block, own, inputs, LAYOUT, AT_ONCE) if LAYOUT.upper != "" else words
        for half in tl.static_range(FIRST, END):
            codes = codes_of(words, upper, half, LAYOUT)
            x_0, x_1, x_2, x_3 = _four(x, own, inputs, half, LAYOUT)
            dots = tl.fma(x_0[:, None, :], as_float(codes & 0xFF, LAYOUT)[None, :, :], dots)
            dots = tl.fma(x_1[:, None, :], as_float((codes >> 8) & 0xFF, LAYOUT)[None, :, :], dots)
            dots = tl.fma(x_2[:, None, :], as_float((codes >> 16) & 0xFF, LAYOUT)[None, :, :], dots)
            dots = tl.fma(x_3[:, None, :], as_float(codes >> 24, LAYOUT)[None, :, :], dots)
            if LAYOUT.has_minimum or LAYOUT.has_zeros:
                of_x += x_0 + x_1 + x_2 + x_3
    return dots, of_x


@triton.jit
def _scaled(total, dots, of_x, shared, LAYOUT: tl.constexpr):
    """Adds products of codes, with what the codes share."""
    scale, minimum, zero = shared
    if LAYOUT.has_zeros:
        dots = tl.fma(of_x[:, None, :], -zero[None, :, :], dots)
    total = tl.fma(dots, scale[None, :, :], total)
    if LAYOUT.has_minimum:
        total = tl.fma(of_x[:, None, :], minimum[None, :, :], total)
    return total


@triton.jit
def _four(x, word, inputs, HALF: tl.constexpr, LAYOUT: tl.constexpr):
    """The values of x that the four codes of a half are multiplied with, each (rows, lanes): x (rows, 1), word (1, lanes)."""
    if LAYOUT.takes_turns:
        x_0, x_1 = tl.split(_of_turn(_neighbours(x, word * 8, inputs), HALF))
        x_2, x_3 = tl.split(_of_turn(_neighbours(x, word * 8 + 4, inputs), HALF))
    else:
        even, odd = tl.split(_neighbours(x, first_input(word, HALF, LAYOUT), inputs))
        x_0, x_2 = tl.split(even)
        x_1, x_3 = tl.split(odd)
    return x_0, x_1, x_2, x_3


@triton.jit
def _neighbours(x, first, inputs):
    """Four values of x from `first` on: (rows, lanes, 2, 2)"""
    at = first[:, :, None] + tl.arange(0, 4)[None, None, :]
    values = as_float32(x[:, :, None] + at, at < inputs)
    return tl.reshape(values, [values.shape[0], values.shape[1], 2, 2])


@triton.jit
def _of_turn(four, HALF: tl.constexpr):
    """The first and the third of four, or the second and the last."""
    even, odd = tl.split(four)
    return even if HALF == 0 else odd
