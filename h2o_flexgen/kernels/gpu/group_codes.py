"""Values in groups of 4 or 8 bits, encoded and decoded: row by row, and in tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats.grouped import GROUP as GROUP_VALUES
from h2o_flexgen.formats.grouped import Grouped, Tiled, groups_of
from h2o_flexgen.kernels.gpu.codes import (
    GROUP,
    TILE,
    as_float32,
    bits_above,
    bits_below,
    is_finite,
    place_in_word,
    to_nearest,
    widened,
)
from h2o_flexgen.kernels.gpu.launching import Launch, Seen, kept_by_shape, launcher, seen

EXACTLY: Mapping[str, Any] = {"enable_fp_fusion": False}

# -- encode ----------------------------------------------------------------------------------------------------------------
# Values encoded with a group format in one launch, by rows or in tiles: the bytes that torch gives.

ROWS = 16  # that a program encodes a group of


def group_encode(format: Grouped, values: Tensor, out: Tensor) -> None:
    """Encodes values (rows, columns) into out (rows, bytes of a row)."""
    assert out.is_contiguous()
    if values.numel():
        encoding_of(format.bits, seen(values))(values, out)


@kept_by_shape
def encoding_of(bits: int, values: Seen) -> Launch:
    (rows, columns), strides, _ = values
    grid, whole = (triton.cdiv(rows, ROWS), groups_of(columns)), columns % GROUP_VALUES == 0
    return launcher(group_encode_kernel, grid, (rows, columns, *strides), BITS=bits, ROWS=ROWS, WHOLE=whole, **EXACTLY)


def tile_encode(format: Tiled, values: Tensor, out: Tensor) -> None:
    """Encodes values (outputs, columns) into out (tiles, bytes of a tile)."""
    assert out.is_contiguous()
    outputs, columns = values.shape
    if values.numel():
        grid, whole = (len(out), groups_of(columns)), columns % GROUP_VALUES == 0
        numbers = outputs, columns, *values.stride()
        launcher(tile_encode_kernel, grid, numbers, BITS=format.bits, WHOLE=whole, **EXACTLY)(values, out)


@triton.jit(do_not_specialize=["rows"])
def group_encode_kernel(
    values, out, rows, columns, row_stride, column_stride, BITS: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr
):
    of_group: tl.constexpr = GROUP * BITS // 32  # words
    group, groups = tl.program_id(1), tl.cdiv(columns, GROUP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    place = tl.arange(0, of_group)[:, None] * 4 + tl.arange(0, 4)[None, :]  # the byte of a value
    beginnings = values + row * row_stride
    low, high = _loaded(beginnings, row < rows, group, columns, column_stride, place, GROUP // 2, BITS, WHOLE)
    words, scale, minimum = encoded_groups(low, high, BITS, ROWS)
    own = out.to(tl.pointer_type(tl.uint32)) + row * (groups * (of_group + 1))
    there = row < rows
    tl.store((own + group * of_group)[:, None] + tl.arange(0, of_group)[None, :], words, mask=there[:, None])
    scales = (own + groups * of_group).to(tl.pointer_type(tl.uint16)) + group
    tl.store(scales, scale, mask=there)
    tl.store(scales + groups, minimum, mask=there)


@triton.jit(do_not_specialize=["outputs"])
def tile_encode_kernel(values, out, outputs, columns, row_stride, column_stride, BITS: tl.constexpr, WHOLE: tl.constexpr):
    of_group: tl.constexpr = GROUP * BITS // 32  # words
    of_block: tl.constexpr = TILE * (of_group + 1)
    tile, group, groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.cdiv(columns, GROUP)
    output, word = tl.arange(0, TILE), tl.arange(0, of_group)
    row = tile * TILE + output
    place = word[:, None] * (32 // BITS) + tl.arange(0, 4)[None, :]
    beginnings = values + row * row_stride
    low, high = _loaded(beginnings, row < outputs, group, columns, column_stride, place, 4, BITS, WHOLE)
    words, scale, minimum = encoded_groups(low, high, BITS, TILE)
    own = out.to(tl.pointer_type(tl.uint32)) + (tile * groups + group) * of_block
    tl.store(own + word[None, :] * TILE + output[:, None], words)
    scales = (own + of_group * TILE).to(tl.pointer_type(tl.uint16)) + output
    tl.store(scales, scale)
    tl.store(scales + TILE, minimum)


@triton.jit
def _loaded(rows, there, group, columns, stride, place, apart: tl.constexpr, BITS: tl.constexpr, WHOLE: tl.constexpr):
    """A group of some rows as float32: values at `place` (words, 4) have the lower codes of their bytes, and those `apart` from
    them the upper ones, if codes have 4 bits. Behind a row's last value it is repeated, which changes neither extreme; what is
    not there becomes zeros."""
    low = _values(rows, there, group * GROUP + place, columns, stride, WHOLE)
    high = _values(rows, there, group * GROUP + place + apart, columns, stride, WHOLE) if BITS == 4 else low
    return low, high


@triton.jit
def _values(rows, there, column, columns, stride, WHOLE: tl.constexpr):
    place = (column if WHOLE else tl.minimum(column, columns - 1)).to(tl.int64) * stride
    return as_float32(rows[:, None, None] + place[None, :, :], there[:, None, None])


@triton.jit
def encoded_groups(low, high, BITS: tl.constexpr, ROWS: tl.constexpr):
    """Values (rows, words, 4) with lower and upper codes -> words (rows, words), scales and minima (rows,)"""
    most: tl.constexpr = 2**BITS - 1
    strange = (low != low) | (high != high)
    least = tl.min(tl.min(tl.where(strange, 0.0, tl.minimum(low, high)), 2), 1) + 0.0  # adding 0.0 makes -0 positive
    minimum = bits_below(least)
    start = minimum.to(tl.float32, bitcast=True)[:, None, None]
    low, high = low - start, high - start
    largest = tl.max(tl.max(tl.where(strange, 0.0, tl.maximum(low, high)), 2), 1) + 0.0
    scale = bits_above(tl.div_rn(largest, tl.full((ROWS,), most, tl.float32)))
    lost = tl.max(tl.max(strange.to(tl.int32), 2), 1) > 0  # a group with a NaN or an infinity becomes NaN altogether
    lost = lost | ~is_finite(scale.to(tl.float32, bitcast=True)) | ~is_finite(minimum.to(tl.float32, bitcast=True))
    scale, minimum = tl.where(lost, 0, scale), tl.where(lost, 0x7FC00000, minimum)
    step = tl.where(scale == 0, 1.0, scale.to(tl.float32, bitcast=True))[:, None, None]  # a constant group has codes of 0
    codes = _codes(low, step, lost, most)
    if BITS == 4:
        codes = codes | _codes(high, step, lost, most) << 4
    byte = tl.arange(0, 4)[None, None, :].to(tl.uint32)
    return tl.sum(codes << byte * 8, 2).to(tl.uint32), (scale >> 16).to(tl.uint16), (minimum >> 16).to(tl.uint16)


@triton.jit
def _codes(values, step, lost, most: tl.constexpr):
    values = tl.where(lost[:, None, None], 0.0, values)
    code = to_nearest(tl.minimum(tl.div_rn(values, step + tl.zeros_like(values)), most))
    return code.to(tl.int32).to(tl.uint32)


# -- group decode ----------------------------------------------------------------------------------------------------------
# Values of a group format, decoded in one launch, bit for bit as in torch.

WORDS = 1024  # that a program reads
MOST_WORDS = 64  # of one row


def group_decode(format: Grouped, data: Tensor, out: Tensor) -> None:
    """Decodes data (rows, bytes of a row) into out (rows, columns)."""
    assert data.is_contiguous() and out.is_contiguous()
    if out.numel():
        decoding_of(format.bits, seen(out))(data, out)


@kept_by_shape
def decoding_of(bits: int, out: Seen) -> Launch:
    rows, columns = out[0]
    words = groups_of(columns) * Grouped(bits).code_bytes // 4
    of_row = min(MOST_WORDS, triton.next_power_of_2(words))
    at_once = WORDS // of_row
    grid = triton.cdiv(rows, at_once), triton.cdiv(words, of_row)
    return launcher(group_decode_kernel, grid, out[0], BITS=bits, ROWS=at_once, WORDS=of_row, **EXACTLY)


@triton.jit(do_not_specialize=["rows"])
def group_decode_kernel(data, out, rows, columns, BITS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    of_group: tl.constexpr = GROUP * BITS // 32  # words
    groups = tl.cdiv(columns, GROUP)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    word = (tl.program_id(1) * WORDS + tl.arange(0, WORDS))[None, :]
    group, there = word // of_group, (row < rows) & (word < groups * of_group)
    words = data.to(tl.pointer_type(tl.uint32)) + row * (groups * (of_group + 1))
    scales = (words + groups * of_group).to(tl.pointer_type(tl.uint16)) + group
    codes = tl.load(words + word, mask=there, other=0)
    scale = widened(tl.load(scales, mask=there, other=0))
    minimum = widened(tl.load(scales + groups, mask=there, other=0))
    first = group * GROUP + word % of_group * 4
    values = out + row * columns
    _store(values, first, columns, codes, scale, minimum, row < rows, BITS)
    if BITS == 4:
        _store(values, first + GROUP // 2, columns, codes >> 4, scale, minimum, row < rows, BITS)


@triton.jit
def _store(values, first, columns, codes, scale, minimum, there, BITS: tl.constexpr):
    """Stores the values of the lowest code of each byte, four to a word, from column `first` on."""
    byte = tl.arange(0, 4)[None, None, :]
    found = ((codes[:, :, None] >> byte * 8) & (2**BITS - 1)).to(tl.float32) * scale[:, :, None] + minimum[:, :, None]
    column = first[:, :, None] + byte
    tl.store(values[:, :, None] + column, found.to(values.dtype.element_ty), mask=there[:, :, None] & (column < columns))


# -- tile rows -------------------------------------------------------------------------------------------------------------
# Matrices in tiles decoded in one launch, all of them or some rows, bit for bit as in torch.

GROUPS = 4  # of a tile that a program decodes
GROUPS_OF_ROW = 8


def tile_decode(format: Tiled, data: Tensor, out: Tensor) -> None:
    """Decodes data (tiles, bytes of a tile) into out (outputs, columns)."""
    assert data.is_contiguous() and out.is_contiguous()
    if out.numel():
        tiles_of(format.bits, len(data), seen(out))(data, out)


@kept_by_shape
def tiles_of(bits: int, tiles: int, out: Seen) -> Launch:
    grid = tiles, triton.cdiv(groups_of(out[0][1]), GROUPS)
    return launcher(tile_decode_kernel, grid, out[0], BITS=bits, GROUPS=GROUPS, **EXACTLY)


def tile_decode_rows(format: Tiled, data: Tensor, numbers: Tensor, out: Tensor) -> None:
    """Decodes the outputs with these numbers (count,) of data (tiles, bytes of a tile) into out (count, columns)."""
    assert data.is_contiguous() and numbers.is_contiguous() and out.is_contiguous()
    if out.numel():
        rows_of_tiles(format.bits, seen(out))(data, out, numbers)


@kept_by_shape
def rows_of_tiles(bits: int, out: Seen) -> Launch:
    count, columns = out[0]
    grid = count, triton.cdiv(groups_of(columns), GROUPS_OF_ROW)
    return launcher(tile_decode_rows_kernel, grid, (columns,), BITS=bits, GROUPS=GROUPS_OF_ROW, **EXACTLY)


@triton.jit(do_not_specialize=["outputs"])
def tile_decode_kernel(data, out, outputs, columns, BITS: tl.constexpr, GROUPS: tl.constexpr):
    of_group: tl.constexpr = GROUP * BITS // 32  # words
    tile, groups = tl.program_id(0).to(tl.int64), tl.cdiv(columns, GROUP)
    word = tl.program_id(1) * (GROUPS * of_group) + tl.arange(0, GROUPS * of_group)
    output = tl.arange(0, TILE)
    found = _tile_values(data, tile, word[:, None], output[None, :], groups, BITS)
    place = word[:, None, None] * 32 // BITS + tl.arange(0, 32 // BITS)[None, None, :]
    rows = out + tile * TILE * columns + output[None, :, None] * columns.to(tl.int64)
    there = (tile * TILE + output < outputs)[None, :, None] & (place < columns)
    tl.store(rows + place, found.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize_on_alignment=["numbers"])
def tile_decode_rows_kernel(data, out, numbers, columns, BITS: tl.constexpr, GROUPS: tl.constexpr):
    of_group: tl.constexpr = GROUP * BITS // 32  # words
    row, groups = tl.program_id(0).to(tl.int64), tl.cdiv(columns, GROUP)
    number = tl.load(numbers + row)
    word = tl.program_id(1) * (GROUPS * of_group) + tl.arange(0, GROUPS * of_group)[:, None]
    output = tl.zeros([1, 1], tl.int32) + (number % TILE).to(tl.int32)
    found = _tile_values(data, number // TILE, word, output, groups, BITS)
    place = word[:, :, None] * 32 // BITS + tl.arange(0, 32 // BITS)[None, None, :]
    tl.store(out + row * columns + place, found.to(out.dtype.element_ty), mask=place < columns)


@triton.jit
def _tile_values(data, tile, word, output, groups, BITS: tl.constexpr):
    """The values of these words (words, 1) of these outputs (1, outputs) of a tile -> (words, outputs, codes of a word)"""
    of_group: tl.constexpr = GROUP * BITS // 32  # words
    of_block: tl.constexpr = TILE * (of_group + 1)
    block = data.to(tl.pointer_type(tl.uint32)) + tile * groups * of_block + word // of_group * of_block
    scales = (block + of_group * TILE).to(tl.pointer_type(tl.uint16)) + output
    there = (word < groups * of_group) & (output < TILE)
    words = tl.load(block + word % of_group * TILE + output, mask=there, other=0)
    scale = widened(tl.load(scales, mask=there, other=0))
    minimum = widened(tl.load(scales + TILE, mask=there, other=0))
    code = tl.arange(0, 32 // BITS)[None, None, :]
    codes = (words[:, :, None] >> place_in_word(code, BITS).to(tl.uint32)) & (2**BITS - 1)
    return codes.to(tl.float32) * scale[:, :, None] + minimum[:, :, None]
