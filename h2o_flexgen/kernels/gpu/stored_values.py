"""What kernels on a checkpoint's own formats share: words of codes, what codes share, and codes as floats; and their decoder.

All is said for words: `row` (rows, 1) and `word` (1, words) -> (rows, words). The four codes of each half of a word are first
made the four bytes of one; a format of 8 bits has one half. Nothing here is fused, so that values have the bits of torch.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats import byte_layout
from h2o_flexgen.formats.blocked import Blocked
from h2o_flexgen.formats.byte_layout import E8M0, WORD_BYTES, ByteLayout
from h2o_flexgen.formats.table import FORMATS, Stored
from h2o_flexgen.kernels.gpu.codes import widened
from h2o_flexgen.kernels.gpu.launching import ALIGNED, Launch, kept_by_shape, launcher
from h2o_flexgen.kernels.raw_memory import begins_behind
from h2o_flexgen.kernels.stored_values import sections_of

FP4, FP8 = tl.constexpr(byte_layout.FLOAT4), tl.constexpr(byte_layout.FLOAT8)
EXPONENT = tl.constexpr(byte_layout.EXPONENT)
FIFTH_BITS = tl.constexpr(byte_layout.FIFTH_BITS)
PLANES_OF_ONE = tl.constexpr(byte_layout.PLANES_OF_ONE)
PLANES_OF_TWO = tl.constexpr(byte_layout.PLANES_OF_TWO)
SCALE = tl.constexpr(byte_layout.SCALE)
SCALE_AND_MINIMUM = tl.constexpr(byte_layout.SCALE_AND_MINIMUM)
SECTIONS = tl.constexpr(byte_layout.SECTIONS)
SIGNED_SIX_BITS = tl.constexpr(byte_layout.SIGNED_SIX_BITS)
SIX_BITS = tl.constexpr(byte_layout.SIX_BITS)
SIXTEENS = tl.constexpr(byte_layout.SIXTEENS)


class Parts(NamedTuple):
    """The tensors of a matrix that kernels are handed. What its format has no section for is the first of them once more."""

    codes: Tensor  # or blocks, uint8
    scales: Tensor
    zeros: Tensor
    order: Tensor


def parts_of(format: Stored, data: Tensor, outputs: int, inputs: int) -> Parts:
    """data (rows, bytes of a row), or (1, bytes) of a format in sections"""
    assert data.is_contiguous() and data.numel() == format.nbytes((outputs, inputs), 1)
    if isinstance(format, Blocked):
        return Parts(data, data, data, data)
    codes, scales, *more = sections_of(format, data, outputs, inputs)
    typed = scales if format.scale == E8M0 else scales.view(getattr(torch, format.scale))
    layout = format.layout
    return Parts(
        codes, typed, more[0] if layout.has_zeros else codes, more[-1].view(torch.int32) if layout.is_ordered else codes
    )


def layout_of(format: str) -> ByteLayout:
    stored = FORMATS[format]
    assert isinstance(stored, Stored)
    return stored.layout


def load_bytes(layout: ByteLayout, begins: int, row_bytes: int) -> int:
    """The bytes of a word that can be loaded at once, wherever it lies. `begins`: the address of the first code, or what is
    above a multiple of a word."""
    return gcd(WORD_BYTES, layout.block_bytes, layout.codes_at, layout.upper_at, row_bytes, begins)


@triton.jit
def first_input(word, HALF: tl.constexpr, LAYOUT: tl.constexpr):
    """The input of the first of the four codes of a half, where the others follow it."""
    if LAYOUT.bits == 8:
        found = word * 4
    else:
        of_span: tl.constexpr = LAYOUT.span // 4
        found = word // of_span * (2 * LAYOUT.span) + word % of_span * 4 + HALF * LAYOUT.span
    return found


@triton.jit
def block_at(data, row, word, row_bytes, LAYOUT: tl.constexpr):
    """The beginning of the block of a word."""
    return data + row.to(tl.int64) * row_bytes + word // LAYOUT.block_words * LAYOUT.block_bytes


# -- words and bytes -------------------------------------------------------------------------------------------------------


@triton.jit
def is_there(word, inputs, LAYOUT: tl.constexpr):
    """Whether a row has this word."""
    return word * (32 // LAYOUT.bits) < inputs


@triton.jit
def words_of(block, word, inputs, LAYOUT: tl.constexpr, AT_ONCE: tl.constexpr):
    """The words; zeros behind the last input."""
    there = is_there(word, inputs, LAYOUT)
    found = _word(block + LAYOUT.codes_at + word % LAYOUT.block_words * 4, there, AT_ONCE)
    if LAYOUT.codes == FP8 and AT_ONCE < 4:  # rows may end within a word
        left = tl.minimum(tl.maximum(inputs - word * 4, 1), 4)
        found = found & (0xFFFFFFFF >> ((4 - left) * 8).to(tl.uint32))
    return found


@triton.jit
def _word(place, there, AT_ONCE: tl.constexpr):
    """The 4 bytes that begin here, AT_ONCE of which are loaded at once."""
    if AT_ONCE == 4:
        found = tl.load(place.to(tl.pointer_type(tl.uint32)), mask=there, other=0)
    elif AT_ONCE == 2:
        found = _two_bytes(place, there) | (_two_bytes(place + 2, there) << 16)
    else:
        found = _byte(place, there) | (_byte(place + 1, there) << 8)
        found = found | (_byte(place + 2, there) << 16) | (_byte(place + 3, there) << 24)
    return found


@triton.jit
def _byte(place, there):
    return tl.load(place, mask=there, other=0).to(tl.uint32)


@triton.jit
def _two_bytes(place, there):
    return tl.load(place.to(tl.pointer_type(tl.uint16)), mask=there, other=0).to(tl.uint32)


@triton.jit
def _half(bits):
    """The lower 16 bits as a float16."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


