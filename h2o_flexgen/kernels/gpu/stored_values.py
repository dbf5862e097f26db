"""What kernels on a checkpoint's own formats share: words of codes, what codes share, and codes as floats.

All is said for words: `row` (rows, 1) and `word` (1, words) -> (rows, words). The four codes of each half of a word are first
made the four bytes of one; a format of 8 bits has one half. Nothing here is fused, so that values have the bits of torch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from h2o_flexgen.kernels.gpu.codes import widened
from h2o_flexgen.kernels.gpu.stored_layout import (
    EXPONENT,
    FIFTH_BITS,
    FP4,
    FP8,
    PLANES_OF_ONE,
    PLANES_OF_TWO,
    SCALE,
    SCALE_AND_MINIMUM,
    SECTIONS,
    SIX_BITS,
    SIXTEENS,
)


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
def as_float(code, LAYOUT: tl.constexpr):
    """What codes mean, before anything that they share."""
    if LAYOUT.codes == FP4:  # twice the value, as a float16 but for its exponent; no zero is negative
        found = _half(((code & 8) << 12) | ((code & 7) << 9)) * 32768.0 + 0.0
    elif LAYOUT.codes == FP8:
        found = _half(((code & 0x80) << 8) | ((code & 0x7F) << 7)) * 256.0
        found = tl.where((code & 0x7F) == 0x7F, float("nan"), found)
    else:  # the last bits of a large number
        found = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + LAYOUT.zero)
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
