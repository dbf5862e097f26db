"""The product of some rows and a transposed matrix in tiles of 4 bits on tensor cores, which reads the bytes once.

Values are decoded in registers and rounded to the type of the rows, as decoding to memory rounds them; sums are in float32. The
matrix is the factor on the left: outputs are what tensor cores have most of, and rows are few. They multiply 16 inputs at once,
of which a thread holds pairs that are 8 apart. So inputs of a group are taken in an order of their own (`place_of_input`): a
thread's codes are those of whole words then, and no code passes to another thread.

Where a matrix has few outputs, several programs share out its inputs, and a second launch adds up what they give, in their
order. How many there are depends on the matrix alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats.grouped import TILE as TILE_OUTPUTS
from h2o_flexgen.formats.grouped import Tiled, groups_of
from h2o_flexgen.formats.kernel_sizes import DOT_OUTPUTS, DOT_PROGRAMS
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.gpu.codes import GROUP, TILE, as_float32, widened
from h2o_flexgen.kernels.gpu.launching import Launch, Seen, Type, kept_by_shape, launcher, seen, type_of
from h2o_flexgen.kernels.gpu.tile_product import tiles_of

BITS = 4
ROWS, MOST_BLOCKS = 16, 4  # of a block; of a program
LEAST_GROUPS = 8  # of inputs, for each of those that share them out
JOINED = 512  # outputs that a program adds up
WARPS, STAGES = 4, 3


class _Product(NamedTuple):
    """The launches of a product, and among how many programs the first shares out inputs."""

    multiply: Launch
    join: Launch | None  # None: the first one makes the outcome
    parts: int


def tile_dots(format: Tiled, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., inputs), data (tiles, bytes of a tile), bias (outputs,) -> (..., outputs)"""
    rows = x.values.reshape(-1, x.values.shape[-1]).contiguous()
    out = rows.new_empty(rows.shape[0], outputs)
    if out.numel():
        multiply, join, parts = product_of(format.bits, seen(data), rows.shape, rows.dtype, outputs, type_of(bias))
        added = out if bias is None else bias
        if join is None:
            multiply(data, rows, added, out)
        else:
            made = torch.empty(parts, *out.shape, dtype=torch.float32, device=out.device)
            multiply(data, rows, added, made)
            join(made, added, out)
    return out.view(*x.values.shape[:-1], outputs)


