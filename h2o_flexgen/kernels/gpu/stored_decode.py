"""Matrices in a checkpoint's own forms decoded in one launch, bit for bit as in torch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.kernels.gpu.stored_forms import form_of, load_bytes, parts_of
from h2o_flexgen.kernels.gpu.stored_values import as_float, block_at, codes_of, first_input, shared_by, upper_of, words_of
from h2o_flexgen.kernels.stored_matrix import Stored

WORDS = 512  # that a program reads
MOST_WORDS = 128  # of one row


def stored_decode(codec: Stored, data: Tensor, out: Tensor) -> None:
    """Decodes data (rows, bytes of a row), or (1, bytes) of a form in sections, into out (rows, columns)."""
    assert out.is_contiguous()
    if not out.numel():
        return
    (rows, columns), form = out.shape, form_of(codec)
    parts = parts_of(codec, data, rows, columns)
    words, row_bytes = triton.cdiv(columns * form.bits, 32), form.row_bytes(columns)
    of_row = min(MOST_WORDS, triton.next_power_of_2(words))
    at_once = WORDS // of_row
    decode_kernel[triton.cdiv(rows, at_once), triton.cdiv(words, of_row)](
        *(*parts, out, rows, columns, row_bytes),
        *(form, load_bytes(form, parts, row_bytes), at_once, of_row),
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
    FORM: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    own, is_row = tl.minimum(row, rows - 1), (row < rows)[:, :, None]
    word = (tl.program_id(1) * WORDS + tl.arange(0, WORDS))[None, :]
    block = block_at(data, own, word, row_bytes, FORM)
    words = words_of(block, word, columns, FORM, AT_ONCE)
    upper = upper_of(block, word, columns, FORM, AT_ONCE) if FORM.upper != "" else words
    beginning = out + row[:, :, None] * columns
    if FORM.takes_turns:
        low = _values(words, upper, block, scales, zeros, own, word, columns, 0, FORM, AT_ONCE)
        high = _values(words, upper, block, scales, zeros, own, word, columns, 1, FORM, AT_ONCE)
        column = word[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        there = column < columns
        if FORM.is_ordered:
            column = tl.load(order + column, mask=there, other=-1)
            there = (column >= 0) & (column < columns)  # what names no input is written nowhere
        values = tl.reshape(tl.join(low, high), [ROWS, WORDS, 8])
        tl.store(beginning + column, values.to(out.dtype.element_ty), mask=is_row & there)
    else:
        for half in tl.static_range(8 // FORM.bits):
            values = _values(words, upper, block, scales, zeros, own, word, columns, half, FORM, AT_ONCE)
            column = first_input(word, half, FORM)[:, :, None] + tl.arange(0, 4)[None, None, :]
            tl.store(beginning + column, values.to(out.dtype.element_ty), mask=is_row & (column < columns))


@triton.jit
def _values(
    words, upper, block, scales, zeros, row, word, columns, HALF: tl.constexpr, FORM: tl.constexpr, AT_ONCE: tl.constexpr
):
    """The values of the four codes of a half: (rows, words, 4)"""
    scale, minimum, zero = shared_by(block, scales, zeros, row, word, columns, HALF, FORM, AT_ONCE)
    byte = tl.arange(0, 4)[None, None, :]
    codes = codes_of(words, upper, HALF, FORM)
    values = as_float((codes[:, :, None] >> (byte * 8).to(tl.uint32)) & 0xFF, FORM)
    if FORM.has_zeros:
        values -= zero[:, :, None]
    values *= scale[:, :, None]
    if FORM.has_minimum:
        values += minimum[:, :, None]
    return values
