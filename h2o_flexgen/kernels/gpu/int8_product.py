"""Products of rows that are rounded to 8 bits, and tiles of 4 or 8 bits."""

from __future__ import annotations

from math import inf

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats.grouped import GROUP as GROUP_VALUES
from h2o_flexgen.formats.grouped import TILE as TILE_OUTPUTS
from h2o_flexgen.formats.grouped import Tiled, groups_of
from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.gpu.codes import GROUP, TILE, as_float32, place_in_word, to_nearest, widened
from h2o_flexgen.kernels.gpu.launching import Launch, Type, kept_by_shape, launcher, type_of
from h2o_flexgen.kernels.int8_product import LARGEST_CODE, NOTHING, Int8Rows

# -- int8 rows -------------------------------------------------------------------------------------------------------------
# Rows of x as int8 in one launch, with the bits that torch and C give.

GROUPS = 8  # of a row, that a program rounds
LARGEST, LEAST, INFINITE = tl.constexpr(float(LARGEST_CODE)), tl.constexpr(NOTHING), tl.constexpr(inf)


def int8_rows(values: Tensor) -> Int8Rows:
    """values (..., columns)"""
    x = values.reshape(-1, values.shape[-1]).contiguous()
    rows, columns = x.shape
    groups = groups_of(columns)
    scales, sums = (torch.empty(rows, groups, device=x.device) for _ in range(2))
    made = Int8Rows(torch.empty(rows, groups * GROUP_VALUES, dtype=torch.int8, device=x.device), scales, sums)
    if x.numel():
        rounding_of(x.shape, x.dtype)(x, *made)
    return made


@kept_by_shape
def rounding_of(shape: torch.Size, dtype: torch.dtype) -> Launch:
    rows, columns = shape
    grid = rows, triton.cdiv(groups_of(columns), GROUPS)
    return launcher(int8_rows_kernel, grid, (columns,), GROUPS=GROUPS, enable_fp_fusion=False)


@triton.jit
def int8_rows_kernel(values, codes, scales, sums, columns, GROUPS: tl.constexpr):
    row, groups = tl.program_id(0).to(tl.int64), tl.cdiv(columns, GROUP)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column, there = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], group < groups
    x = as_float32(values + row * columns + column, column < columns)
    strange = tl.max((x != x).to(tl.int32), 1) > 0
    most = tl.max(tl.where(x != x, 0.0, tl.abs(x)), 1)
    limit = tl.full((GROUPS,), LARGEST, tl.float32)
    is_some = (most >= LEAST) & (most < INFINITE) & ~strange
    divisor = tl.where(is_some, most, 1.0)
    inverse = tl.where(is_some, tl.div_rn(limit, divisor), 0.0)
    scale = tl.where(is_some, tl.div_rn(most, limit), tl.where((most < INFINITE) & ~strange, 0.0, float("nan")))
    code = to_nearest(tl.where(is_some[:, None], x * inverse[:, None], 0.0))
    tl.store(codes + row * groups * GROUP + column, code.to(tl.int8), mask=there[:, None])
    tl.store(scales + row * groups + group, scale, mask=there)
    tl.store(sums + row * groups + group, scale * tl.sum(code, 1), mask=there)


# -- int8 product ----------------------------------------------------------------------------------------------------------
# The product of rows of int8 and a transposed matrix in tiles of 4 or 8 bits, with the bits that torch and C give. Dot
# products of a group are whole numbers below 2 ** 24, of factors that float16 holds: matrix units add them up exactly in
# any order, also those of GPUs that have none for int8. Floats follow group behind group, every operation rounded by
# itself, so that inputs are not shared out among threads: a program has some outputs of some rows.

FEW, MANY = (16, TILE_OUTPUTS, 1), (32, 64, 8)  # rows, outputs and warps of a program


def int8_product(format: Tiled, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """x (..., columns), data (tiles, bytes of a tile), bias (outputs,) -> (..., outputs)"""
    assert data.shape == (-(-outputs // TILE_OUTPUTS), format.tile_bytes(x.values.shape[-1])) and data.is_contiguous()
    out = x.values.new_empty(x.rows, outputs)
    if out.numel():
        made = x.made(int8_rows)
        launch = product_of(format.bits, made.scales.shape, out.shape, out.dtype, type_of(bias))
        launch(data, *made, out if bias is None else bias, out)
    return out.view(*x.values.shape[:-1], outputs)


@kept_by_shape
def product_of(bits: int, groups: torch.Size, shape: torch.Size, dtype: torch.dtype, bias: Type) -> Launch:
    rows, outputs = shape
    rows_at_once, outputs_at_once, warps = FEW if rows <= FEW[0] else MANY
    return launcher(
        int8_product_kernel,
        (triton.cdiv(outputs, outputs_at_once), triton.cdiv(rows, rows_at_once)),
        (rows, outputs, groups[1]),
        HAS_BIAS=bias is not None,
        BITS=bits,
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
