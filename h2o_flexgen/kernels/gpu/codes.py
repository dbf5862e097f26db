"""Words: those that values are moved in, and those that codes of packed values lie in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.formats.grouped import GROUP as _GROUP
from h2o_flexgen.formats.grouped import TILE as _TILE
from h2o_flexgen.kernels.gpu.launching import ALIGNED, Seen, kept_by_shape, seen
from h2o_flexgen.kernels.raw_memory import begins_behind

# -- words -----------------------------------------------------------------------------------------------------------------
# Slots that are only moved, as the widest whole words that they are made of: fewer and wider loads, and no value is read.

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # widest first


def as_words(*slots: Tensor) -> Iterator[Tensor]:
    """Views of values of one type (..., width), each side by side in the last dimension, as words of one type."""
    word = widest_word(begins_behind(ALIGNED, *slots), *map(seen, slots))
    return (each.view(word) for each in slots)


@kept_by_shape
def widest_word(begin: int, *slots: Seen) -> torch.dtype:
    """`begin`: where they begin behind a multiple of any word."""
    return next(word for word in WORDS if begin % word.itemsize == 0 and all(_made_of(*each, word.itemsize) for each in slots))


def _made_of(shape: torch.Size, strides: Sequence[int], dtype: torch.dtype, nbytes: int) -> bool:
    """Whether every slot begins at a whole word of this size and ends with one, if the first one begins at a word. A dimension
    of one place has no stride."""
    assert strides[-1] == 1
    steps = [stride for size, stride in zip(shape[:-1], strides) if size > 1]
    return all(each * dtype.itemsize % nbytes == 0 for each in (shape[-1], *steps))


def in_words(slots: Seen, word: torch.dtype) -> Seen:
    """A tensor as it is seen through words."""
    (*shape, width), strides, dtype = slots
    size = word.itemsize
    steps = (stride * dtype.itemsize // size for stride in strides[:-1])
    return torch.Size((*shape, width * dtype.itemsize // size)), (*steps, 1), word


# -- codes -----------------------------------------------------------------------------------------------------------------
# What kernels on packed values share: how codes lie in words of 32 bits, and how numbers of 16 bits become float32 and
# back. Scales and minima are read and written as whole numbers of 16 bits, so that GPUs without bfloat16 have the same
# bits.

GROUP, TILE = tl.constexpr(_GROUP), tl.constexpr(_TILE)
UPPER = tl.constexpr(0xFFFF0000)  # the bits of a float32 that bfloat16 keeps


@triton.jit
def place_in_word(code, BITS: tl.constexpr):
    """The lowest bit of the code of this input in a word of a tile."""
    return code % 4 * 8 + code // 4 * 4 if BITS == 4 else code * 8


@triton.jit
def widened(halves):
    """The bits of bfloat16 as float32."""
    return (halves.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def as_float32(places, there):
    """What lies at these places; zeros where nothing is."""
    if places.dtype.element_ty == tl.bfloat16:
        values = widened(tl.load(places.to(tl.pointer_type(tl.uint16)), mask=there, other=0))
    else:
        values = tl.load(places, mask=there, other=0.0).to(tl.float32)
    return values


@triton.jit
def bits_below(values):
    """The bits of the largest bfloat16 that is not above these float32 values, in their upper half."""
    bits = values.to(tl.uint32, bitcast=True)
    is_inexact_negative = (bits >> 31) & ((bits & 0xFFFF) != 0).to(tl.uint32)
    return (bits & UPPER) + (is_inexact_negative << 16)


@triton.jit
def bits_above(values):
    """The bits of the least bfloat16 that is not below these float32 values, none of which is negative."""
    bits = values.to(tl.uint32, bitcast=True)
    return (bits & UPPER) + (((bits & 0xFFFF) != 0).to(tl.uint32) << 16)


@triton.jit
def is_finite(values):
    return (values.to(tl.uint32, bitcast=True) & 0x7F800000) != 0x7F800000


@triton.jit
def to_nearest(values):
    """Whole numbers below 2 ** 22, halves rounded to the even one: adding a large number leaves no bits behind the point."""
    return values + 12582912.0 - 12582912.0
