"""Rows of x as int8 in one launch, with the bits that torch and C give."""

from __future__ import annotations

from math import inf

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats.grouped import GROUP as GROUP_VALUES
from h2o_flexgen.formats.grouped import groups_of
from h2o_flexgen.kernels.gpu.codes import GROUP, as_float32, to_nearest
from h2o_flexgen.kernels.int8_rows import LARGEST_CODE, NOTHING, Int8Rows

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
        int8_rows_kernel[rows, triton.cdiv(groups, GROUPS)](x, *made, columns, GROUPS, enable_fp_fusion=False)
    return made


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
