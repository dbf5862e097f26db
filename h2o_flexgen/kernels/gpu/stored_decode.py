"""Matrices in a checkpoint's own forms decoded in one launch, all rows or some of them, bit for bit as in torch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.kernels.gpu.stored_forms import FORMS
from h2o_flexgen.kernels.gpu.stored_values import as_float, block_of, codes_of, first_input, shared_of, upper_of, word_at

WORDS = 512  # that a program reads
MOST_WORDS = 128  # of one row


def stored_decode(codec, data: Tensor, out: Tensor) -> None:
    form = FORMS[codec.name]
    rows, columns = out.shape
    words = -(-columns * form.bits // 32)
    of_row = min(MOST_WORDS, triton.next_power_of_2(words))
    at_once = WORDS // of_row
    grid = triton.cdiv(rows, at_once), triton.cdiv(words, of_row)
    decode_kernel[grid](data, out, rows, columns, data.shape[1], form, 4 if form.block_bytes % 4 == 0 else 2 if form.block_bytes % 2 == 0 else 1, at_once, of_row, enable_fp_fusion=False)


@triton.jit(do_not_specialize=["rows"])
def decode_kernel(
    data, out, rows, columns, row_bytes, FORM: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    word = (tl.program_id(1) * WORDS + tl.arange(0, WORDS))[None, :]
    there = (row < rows) & (word * (32 // FORM.bits) < columns)
    block = block_of(data, row, word, row_bytes, FORM)
    words = word_at(block + FORM.codes_at + word % FORM.block_words * 4, there, WORD)
    upper = upper_of(block, word, there, WORD, FORM) if FORM.upper != "" else words
    for half in tl.static_range(8 // FORM.bits):
        scale, minimum = shared_of(block, word, there, half, FORM)
        codes = codes_of(words, upper, half, FORM)
        byte = tl.arange(0, 4)[None, None, :]
        code = (codes[:, :, None] >> (byte * 8).to(tl.uint32)) & 0xFF
        values = as_float(code, FORM) * scale[:, :, None]
        if FORM.has_minimum:
            values += minimum[:, :, None]
        column = first_input(word, half, FORM)[:, :, None] + byte
        tl.store(out + row[:, :, None] * columns + column, values.to(out.dtype.element_ty), mask=there[:, :, None] & (column < columns))
