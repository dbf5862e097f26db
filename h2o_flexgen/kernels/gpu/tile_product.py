"""The product of few rows and a transposed matrix in tiles of 4 or 8 bits, which is read once and never decoded to memory.

The codes of a word are multiplied with a row and summed up in float32; the sum is multiplied with the scale of their group, and
its minimum with the sum of the row's values. A program has the outputs of one tile and all inputs, which its threads share out
among each other: sums are added in an order that depends on shapes alone, and a row's outcome on nothing but row and matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats.grouped import TILE as TILE_OUTPUTS
from h2o_flexgen.formats.grouped import Tiled, groups_of
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.gpu.codes import GROUP, TILE, as_float32, widened
from h2o_flexgen.kernels.gpu.launching import Launch, Seen, Type, kept_by_shape, launcher, seen, type_of

AT_ONCE = 3  # matrices
ROWS_AT_ONCE = 4  # that meet a code while it is in a register
WORDS_OF_WARP = 16  # of an output, that a warp reads at once
MOST_WARPS, FEWEST_WARPS = 8, 4
PROGRAMS_THAT_FILL = 1024  # so many keep any GPU busy with few warps each


def tile_product(format: Tiled, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., inputs), data (tiles, bytes of a tile), bias (outputs,) -> (..., outputs)"""
    inputs = x.values.shape[-1]
    rows = x.values.reshape(-1, inputs).contiguous()
    out = rows.new_empty(rows.shape[0], outputs)
    if out.numel():
        launch = product_of(format.bits, seen(data), rows.shape, rows.dtype, outputs, type_of(bias))
        launch(data, rows, out if bias is None else bias, out)
    return out.view(*x.values.shape[:-1], outputs)


