"""The product of rows of int8 and a transposed matrix in tiles of 4 or 8 bits, with the bits that torch and C give.

Dot products of a group are whole numbers below 2 ** 24, of factors that float16 holds: matrix units add them up exactly in any
order, also those of GPUs that have none for int8. Floats follow group behind group, every operation rounded by itself, so that
inputs are not shared out among threads: a program has some outputs of some rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats.tiled import TILE as TILE_OUTPUTS
from h2o_flexgen.formats.tiled import Tiled
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.gpu.codes import GROUP, TILE, as_float32, place_in_word, widened
from h2o_flexgen.kernels.gpu.int8_rows import int8_rows
from h2o_flexgen.kernels.int8_rows import Int8Rows

FEW, MANY = (16, TILE_OUTPUTS, 1), (32, 64, 8)  # rows, outputs and warps of a program


def int8_product(format: Tiled, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., columns), data (tiles, bytes of a tile), bias (outputs,) -> (..., outputs)"""
    assert data.shape == (-(-outputs // TILE_OUTPUTS), format.tile_bytes(x.values.shape[-1])) and data.is_contiguous()
    out = x.values.new_empty(x.rows, outputs)
    if out.numel():
        _launch(format, x.made(int8_rows), data, bias, out)
    return out.view(*x.values.shape[:-1], outputs)


def _launch(format: Tiled, x: Int8Rows, data: Tensor, bias: Tensor | None, out: Tensor) -> None:
    rows, outputs = out.shape
    rows_at_once, outputs_at_once, warps = FEW if rows <= FEW[0] else MANY
    int8_product_kernel[triton.cdiv(outputs, outputs_at_once), triton.cdiv(rows, rows_at_once)](
        *(data, *x, out if bias is None else bias, out),
        *(rows, outputs, x.scales.shape[1]),
        HAS_BIAS=bias is not None,
        BITS=format.bits,
        ROWS=rows_at_once,
        OUTPUTS=outputs_at_once,
        num_warps=warps,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["rows", "outputs"])
def int8_product_kernel(
    data,
    codes,
    scales,
    sums,
    bias,
    out,
    rows,
    outputs,
    groups,
    HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    of_group: tl.constexpr = GROUP * BITS // 32  # words
    of_block: tl.constexpr = TILE * (of_group + 1)
    tile = tl.program_id(0).to(tl.int64) * (OUTPUTS // TILE)
    own = data.to(tl.pointer_type(tl.uint32)) + tile * groups * of_block
    output, word = tl.arange(0, OUTPUTS), tl.arange(0, of_group)
    beginnings = output // TILE * (groups * of_block)
    is_output = tile * TILE + output < outputs
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    is_row = row < rows
    place = tl.arange(0, GROUP)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for group in range(groups):
        block = own + beginnings + group * of_block
        words = tl.load((block + output % TILE)[:, None] + word[None, :] * TILE, mask=is_output[:, None], other=0)
        shared = (block + of_group * TILE).to(tl.pointer_type(tl.uint16)) + output % TILE
        scale = widened(tl.load(shared, mask=is_output, other=0))
        minimum = widened(tl.load(shared + TILE, mask=is_output, other=0))
        x = tl.load(codes + (row * groups + group)[:, None] * GROUP + place[None, :], mask=is_row[:, None], other=0)
        x_scale = tl.load(scales + row * groups + group, mask=is_row, other=0.0)
        x_sum = tl.load(sums + row * groups + group, mask=is_row, other=0.0)
        dots = _dots(x, words, BITS, OUTPUTS)
        total += dots * x_scale[:, None] * scale[None, :] + x_sum[:, None] * minimum[None, :]
    at = tile * TILE + output
    if HAS_BIAS:
        total += as_float32(bias + at, is_output)[None, :]
    there = is_row[:, None] & is_output[None, :]
    tl.store(out + row[:, None] * outputs + at[None, :], total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _dots(x, words, BITS: tl.constexpr, OUTPUTS: tl.constexpr):
    """x (rows, 64), words (outputs, words) -> (rows, outputs)"""
    code = tl.arange(0, 32 // BITS)[None, None, :]
    codes = (words[:, :, None] >> place_in_word(code, BITS).to(tl.uint32)) & (2**BITS - 1)
    return tl.dot(x.to(tl.float16), tl.trans(tl.reshape(codes.to(tl.float16), [OUTPUTS, GROUP])))