@kept_by_shape
def product_of(bits: int, data: Seen, shape: torch.Size, dtype: torch.dtype, outputs: int, bias: Type) -> _Product:
    assert bits == BITS, f"tiles of {bits} bits have words of another kind"
    (rows, inputs), programs = shape, triton.cdiv(tiles_of(bits, data, outputs, shape[1]) * TILE_OUTPUTS, DOT_OUTPUTS)
    blocks = min(MOST_BLOCKS, triton.next_power_of_2(triton.cdiv(rows, ROWS)))
    of_part = groups_of_part(groups_of(inputs), programs)
    parts = triton.cdiv(groups_of(inputs), of_part)
    multiply = launcher(
        tile_dots_kernel,
        (programs, triton.cdiv(rows, ROWS * blocks), parts),
        (rows, outputs, inputs, of_part),
        HAS_BIAS=bias is not None and parts == 1,
        BLOCKS=blocks,
        ROWS=ROWS,
        OUTPUTS=DOT_OUTPUTS,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    if parts == 1:
        return _Product(multiply, None, parts)
    grid, has_bias = (triton.cdiv(outputs, JOINED), rows), bias is not None
    join = launcher(join_parts_kernel, grid, (rows, outputs, parts), HAS_BIAS=has_bias, OUTPUTS=JOINED)
    return _Product(multiply, join, parts)


def groups_of_part(groups: int, programs: int) -> int:
    """The groups of inputs that a program multiplies."""
    parts = max(1, min(DOT_PROGRAMS // programs, groups // LEAST_GROUPS))
    return -(-groups // parts)


@triton.jit(do_not_specialize=["rows", "outputs", "of_part"])
def tile_dots_kernel(
    data, x, bias, made, rows, outputs, inputs, of_part,
    HAS_BIAS: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """One, two or four blocks of rows, each by itself: warps would otherwise share out rows, and decode the same values."""
    of_group: tl.constexpr = GROUP // 8  # words
    of_block: tl.constexpr = TILE * (of_group + 1)
    tile, row, part = tl.program_id(0).to(tl.int64) * (OUTPUTS // TILE), tl.program_id(1) * (ROWS * BLOCKS), tl.program_id(2)
    groups = tl.cdiv(inputs, GROUP)
    output, word = tl.arange(0, OUTPUTS), tl.arange(0, of_group)
    is_there = tile + output // TILE < tl.cdiv(outputs, TILE)  # tiles are whole, so that outputs are read side by side
    own = data.to(tl.pointer_type(tl.uint32)) + tile * groups * of_block + output // TILE * (groups * of_block)
    place = place_of_input(tl.arange(0, GROUP))
    total_0 = tl.zeros([OUTPUTS, ROWS], tl.float32)
    total_1, total_2, total_3 = total_0, total_0, total_0
    for group in range(part * of_part, tl.minimum(part * of_part + of_part, groups)):
        block = own + group * of_block
        words = tl.load((block + output % TILE)[:, None] + word[None, :] * TILE, mask=is_there[:, None], other=0)
        shared = (block + of_group * TILE).to(tl.pointer_type(tl.uint16)) + output % TILE
        scale = widened(tl.load(shared, mask=is_there, other=0))
        least = widened(tl.load(shared + TILE, mask=is_there, other=0))
        decoded, input = _decoded(words, scale, least).to(x.dtype.element_ty), place + group * GROUP
        total_0 = _with_rows(total_0, decoded, x, row, rows, input, inputs)
        if BLOCKS >= 2:
            total_1 = _with_rows(total_1, decoded, x, row + ROWS, rows, input, inputs)
        if BLOCKS >= 4:
            total_2 = _with_rows(total_2, decoded, x, row + 2 * ROWS, rows, input, inputs)
            total_3 = _with_rows(total_3, decoded, x, row + 3 * ROWS, rows, input, inputs)
    at, out = tile * TILE + output, made + part.to(tl.int64) * rows * outputs
    _finish(out, bias, total_0, row, rows, at, outputs, HAS_BIAS)
    if BLOCKS >= 2:
        _finish(out, bias, total_1, row + ROWS, rows, at, outputs, HAS_BIAS)
    if BLOCKS >= 4:
        _finish(out, bias, total_2, row + 2 * ROWS, rows, at, outputs, HAS_BIAS)
        _finish(out, bias, total_3, row + 3 * ROWS, rows, at, outputs, HAS_BIAS)


@triton.jit
def _with_rows(total, decoded, x, row, rows, input, inputs):
    """Adds the products of values (outputs, 64) with rows that begin with this one."""
    number = row + tl.arange(0, total.shape[1])
    there = (number < rows)[None, :] & (input < inputs)[:, None]
    return tl.dot(decoded, tl.load(x + number.to(tl.int64)[None, :] * inputs + input[:, None], mask=there, other=0.0), total)


@triton.jit
def _finish(out, bias, total, row, rows, at, outputs, HAS_BIAS: tl.constexpr):
    number = row + tl.arange(0, total.shape[1])
    if HAS_BIAS:
        total += as_float32(bias + at, at < outputs)[:, None]
    there = (at < outputs)[:, None] & (number < rows)[None, :]
    tl.store(out + number.to(tl.int64)[None, :] * outputs + at[:, None], total.to(out.dtype.element_ty), mask=there)


@triton.jit
def place_of_input(number):
    """The input of a group that tensor cores meet as the one with this number. Of a number's six bits, two say which of four
    threads holds it; to that thread it brings the rest, which are a word and a code of it."""
    return number // 32 * 32 + number // 2 % 4 * 8 + number // 16 % 2 * 4 + number // 8 % 2 * 2 + number % 2


@triton.jit
def _decoded(words, scale, least):
    """The values of words (outputs, 8) in that order, (outputs, 64), in float32. A code stays in its place, as bits of a large
    number, and the scale makes up for it."""
    outputs: tl.constexpr = words.shape[0]
    bit = tl.arange(0, 2)
    lower, middle = bit[None, None, None, None, None, :], bit[None, None, None, :, None, None]
    upper = bit[None, None, :, None, None, None]
    halves = tl.reshape(words, [outputs, 2, 1, 1, 4, 1]) >> (middle * 16).to(tl.uint32)
    place = lower * 8 + upper * 4
    large = (halves & (15 << place).to(tl.uint32)) | 0x4B000000
    codes = large.to(tl.float32, bitcast=True) - 8388608.0
    step = tl.where(lower == 0, 1.0, 1.0 / 256) * tl.where(upper == 0, 1.0, 1.0 / 16)
    scales = tl.reshape(scale, [outputs, 1, 1, 1, 1, 1]) * step
    return tl.reshape(codes * scales + tl.reshape(least, [outputs, 1, 1, 1, 1, 1]), [outputs, GROUP])


@triton.jit(do_not_specialize=["rows", "parts"])
def join_parts_kernel(made, bias, out, rows, outputs, parts, HAS_BIAS: tl.constexpr, OUTPUTS: tl.constexpr):
    output, row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1).to(tl.int64)
    there = output < outputs
    total = tl.zeros([OUTPUTS], tl.float32)
    for part in range(parts):
        total += tl.load(made + (part * rows + row) * outputs + output, mask=there, other=0.0)
    if HAS_BIAS:
        total += as_float32(bias + output, there)
    tl.store(out + row * outputs + output, total.to(out.dtype.element_ty), mask=there)
