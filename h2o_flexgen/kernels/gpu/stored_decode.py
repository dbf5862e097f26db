"""Matrices in a checkpoint's own formats decoded in one launch, bit for bit as in torch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.kernels.gpu.stored_layout import layout_of, load_bytes, parts_of
from h2o_flexgen.kernels.gpu.stored_values import as_float, block_at, codes_of, first_input, shared_by, upper_of, words_of
from h2o_flexgen.kernels.stored_values import Stored

WORDS = 512  # that a program reads
MOST_WORDS = 128  # of one row


def stored_decode(format: Stored, data: Tensor, out: Tensor) -> None:
    """Decodes data (rows, bytes of a row), or (1, bytes) of a format in sections, into out (rows, columns)."""
    assert out.is_contiguous()
    if not out.numel():
        return
    (rows, columns), layout = out.shape, layout_of(format)
    parts = parts_of(format, data, rows, columns)
    words, row_bytes = triton.cdiv(columns * layout.bits, 32), layout.row_bytes(columns)
    of_row = min(MOST_WORDS, triton.next_power_of_2(words))
    at_once = WORDS // of_row
    decode_kernel[triton.cdiv(rows, at_once), triton.cdiv(words, of_row)](
        *(*parts, out, rows, columns, row_bytes),
        *(layout, load_bytes(layout, parts, row_bytes), at_once, of_row),
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["rows"])
def decode_kernel(
    data,
    scales,
    zeros,
    order,
    out,
    rows,
    columns,
    row_bytes,
    LAYOUT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    own, is_row = tl.minimum(row, rows - 1), (row < rows)[:, :, None]
    word = (tl.program_id(1) * WORDS + tl.arange(0, WORDS))[None, :]
    block = block_at(data, own, word, row_bytes, LAYOUT)
    words = words_of(block, word, columns, LAYOUT, AT_ONCE)
    upper = upper_of(block, word, columns, LAYOUT, AT_ONCE) if LAYOUT.upper != "" else words
    beginning = out + row[:, :, None] * columns
    if LAYOUT.takes_turns:
        low = _values(words, upper, block, scales, zeros, own, word, columns, 0, LAYOUT, AT_ONCE)
        high = _values(words, upper, block, scales, zeros, own, word, columns, 1, LAYOUT, AT_ONCE)
        column = word[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        there = column < columns
        if LAYOUT.is_ordered:
            column = tl.load(order + column, mask=there, other=-1)
            there = (column >= 0) & (column < columns)  # what names no input is written nowhere
        values = tl.reshape(tl.join(low, high), [ROWS, WORDS, 8])
        tl.store(beginning + column, values.to(out.dtype.element_ty), mask=is_row & there)
    else:
        for half in tl.static_range(8 // LAYOUT.bits):
            values = _values(words, upper, block, scales, zeros, own, word, columns, half, LAYOUT, AT_ONCE)
            column = first_input(word, half, LAYOUT)[:, :, None] + tl.arange(0, 4)[None, None, :]
            tl.store(beginning + column, values.to(out.dtype.element_ty), mask=is_row & (column < columns))


@triton.jit
def _values(
    words, upper, block, scales, zeros, row, word, columns, HALF: tl.constexpr, LAYOUT: tl.constexpr, AT_ONCE: tl.constexpr
):
    """The values of the four codes of a half: (rows, words, 4)"""
    scale, minimum, zero = shared_by(block, scales, zeros, row, word, columns, HALF, LAYOUT, AT_ONCE)
    byte = tl.arange(0, 4)[None, None, :]
    codes = codes_of(words, upper, HALF, LAYOUT)
    values = as_float((codes[:, :, None] >> (byte * 8).to(tl.uint32)) & 0xFF, LAYOUT)
    if LAYOUT.has_zeros:
        values -= zero[:, :, None]
    values *= scale[:, :, None]
    if LAYOUT.has_minimum:
        values += minimum[:, :, None]
    return values
