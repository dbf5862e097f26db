"""The bytes of a checkpoint's own formats, as kernels in Triton are told of them when they are compiled: what lies where.

A matrix is seen as words of 32 bits of codes, row by row. A word has eight codes of 4 bits or four of 8; `span` says which
inputs they belong to. What codes share (a scale, a minimum, a zero) lies in the block of the word, or in sections of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats.blocked import Blocked
from h2o_flexgen.formats.sectioned import MIDDLE, Fp4, Fp8
from h2o_flexgen.kernels.stored_values import E8M0, Stored, sections_of

INTEGER, FP4, FP8 = tl.constexpr("integer"), tl.constexpr("fp4"), tl.constexpr("fp8")  # kinds of codes
SCALE, SCALE_AND_MINIMUM = tl.constexpr("scale"), tl.constexpr("scale and minimum")  # of a block, as float16
SIX_BITS = tl.constexpr("six bits")  # scales and minima of 32 values in 6 bits, times those of their block
SIXTEENS = tl.constexpr("sixteens")  # scales of 16 values in 8 bits, times that of their block
EXPONENT = tl.constexpr("exponent")  # of a block: half a power of two
SECTIONS = tl.constexpr("sections")
FIFTH_BITS = tl.constexpr("fifth bits")  # in one word for 32 values
PLANES_OF_ONE, PLANES_OF_TWO = tl.constexpr("planes of one bit"), tl.constexpr("planes of two bits")
WORD_BYTES = 4


@dataclass(frozen=True)
class GpuLayout:
    codes: str = INTEGER.value
    bits: int = 4  # of a code in its word
    zero: int = 0  # is taken off each code, where it is the same for all
    is_signed: bool = False  # with its uppermost bit turned a code has no sign
    span: int = 0  # the lower codes of so many bytes come before their upper ones; 0: they take turns
    block_words: int = 1
    block_bytes: int = WORD_BYTES
    codes_at: int = 0  # in a block
    upper: str = ""  # how bits above the fourth lie
    upper_at: int = 0
    shared: str = SECTIONS.value
    shared_at: int = 0
    shared_rows: int = 1  # rows and inputs that share a scale of a section; 0: all
    shared_inputs: int = 0
    has_zeros: bool = False  # in a section
    is_ordered: bool = False  # column j belongs to input order[j]

    @property
    def takes_turns(self) -> bool:
        """Whether the lower and the upper code of a byte belong to neighbours."""
        return self.bits == 4 and self.span == 0

    def row_bytes(self, inputs: int) -> int:
        """The bytes of the codes, or blocks, of a row."""
        if self.shared == SECTIONS.value:
            return inputs * self.bits // 8
        return inputs * self.bits // 32 // self.block_words * self.block_bytes

    @property
    def has_minimum(self) -> bool:
        return self.shared in (SCALE_AND_MINIMUM.value, SIX_BITS.value)

    @property
    def has_halves(self) -> bool:
        """Whether the lower and the upper codes of a word have scales of their own, which are costly to find."""
        return self.shared in (SIX_BITS.value, SIXTEENS.value)

    @property
    def words_together(self) -> int:
        """Words that a thread takes because they share their scales."""
        return 2 if self.has_halves else 1

    @property
    def apart(self) -> int:
        """How far these are apart."""
        return 4 if self.shared == SIX_BITS.value else 2


BLOCKS: Mapping[str, GpuLayout] = {
    "q4_0": GpuLayout(span=16, codes_at=2, zero=8, shared=SCALE.value),
    "q4_1": GpuLayout(span=16, codes_at=4, shared=SCALE_AND_MINIMUM.value),
    "q5_0": GpuLayout(span=16, codes_at=6, zero=16, upper=FIFTH_BITS.value, upper_at=2, shared=SCALE.value),
    "q5_1": GpuLayout(span=16, codes_at=8, upper=FIFTH_BITS.value, upper_at=4, shared=SCALE_AND_MINIMUM.value),
    "q8_0": GpuLayout(bits=8, codes_at=2, zero=128, is_signed=True, shared=SCALE.value),
    "q4_K": GpuLayout(span=32, codes_at=16, shared=SIX_BITS.value),
    "q5_K": GpuLayout(span=32, codes_at=48, upper=PLANES_OF_ONE.value, upper_at=16, shared=SIX_BITS.value),
    "q6_K": GpuLayout(span=64, zero=32, upper=PLANES_OF_TWO.value, upper_at=128, shared=SIXTEENS.value, shared_at=192),
    "mxfp4": GpuLayout(FP4.value, span=16, codes_at=1, shared=EXPONENT.value),
}


@cache
def layout_of(format: Stored) -> GpuLayout:
    if isinstance(format, Blocked):
        layout = BLOCKS[format.name]
        return replace(layout, block_words=format.values * layout.bits // 32, block_bytes=format.block_bytes)
    if isinstance(format, Fp8):
        return GpuLayout(FP8.value, bits=8, shared_rows=format.block_rows, shared_inputs=format.block_columns)
    if isinstance(format, Fp4):
        return GpuLayout(FP4.value, shared_inputs=format.group)
    zero = 0 if format.zeros else MIDDLE
    return GpuLayout(zero=zero, shared_inputs=format.group, has_zeros=format.zeros, is_ordered=format.ordered)


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
    typed = scales if isinstance(format, Fp4) or format.scale == E8M0 else scales.view(getattr(torch, format.scale))
    layout = layout_of(format)
    return Parts(
        codes, typed, more[0] if layout.has_zeros else codes, more[-1].view(torch.int32) if layout.is_ordered else codes
    )


def load_bytes(layout: GpuLayout, parts: Parts, row_bytes: int) -> int:
    """The bytes of a word that can be loaded at once, wherever it lies. Memory begins at a multiple of any word."""
    return gcd(WORD_BYTES, layout.block_bytes, layout.codes_at, layout.upper_at, row_bytes, parts.codes.storage_offset())
