"""What kernels on a checkpoint's own forms share: words of codes, what codes share, and codes as floats.

Everything is said for words: `row` (rows, 1) and `word` (1, words) -> (rows, words). The four codes of each half of a word are
first made four bytes of a word; a form of 8 bits has one half. Loads are as wide as blocks are aligned.
"""

from __future__ import annotations

import triton
import triton.language as tl

from h2o_flexgen.kernels.gpu.codes import widened
from h2o_flexgen.kernels.gpu.stored_forms import (
    EXPONENT,
    FP4,
    FP8,
    ONE_SCALE,
    ONE_WORD,
    PLANES_OF_ONE,
    PLANES_OF_TWO,
    SECTIONS,
    SIX_BITS,
    SIXTEENS,
    WITH_MINIMUM,
)


@triton.jit
def first_input(word, HALF: tl.constexpr, FORM: tl.constexpr):
    """The input of the first of the four codes of a half."""
    if FORM.bits == 8:
        found = word * 4
    elif FORM.span == 0:
        found = word * 8 + HALF
    else:
        of_span: tl.constexpr = FORM.span // 4
        found = word // of_span * (2 * FORM.span) + word % of_span * 4 + HALF * FORM.span
    return found


@triton.jit
def block_of(data, row, word, row_bytes, FORM: tl.constexpr):
    """Where the block of a word begins."""
    return data + row.to(tl.int64) * row_bytes + word // FORM.block_words * FORM.block_bytes


@triton.jit
def word_at(place, there, WORD: tl.constexpr):
    """The 4 bytes that begin here, of which WORD are loaded at once."""
    if WORD == 4:
        found = tl.load(place.to(tl.pointer_type(tl.uint32)), mask=there, other=0)
    elif WORD == 2:
        halves = place.to(tl.pointer_type(tl.uint16))
        low = tl.load(halves, mask=there, other=0).to(tl.uint32)
        found = low | (tl.load(halves + 1, mask=there, other=0).to(tl.uint32) << 16)
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
def upper_of(block, word, there, WORD: tl.constexpr, FORM: tl.constexpr):
    """The word that has bits above the fourth of the codes of a word."""
    place, own = block + FORM.upper_at, word % FORM.block_words
    if FORM.upper == ONE_WORD:
        found = word_at(place, there, WORD) >> (own * 4).to(tl.uint32)
    elif FORM.upper == PLANES_OF_ONE:
        found = word_at(place + own % 8 * 4, there, WORD) >> (own // 8 * 2).to(tl.uint32)
    else:
        found = word_at(place + own // 16 * 32 + own % 8 * 4, there, WORD) >> (own % 16 // 8 * 2).to(tl.uint32)
    return found


@triton.jit
def codes_of(words, upper, HALF: tl.constexpr, FORM: tl.constexpr):
    """The codes of a half, four bytes of a word."""
    if FORM.bits == 8:
        found = words ^ 0x80808080 if FORM.flipped else words
    else:
        found = (words >> 4 * HALF) & 0x0F0F0F0F
        if FORM.upper == ONE_WORD:
            found = found | ((((upper >> 16 * HALF) & 15) * 0x00204081 & 0x01010101) << 4)
        elif FORM.upper == PLANES_OF_ONE:
            found = found | (((upper >> HALF) & 0x01010101) << 4)
        elif FORM.upper == PLANES_OF_TWO:
            found = found | (((upper >> 4 * HALF) & 0x03030303) << 4)
    return found


@triton.jit
def as_float(code, FORM: tl.constexpr):
    """What codes of one byte stand for, before anything that they share."""
    if FORM.codes == FP4:  # a float16 but for its exponent
        bits = ((code & 8) << 12) | ((code & 7) << 9)
        found = _half(bits) * 32768.0 + 0.0 if FORM.shared == EXPONENT else _half(bits) * 16384.0  # no zero is negative there
    elif FORM.codes == FP8:
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        found = tl.where((code & 0x7F) == 0x7F, float("nan"), _half(bits) * 256.0)
    else:  # the bits of a large number
        found = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + FORM.zero)
    return found


# -- what codes share ------------------------------------------------------------------------------------------------------


@triton.jit
def shared_of(block, word, there, HALF: tl.constexpr, FORM: tl.constexpr):
    """The scale and the minimum of the codes of a half, where they lie in its block."""
    place, own = block + FORM.shared_at, word % FORM.block_words
    if FORM.shared == ONE_SCALE:
        scale, minimum = _half(_two_bytes(place, there)), 0.0
    elif FORM.shared == WITH_MINIMUM:
        scale, minimum = _half(_two_bytes(place, there)), _half(_two_bytes(place + 2, there))
    elif FORM.shared == SIX_BITS:
        scale, minimum = _of_six_bits(place, own // 8, there, HALF)
    elif FORM.shared == SIXTEENS:
        code = tl.load((place + own // 16 * 8 + own % 16 // 4 + 4 * HALF).to(tl.pointer_type(tl.int8)), mask=there, other=0)
        scale, minimum = _half(_two_bytes(place + 16, there)) * code.to(tl.float32), 0.0
    else:
        scale, minimum = _half_of_power(_byte(place, there)), 0.0
    return scale, minimum


@triton.jit
def _of_six_bits(place, chunk, there, HALF: tl.constexpr):
    """Scale and minimum of 32 values: a chunk of 64 has two of each, of which the last chunks' upper 2 bits lie apart."""
    of_chunk = place + 4 + chunk % 2 * 2
    first, second, third = (_two_bytes(of_chunk + 0, there), _two_bytes(of_chunk + 4, there), _two_bytes(of_chunk + 8, there))
    late = chunk >= 2
    scales = tl.where(late, (third & 0x0F0F) | ((first >> 2) & 0x3030), first & 0x3F3F)
    minima = tl.where(late, ((third >> 4) & 0x0F0F) | ((second >> 2) & 0x3030), second & 0x3F3F)
    both = word_at(place, there, 4)
    scale = _half(both & 0xFFFF) * ((scales >> 8 * HALF) & 0xFF).to(tl.float32)
    return scale, -(_half(both >> 16) * ((minima >> 8 * HALF) & 0xFF).to(tl.float32))


@triton.jit
def _half_of_power(exponent):
    """2 ** (exponent - 128)"""
    bits = tl.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)