@kept_by_shape
def product_of(bits: int, data: Seen, shape: torch.Size, dtype: torch.dtype, outputs: int, bias: Type) -> Launch:
    (rows, inputs), format = shape, Tiled(bits)
    tiles = tiles_of(bits, data, outputs, inputs)
    warps = warps_of(tiles, groups_of(inputs) * format.as_rows.code_bytes // 4)
    at_once = min(ROWS_AT_ONCE, triton.next_power_of_2(rows))
    return launcher(
        tile_product_kernel,
        (tiles, triton.cdiv(rows, at_once)),
        (rows, outputs, inputs),
        HAS_BIAS=bias is not None,
        BITS=format.bits,
        ROWS=at_once,
        WORDS=warps * WORDS_OF_WARP,
        num_warps=warps,
    )


def tile_products(format: Tiled, x: Factor, matrices: Sequence[tuple[Tensor, int, Tensor | None]]) -> Sequence[Tensor]:
    """x (..., inputs) with two or three matrices, each with data (tiles, bytes of a tile), outputs and bias (outputs,) -> for
    each (..., outputs)"""
    shape = x.values.shape
    rows = x.values.reshape(-1, shape[-1]).contiguous()
    data, outputs, biases = zip(*matrices, strict=True)
    made = [rows.new_empty(rows.shape[0], each) for each in outputs]
    if made[0].numel():
        placed = [out if bias is None else bias for bias, out in zip(biases, made)]
        launch = products_of(format.bits, tuple(map(seen, data)), rows.shape, rows.dtype, outputs, tuple(map(type_of, biases)))
        three = (
            each if len(each) == AT_ONCE else (*each, each[-1]) for each in (data, placed, made)
        )  # one of two counts twice
        launch(*chain.from_iterable(three), rows)
    return [each.view(*shape[:-1], own) for each, own in zip(made, outputs)]


@kept_by_shape
def products_of(
    bits: int, data: tuple[Seen, ...], shape: torch.Size, dtype: torch.dtype, outputs: tuple[int, ...], biases: tuple[Type, ...]
) -> Launch:
    (rows, inputs), format = shape, Tiled(bits)
    tiles = [tiles_of(bits, its, own, inputs) for its, own in zip(data, outputs, strict=True)]
    warps = warps_of(sum(tiles), groups_of(inputs) * format.as_rows.code_bytes // 4)
    at_once = min(ROWS_AT_ONCE, triton.next_power_of_2(rows))
    return launcher(
        tile_products_kernel,
        (sum(tiles), triton.cdiv(rows, at_once)),
        (rows, *tiles[:2], *(*outputs, outputs[-1])[:AT_ONCE], inputs),
        HAS_BIAS=biases[0] is not None,
        BITS=format.bits,
        ROWS=at_once,
        WORDS=warps * WORDS_OF_WARP,
        num_warps=warps,
    )


def tiles_of(bits: int, data: Seen, outputs: int, inputs: int) -> int:
    """The tiles of a matrix, which lies in its bytes as it should."""
    tiles, tile_bytes = -(-outputs // TILE_OUTPUTS), Tiled(bits).tile_bytes(inputs)
    assert data[:2] == ((tiles, tile_bytes), (tile_bytes, 1)), data
    return tiles


def warps_of(programs: int, words: int) -> int:
    """Warps of a program that reads so many words of an output: more where there are few programs, but none without work."""
    wanted = MOST_WARPS if programs < PROGRAMS_THAT_FILL else FEWEST_WARPS
    return int(triton.next_power_of_2(max(1, min(wanted, words // WORDS_OF_WARP))))


@triton.jit(do_not_specialize=["rows", "outputs"])
def tile_product_kernel(
    data,
    x,
    bias,
    out,
    rows,
    outputs,
    inputs,
    HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    tile, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    multiply_tile(data, x, bias, out, tile, row, rows, outputs, inputs, HAS_BIAS, BITS, ROWS, WORDS)


@triton.jit(do_not_specialize=["rows", "outputs_0", "outputs_1", "outputs_2"])
def tile_products_kernel(
    data_0, data_1, data_2, bias_0, bias_1, bias_2, out_0, out_1, out_2, x,
    rows, tiles_0, tiles_1, outputs_0, outputs_1, outputs_2, inputs,
    HAS_BIAS: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The tiles of three matrices one behind the other, times the same rows."""
    data, bias, out, outputs, tile = data_0, bias_0, out_0, outputs_0, tl.program_id(0).to(tl.int64)
    if tile >= tiles_0 + tiles_1:
        data, bias, out, outputs, tile = data_2, bias_2, out_2, outputs_2, tile - tiles_0 - tiles_1
    elif tile >= tiles_0:
        data, bias, out, outputs, tile = data_1, bias_1, out_1, outputs_1, tile - tiles_0
    multiply_tile(data, x, bias, out, tile, tl.program_id(1) * ROWS, rows, outputs, inputs, HAS_BIAS, BITS, ROWS, WORDS)


@triton.jit
def multiply_tile(
    data, x, bias, out, tile, row, rows, outputs, inputs,
    HAS_BIAS: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One tile times one, two or four rows, the first of which is `row`, of those before `rows`."""
    of_group: tl.constexpr = GROUP * BITS // 32  # words
    of_word: tl.constexpr = 32 // BITS  # codes
    of_block: tl.constexpr = TILE * (of_group + 1)
    groups = tl.cdiv(inputs, GROUP)
    last = rows - 1
    own = data.to(tl.pointer_type(tl.uint32)) + tile * groups * of_block
    x_0, x_1 = _row(x, row, last, inputs), _row(x, row + 1, last, inputs)
    x_2, x_3 = _row(x, row + 2, last, inputs), _row(x, row + 3, last, inputs)
    output = tl.arange(0, TILE)
    sums_0 = tl.zeros([WORDS, TILE], tl.float32)
    sums_1, sums_2, sums_3 = sums_0, sums_0, sums_0
    for first in range(0, groups * of_group, WORDS):
        word = first + tl.arange(0, WORDS)[:, None]
        there = word < groups * of_group
        block = own + word // of_group * of_block
        words = tl.load(block + word % of_group * TILE + output[None, :], mask=there, other=0)
        scales = (block + of_group * TILE).to(tl.pointer_type(tl.uint16)) + output[None, :]
        scale = widened(tl.load(scales, mask=there, other=0))
        minimum = widened(tl.load(scales + TILE, mask=there, other=0))
        dots_0, of_x_0 = tl.zeros([WORDS, TILE], tl.float32), tl.zeros([WORDS, 1], tl.float32)
        dots_1, dots_2, dots_3, of_x_1, of_x_2, of_x_3 = dots_0, dots_0, dots_0, of_x_0, of_x_0, of_x_0
        for code in tl.static_range(of_word):
            at, codes = word * of_word + code, _in_place(words, code, BITS)
            dots_0, of_x_0 = _with_row(dots_0, of_x_0, codes, x_0, at, inputs, code, BITS)
            if ROWS >= 2:
                dots_1, of_x_1 = _with_row(dots_1, of_x_1, codes, x_1, at, inputs, code, BITS)
            if ROWS >= 4:
                dots_2, of_x_2 = _with_row(dots_2, of_x_2, codes, x_2, at, inputs, code, BITS)
                dots_3, of_x_3 = _with_row(dots_3, of_x_3, codes, x_3, at, inputs, code, BITS)
        sums_0 += dots_0 * scale + of_x_0 * minimum
        if ROWS >= 2:
            sums_1 += dots_1 * scale + of_x_1 * minimum
        if ROWS >= 4:
            sums_2 += dots_2 * scale + of_x_2 * minimum
            sums_3 += dots_3 * scale + of_x_3 * minimum
    _finish(out, bias, sums_0, row, rows, tile, outputs, HAS_BIAS)
    if ROWS >= 2:
        _finish(out, bias, sums_1, row + 1, rows, tile, outputs, HAS_BIAS)
    if ROWS >= 4:
        _finish(out, bias, sums_2, row + 2, rows, tile, outputs, HAS_BIAS)
        _finish(out, bias, sums_3, row + 3, rows, tile, outputs, HAS_BIAS)


@triton.jit
def _row(x, row, last, inputs):
    """The beginning of a row. Behind the last row that one is repeated, and nothing of it is stored."""
    return x + tl.minimum(row, last).to(tl.int64) * inputs


@triton.jit
def _in_place(words, code: tl.constexpr, BITS: tl.constexpr):
    """One code of each word as float32, times a power of two: it stays in its place, as bits of a large number. That takes two
    instructions, and no conversion."""
    place: tl.constexpr = code % 4 * 8 + code // 4 * 4 if BITS == 4 else code * 8
    codes = words >> 16 if place >= 16 else words
    large = (codes & ((2**BITS - 1) << (place % 16))) | 0x4B000000
    return large.to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _with_row(dots, of_x, codes, x, at, inputs, code: tl.constexpr, BITS: tl.constexpr):
    """Adds the products of codes in their place (words, outputs) with values that make up for it, and the values (words, 1)."""
    place: tl.constexpr = code % 4 * 8 + code // 4 * 4 if BITS == 4 else code * 8
    values = as_float32(x + at, at < inputs)
    return dots + codes * (values * (1.0 / 2 ** (place % 16))), of_x + values


@triton.jit
def _finish(out, bias, sums, row, rows, tile, outputs, HAS_BIAS: tl.constexpr):
    output = tile * TILE + tl.arange(0, TILE)
    total = tl.sum(sums, 0)
    if HAS_BIAS:
        total += as_float32(bias + output, output < outputs)
    end = tl.where(row < rows, outputs, 0)
    tl.store(out + row.to(tl.int64) * outputs + output, total.to(out.dtype.element_ty), mask=output < end)
