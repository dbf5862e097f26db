"""The product of few rows and a transposed matrix in a form of a checkpoint's own, which is read once and never decoded to memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.gpu.codes import as_float32
from h2o_flexgen.kernels.gpu.stored_forms import FORMS
from h2o_flexgen.kernels.gpu.stored_values import as_float, block_of, codes_of, first_input, shared_of, upper_of, word_at

ROWS_AT_ONCE = 4
OUTPUTS = 8
MOST_WARPS = 4


def stored_product(codec, x: Factor, data: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    inputs = x.values.shape[-1]
    rows = x.values.reshape(-1, inputs).contiguous()
    out = rows.new_empty(len(rows), outputs)
    if out.numel():
        _launch(codec, rows, data, bias, out)
    return out.view(*x.values.shape[:-1], outputs)


def _launch(codec, rows, data, bias, out) -> None:
    form = FORMS[codec.name]
    threads = -(-rows.shape[1] * form.bits // 32) // form.at_once
    warps = triton.next_power_of_2(max(1, min(MOST_WARPS, threads // 32)))
    at_once = min(ROWS_AT_ONCE, triton.next_power_of_2(len(rows)))
    product_kernel[triton.cdiv(out.shape[1], OUTPUTS), triton.cdiv(len(rows), at_once)](
        *(data, rows, out if bias is None else bias, out),
        *(len(rows), out.shape[1], rows.shape[1], data.shape[1]),
        HAS_BIAS=bias is not None,
        FORM=form,
        WORD=4 if form.block_bytes % 4 == 0 else 2 if form.block_bytes % 2 == 0 else 1,
        ROWS=at_once,
        OUTPUTS=OUTPUTS,
        LANES=warps * 32,
        num_warps=warps,
    )


@triton.jit(do_not_specialize=["rows", "outputs"])
def product_kernel(
    data,
    x,
    bias,
    out,
    rows,
    outputs,
    inputs,
    row_bytes,
    HAS_BIAS: tl.constexpr,
    FORM: tl.constexpr,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    LANES: tl.constexpr,
):
    words = tl.cdiv(inputs * FORM.bits, 32)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    own = tl.minimum(output, outputs - 1)[:, None]
    of_rows = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * inputs
    total = tl.zeros([ROWS, OUTPUTS, LANES], tl.float32)
    for first in range(0, words, LANES * FORM.at_once):
        lane = tl.arange(0, LANES)
        word = (first + lane // FORM.apart * (FORM.apart * FORM.at_once) + lane % FORM.apart)[None, :]
        block = block_of(data, own, word, row_bytes, FORM)
        if FORM.has_halves:
            total = _with_half(total, of_rows, block, word, words, inputs, 0, FORM, WORD)
            total = _with_half(total, of_rows, block, word, words, inputs, 1, FORM, WORD)
        else:
            total = _with_both(total, of_rows, block, word, words, inputs, FORM, WORD)
    there = (row < rows)[:, None] & (output < outputs)[None, :]
    sums = tl.sum(total, 2)
    if HAS_BIAS:
        sums += as_float32(bias + output, output < outputs)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * outputs + output[None, :], sums.to(out.dtype.element_ty), mask=there)


@triton.jit
def _with_half(total, x, block, word, words, inputs, HALF: tl.constexpr, FORM: tl.constexpr, WORD: tl.constexpr):
    """Adds what one half of each word gives."""
    there = word < words
    scale, minimum = shared_of(block, word, there, HALF, FORM)
    dots, of_x = tl.zeros_like(total), 0.0
    at_once: tl.constexpr = FORM.at_once
    for step in tl.static_range(at_once):
        dots, of_x = _dots(dots, of_x, x, block, word + step * FORM.apart, words, inputs, HALF, FORM, WORD)
    total += dots * scale[None, :, :]
    if FORM.has_minimum:
        total += of_x[:, None, :] * minimum[None, :, :]
    return total


@triton.jit
def _with_both(total, x, block, word, words, inputs, FORM: tl.constexpr, WORD: tl.constexpr):
    """Adds what each word gives, whose halves share one scale."""
    there = word < words
    scale, minimum = shared_of(block, word, there, 0, FORM)
    dots, of_x = tl.zeros_like(total), 0.0
    for half in tl.static_range(8 // FORM.bits):
        dots, of_x = _dots(dots, of_x, x, block, word, words, inputs, half, FORM, WORD)
    total += dots * scale[None, :, :]
    if FORM.has_minimum:
        total += of_x[:, None, :] * minimum[None, :, :]
    return total


@triton.jit
def _dots(dots, of_x, x, block, word, words, inputs, HALF: tl.constexpr, FORM: tl.constexpr, WORD: tl.constexpr):
    there = word < words
    read = word_at(block + FORM.codes_at + word % FORM.block_words * 4, there, WORD)
    upper = upper_of(block, word, there, WORD, FORM) if FORM.upper != "" else read
    codes = codes_of(read, upper, HALF, FORM)
    x_0, x_1, x_2, x_3 = _four(x, first_input(word, HALF, FORM), inputs)
    dots += x_0[:, None, :] * as_float(codes & 0xFF, FORM)[None, :, :]
    dots += x_1[:, None, :] * as_float((codes >> 8) & 0xFF, FORM)[None, :, :]
    dots += x_2[:, None, :] * as_float((codes >> 16) & 0xFF, FORM)[None, :, :]
    dots += x_3[:, None, :] * as_float(codes >> 24, FORM)[None, :, :]
    return dots, of_x + (x_0 + x_1 + x_2 + x_3)


@triton.jit
def _four(x, first, inputs):
    """x (rows, 1), first (1, lanes): four neighbours from there on, each (rows, lanes)"""
    at = first[:, :, None] + tl.arange(0, 4)[None, None, :]
    values = as_float32(x[:, :, None] + at, at < inputs)
    pairs = tl.reshape(values, [values.shape[0], values.shape[1], 2, 2])
    even, odd = tl.split(pairs)
    x_0, x_2 = tl.split(even)
    x_1, x_3 = tl.split(odd)
    return x_0, x_1, x_2, x_3
