"""Matrices in tiles decoded in one launch, all of them or some rows, bit for bit as in torch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats.grouped import groups_of
from h2o_flexgen.formats.tiled import Tiled
from h2o_flexgen.kernels.gpu.codes import GROUP, TILE, place_in_word, widened

GROUPS = 4  # of a tile that a program decodes
GROUPS_OF_ROW = 8


def tile_decode(format: Tiled, data: Tensor, out: Tensor) -> None:
    """Decodes data (tiles, bytes of a tile) into out (outputs, columns)."""
    assert data.is_contiguous() and out.is_contiguous()
    outputs, columns = out.shape
    if out.numel():
        grid = len(data), triton.cdiv(groups_of(columns), GROUPS)
        tile_decode_kernel[grid](data, out, outputs, columns, format.bits, GROUPS, enable_fp_fusion=False)


def tile_decode_rows(format: Tiled, data: Tensor, numbers: Tensor, out: Tensor) -> None:
    """Decodes the outputs with these numbers (count,) of data (tiles, bytes of a tile) into out (count, columns)."""
    assert data.is_contiguous() and numbers.is_contiguous() and out.is_contiguous()
    if out.numel():
        grid = len(out), triton.cdiv(groups_of(out.shape[1]), GROUPS_OF_ROW)
        tile_decode_rows_kernel[grid](data, numbers, out, out.shape[1], format.bits, GROUPS_OF_ROW, enable_fp_fusion=False)


@triton.jit(do_not_specialize=["outputs"])
def tile_decode_kernel(data, out, outputs, columns, BITS: tl.constexpr, GROUPS: tl.constexpr):
    of_group: tl.constexpr = GROUP * BITS // 32  # words
    tile, groups = tl.program_id(0).to(tl.int64), tl.cdiv(columns, GROUP)
    word = tl.program_id(1) * (GROUPS * of_group) + tl.arange(0, GROUPS * of_group)
    output = tl.arange(0, TILE)
    found = _values(data, tile, word[:, None], output[None, :], groups, BITS)
    place = word[:, None, None] * 32 // BITS + tl.arange(0, 32 // BITS)[None, None, :]
    rows = out + tile * TILE * columns + output[None, :, None] * columns.to(tl.int64)
    there = (tile * TILE + output < outputs)[None, :, None] & (place < columns)
    tl.store(rows + place, found.to(out.dtype.element_ty), mask=there)


@triton.jit
def tile_decode_rows_kernel(data, numbers, out, columns, BITS: tl.constexpr, GROUPS: tl.constexpr):
    of_group: tl.constexpr = GROUP * BITS // 32  # words
    row, groups = tl.program_id(0).to(tl.int64), tl.cdiv(columns, GROUP)
    number = tl.load(numbers + row)
    word = tl.program_id(1) * (GROUPS * of_group) + tl.arange(0, GROUPS * of_group)[:, None]
    output = tl.zeros([1, 1], tl.int32) + (number % TILE).to(tl.int32)
    found = _values(data, number // TILE, word, output, groups, BITS)
    place = word[:, :, None] * 32 // BITS + tl.arange(0, 32 // BITS)[None, None, :]
    tl.store(out + row * columns + place, found.to(out.dtype.element_ty), mask=place < columns)


@triton.jit
def _values(data, tile, word, output, groups, BITS: tl.constexpr):
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