# -- codes -----------------------------------------------------------------------------------------------------------------


@triton.jit
def upper_of(block, word, inputs, LAYOUT: tl.constexpr, AT_ONCE: tl.constexpr):
    """What has the bits above the fourth of the codes of a word, moved down to the first that is theirs."""
    there, place, own = is_there(word, inputs, LAYOUT), block + LAYOUT.upper_at, word % LAYOUT.block_words
    if LAYOUT.upper == FIFTH_BITS:
        found = _word(place, there, AT_ONCE) >> (own * 4).to(tl.uint32)
    elif LAYOUT.upper == PLANES_OF_ONE:
        found = _word(place + own % 8 * 4, there, AT_ONCE) >> (own // 8 * 2).to(tl.uint32)
    else:
        tl.static_assert(LAYOUT.upper == PLANES_OF_TWO)
        found = _word(place + own // 16 * 32 + own % 8 * 4, there, AT_ONCE) >> (own % 16 // 8 * 2).to(tl.uint32)
    return found


@triton.jit
def codes_of(words, upper, HALF: tl.constexpr, LAYOUT: tl.constexpr):
    """The codes of a half, in the four bytes of a word."""
    if LAYOUT.bits == 8:
        found = words ^ 0x80808080 if LAYOUT.is_signed else words
    else:
        found = (words >> 4 * HALF) & 0x0F0F0F0F
        if LAYOUT.upper == FIFTH_BITS:  # four neighbours, of which each goes to a byte of its own
            found = found | ((((upper >> 16 * HALF) & 15) * 0x00204081 & 0x01010101) << 4)
        elif LAYOUT.upper == PLANES_OF_ONE:
            found = found | (((upper >> HALF) & 0x01010101) << 4)
        elif LAYOUT.upper == PLANES_OF_TWO:
            found = found | (((upper >> 4 * HALF) & 0x03030303) << 4)
    return found


@triton.jit
def _looked_up(code, LAYOUT: tl.constexpr):
    """What a code stands for: a byte of one of four words."""
    lower = tl.where((code & 4) == 0, LAYOUT.table_words[0], LAYOUT.table_words[1])
    upper = tl.where((code & 4) == 0, LAYOUT.table_words[2], LAYOUT.table_words[3])
    return (tl.where(code < 8, lower, upper) >> (code & 3) * 8) & 0xFF


@triton.jit
def as_float(code, LAYOUT: tl.constexpr):
    """What codes mean, before anything that they share."""
    if LAYOUT.codes == FP4:  # twice the value, as a float16 but for its exponent; no zero is negative
        found = _half(((code & 8) << 12) | ((code & 7) << 9)) * 32768.0 + 0.0
    elif LAYOUT.codes == FP8:
        found = _half(((code & 0x80) << 8) | ((code & 0x7F) << 7)) * 256.0
        found = tl.where((code & 0x7F) == 0x7F, float("nan"), found)
    else:  # the last bits of a large number
        whole = _looked_up(code, LAYOUT) if LAYOUT.has_table else code
        found = (whole | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + LAYOUT.zero)
    return found


# -- what codes share ------------------------------------------------------------------------------------------------------


@triton.jit
def shared_by(block, scales, zeros, row, word, inputs, HALF: tl.constexpr, LAYOUT: tl.constexpr, AT_ONCE: tl.constexpr):
    """What the codes of a half share: scale, minimum and zero. The last two mean something where the format has them."""
    there, place, own = is_there(word, inputs, LAYOUT), block + LAYOUT.shared_at, word % LAYOUT.block_words
    minimum, zero = 0.0, 0.0
    if LAYOUT.shared == SECTIONS:
        at = _share(row, word, inputs, LAYOUT)
        scale = _of_section(scales + at, there, LAYOUT)
        if LAYOUT.has_zeros:
            zero = tl.load(zeros + at, mask=there, other=0).to(tl.float32)
    elif LAYOUT.shared == SIX_BITS:
        scale, minimum = _of_six_bits(place, own // 8, there, HALF, AT_ONCE)
    elif LAYOUT.shared == SIGNED_SIX_BITS:
        scale = _of_signed_six_bits(place, (own // 4).to(tl.uint32), there, AT_ONCE)
    elif LAYOUT.shared == SIXTEENS:
        code = tl.load((place + own // 16 * 8 + own % 16 // 4 + 4 * HALF).to(tl.pointer_type(tl.int8)), mask=there, other=0)
        scale = _half(_two_bytes(place + 16, there)) * code.to(tl.float32)
    elif LAYOUT.shared == EXPONENT:
        scale = _half_of_power(_byte(place, there))
    else:
        tl.static_assert(LAYOUT.shared == SCALE or LAYOUT.shared == SCALE_AND_MINIMUM)
        scale = _half(_two_bytes(place, there))
        if LAYOUT.has_minimum:
            minimum = _half(_two_bytes(place + 2, there))
    return scale, minimum, zero


@triton.jit
def _of_six_bits(place, chunk, there, HALF: tl.constexpr, AT_ONCE: tl.constexpr):
    """Scale and minimum of 32 values: a chunk of 64 has two of each, of which the last chunks' upper 2 bits lie apart."""
    of_chunk = place + 4 + chunk % 2 * 2
    first, second, third = _two_bytes(of_chunk, there), _two_bytes(of_chunk + 4, there), _two_bytes(of_chunk + 8, there)
    is_late = chunk >= 2
    scales = tl.where(is_late, (third & 0x0F0F) | ((first >> 2) & 0x3030), first & 0x3F3F)
    minima = tl.where(is_late, ((third >> 4) & 0x0F0F) | ((second >> 2) & 0x3030), second & 0x3F3F)
    both = _word(place, there, AT_ONCE)
    scale = _half(both & 0xFFFF) * ((scales >> 8 * HALF) & 0xFF).to(tl.float32)
    minimum = _half(both >> 16) * ((minima >> 8 * HALF) & 0xFF).to(tl.float32)
    return scale, minimum * -1.0  # Triton's minus takes it from 0, which loses the sign of a zero


@triton.jit
def _of_signed_six_bits(place, group, there, AT_ONCE: tl.constexpr):
    """The scale of 32 values: the upper 2 bits of a group lie before the lower 4, those of eight groups in a word."""
    first, lower = _word(place, there, AT_ONCE), _word(place + 4, there, AT_ONCE) >> group * 4
    upper = first >> 16 + group * 2
    code = ((lower & 15) | ((upper & 3) << 4)).to(tl.int32) - 32
    return _half(first & 0xFFFF) * code.to(tl.float32)


@triton.jit
def _half_of_power(exponent):
    """2 ** (exponent - 128)"""
    bits = tl.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _share(row, word, inputs, LAYOUT: tl.constexpr):
    """The number of a word's share in a section: shares of the first rows come first."""
    rows: tl.constexpr = LAYOUT.shared_rows
    columns: tl.constexpr = LAYOUT.shared_inputs
    of_rows = row.to(tl.int64) // rows if rows > 0 else row.to(tl.int64) * 0
    found = of_rows + word * 0
    if columns > 0:
        found = of_rows * tl.cdiv(inputs, columns) + word * (32 // LAYOUT.bits) // columns
    return found


@triton.jit
def _of_section(places, there, LAYOUT: tl.constexpr):
    """The scales that lie here. Those of FP4 are half powers of two, as its codes are twice their values."""
    if LAYOUT.codes == FP4:
        found = _half_of_power(_byte(places, there))
    elif places.dtype.element_ty == tl.uint8:
        exponent = _byte(places, there)
        found = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.uint32).to(tl.float32, bitcast=True)
    elif places.dtype.element_ty == tl.bfloat16:
        found = widened(tl.load(places.to(tl.pointer_type(tl.uint16)), mask=there, other=0))
    else:
        found = tl.load(places, mask=there, other=0.0).to(tl.float32)
    return found


# -- stored decode ---------------------------------------------------------------------------------------------------------
# Matrices in a checkpoint's own formats decoded in one launch, bit for bit as in torch.

WORDS = 512  # that a program reads
MOST_WORDS = 128  # of one row


def stored_decode(format: Stored, data: Tensor, out: Tensor) -> None:
    """Decodes data (rows, bytes of a row), or (1, bytes) of a format in sections, into out (rows, columns)."""
    assert out.is_contiguous()
    if out.numel():
        parts = parts_of(format, data, *out.shape)
        begins, others = begins_behind(ALIGNED, parts.codes), (parts.scales.dtype, parts.zeros.dtype)
        decoding_of(format.name, begins, others, out.shape, out.dtype)(*parts, out)


@kept_by_shape
def decoding_of(format: str, begins: int, others: tuple[torch.dtype, ...], shape: torch.Size, dtype: torch.dtype) -> Launch:
    (rows, columns), layout = shape, layout_of(format)
    row_bytes = layout.row_bytes(columns)
    words = triton.cdiv(columns * layout.bits, 32)
    of_row = min(MOST_WORDS, triton.next_power_of_2(words))
    at_once = WORDS // of_row
    return launcher(
        decode_kernel,
        (triton.cdiv(rows, at_once), triton.cdiv(words, of_row)),
        (rows, columns, row_bytes),
        LAYOUT=layout,
        AT_ONCE=load_bytes(layout, begins, row_bytes),
        ROWS=at_once,
        WORDS=of_row,
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
