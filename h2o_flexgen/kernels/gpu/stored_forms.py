"""Where the bytes of a checkpoint's own forms have what, as kernels in Triton are told while they are compiled.

A matrix is seen as words of 32 bits of codes, row by row. A word has eight codes of 4 bits or four of 8; `span` says which
inputs they belong to. What codes share (a scale, a minimum, a zero) lies in the block of the word, or in a section of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import triton.language as tl

INTEGER, FP4, FP8 = tl.constexpr("integer"), tl.constexpr("fp4"), tl.constexpr("fp8")  # kinds of codes
ONE_SCALE, WITH_MINIMUM = tl.constexpr("scale"), tl.constexpr("scale and minimum")  # what a block shares, as float16
SIX_BITS = tl.constexpr("six bits")  # scales and minima of 32 values in 6 bits, times those of the block
SIXTEENS = tl.constexpr("sixteens")  # scales of 16 values in 8 bits, times that of the block
EXPONENT = tl.constexpr("exponent")  # half a power of two
SECTIONS = tl.constexpr("sections")
ONE_WORD, PLANES_OF_ONE, PLANES_OF_TWO = tl.constexpr("one word"), tl.constexpr("planes of 1"), tl.constexpr("planes of 2")


@dataclass(frozen=True)
class Form:
    codes: str = INTEGER.value
    bits: int = 4  # of a code in its word
    zero: int = 0  # taken off a code; behind `flipped`
    flipped: bool = False  # codes are signed: with the upper bit turned they are not
    span: int = 0  # the lower codes of so many bytes come before their upper ones; 0: lower and upper ones in turn
    block_words: int = 1
    block_bytes: int = 4
    codes_at: int = 0  # in a block
    upper: str = ""  # how bits above the fourth lie
    upper_at: int = 0
    shared: str = SECTIONS.value
    shared_at: int = 0
    shared_rows: int = 1  # of a section: a share is that of so many rows and columns, 0 of all
    shared_columns: int = 0
    has_zeros: bool = False
    is_ordered: bool = False

    @property
    def has_minimum(self) -> bool:
        return self.shared in (WITH_MINIMUM.value, SIX_BITS.value)

    @property
    def has_halves(self) -> bool:
        """Whether the lower and the upper codes of a word have scales of their own."""
        return self.shared in (SIX_BITS.value, SIXTEENS.value)

    @property
    def at_once(self) -> int:
        """Words apart from each other that one thread takes because they share what is costly to read."""
        return 2 if self.has_halves else 1

    @property
    def apart(self) -> int:
        """How far they are apart."""
        return 4 if self.shared == SIX_BITS.value else 2


FORMS: Mapping[str, Form] = {
    "q4_0": Form(zero=8, span=16, block_words=4, block_bytes=18, codes_at=2, shared=ONE_SCALE.value),
    "q4_1": Form(span=16, block_words=4, block_bytes=20, codes_at=4, shared=WITH_MINIMUM.value),
    "q5_0": Form(
        zero=16, span=16, block_words=4, block_bytes=22, codes_at=6, upper=ONE_WORD.value, upper_at=2, shared=ONE_SCALE.value
    ),
    "q5_1": Form(
        span=16, block_words=4, block_bytes=24, codes_at=8, upper=ONE_WORD.value, upper_at=4, shared=WITH_MINIMUM.value
    ),
    "q8_0": Form(bits=8, zero=128, flipped=True, block_words=8, block_bytes=34, codes_at=2, shared=ONE_SCALE.value),
    "q4_K": Form(span=32, block_words=32, block_bytes=144, codes_at=16, shared=SIX_BITS.value),
    "q5_K": Form(
        span=32, block_words=32, block_bytes=176, codes_at=48, upper=PLANES_OF_ONE.value, upper_at=16, shared=SIX_BITS.value
    ),
    "q6_K": Form(
        zero=32, span=64, block_words=32, block_bytes=210, upper=PLANES_OF_TWO.value, upper_at=128,
        shared=SIXTEENS.value, shared_at=192,
    ),
    "mxfp4": Form(codes=FP4.value, span=16, block_words=4, block_bytes=17, codes_at=1, shared=EXPONENT.value),
}  # fmt: skip
