"""Values of a group format, decoded in one launch, bit for bit as in torch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats.grouped import Grouped, groups_of
from h2o_flexgen.kernels.gpu.codes import GROUP, widened

WORDS = 1024  # that a program reads
MOST_WORDS = 64  # of one row


def group_decode(format: Grouped, data: Tensor, out: Tensor) -> None:
    """Decodes data (rows, bytes of a row) into out (rows, columns)."""
    assert data.is_contiguous() and out.is_contiguous()
    rows, columns = out.shape
    if not out.numel():
        return
    words = groups_of(columns) * format.code_bytes // 4
    of_row = min(MOST_WORDS, triton.next_power_of_2(words))
    at_once = WORDS // of_row
    grid = triton.cdiv(rows, at_once), triton.cdiv(words, of_row)
    group_decode_kernel[grid](data, out, rows, columns, format.bits, at_once, of_row, enable_fp_fusion=False)


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
