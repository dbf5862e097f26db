"""Checksums that are cheap enough to be computed whenever weights are read.

A page of 4096 bytes is 512 words of two halves. Each half is multiplied by an odd number that belongs to its place, and the
products of lower and of upper halves are summed separately, in 64 bits that they cannot exceed; a digest of the pages' sums
stands for each stretch of a tensor. So all bits count alike: one half that differs, any two bits that do, halves or pages that
change places, and pages of zeros are always detected, anything else almost certainly, at the cost of two multiplications and
additions per eight bytes. The sums guard against faulty disks and half-written files, not against people with bad intent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import blake2b, shake_256

import numpy

from h2o_flexgen.core.buffer_layout import ALIGNMENT, aligned

STRETCH_BYTES = 1 << 20  # a reader of a part of a tensor reads whole stretches
WORDS = ALIGNMENT // 8  # of a page
HALF_BITS = 32  # of a word
WEIGHT_BITS = 64 - HALF_BITS - (WORDS - 1).bit_length()
DIGEST_BYTES = 8
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Sums:
    """Checksums of a tensor's bytes, one for each stretch."""

    text: str  # the digests one after the other, in hexadecimal digits

    @classmethod
    def of(cls, data: Buffer) -> Sums:
        return cls("".join(_digest(part).hex() for part in _stretches(data)))

    def are_of(self, data: Buffer, start: int, nbytes: int) -> bool:
        """True if the sums are those of `data`, a part of a tensor of `nbytes` bytes that begins at byte `start`."""
        is_whole = len(data) % STRETCH_BYTES == 0 or aligned(start + len(data)) == aligned(nbytes)
        assert start % STRETCH_BYTES == 0 and is_whole, (start, len(data), nbytes)
        digits = 2 * DIGEST_BYTES
        first = start // STRETCH_BYTES
        expected = self.text[first * digits : (first + -(-len(data) // STRETCH_BYTES)) * digits]
        return Sums.of(data).text == expected


def _stretches(data: Buffer) -> list[memoryview]:
    view = memoryview(data)
    return [view[start : start + STRETCH_BYTES] for start in range(0, len(view), STRETCH_BYTES)]


def _digest(stretch: memoryview) -> bytes:
    whole = len(stretch) // ALIGNMENT * ALIGNMENT
    pages = [_page_sums(stretch[:whole])]
    if whole < len(stretch):  # the rest is treated as a page that ends in zeros
        pages.append(_page_sums(bytes(stretch[whole:]).ljust(ALIGNMENT, b"\0")))
    return blake2b(numpy.concatenate(pages).tobytes(), digest_size=DIGEST_BYTES).digest()


def _page_sums(pages: Buffer) -> numpy.ndarray:
    """Two sums for each page: of whole words, of which only 64 bits are kept, and of their upper halves, kept whole. The sum of
    the lower halves follows from both, so that no bit of either half can hide."""
    words = numpy.frombuffer(pages, dtype="<u8").reshape(-1, WORDS)
    halves = (words, words >> numpy.uint64(HALF_BITS))
    return numpy.stack([numpy.einsum("ij,j->i", half, page_weights()) for half in halves], axis=1)


@cache
def page_weights() -> numpy.ndarray:
    """Odd numbers, all different: the sum of their products with words of 32 bits stays below 2**64."""
    drawn = numpy.frombuffer(shake_256(b"weights of a page").digest(4 * WORDS), dtype="<u4").astype(numpy.uint64)
    weights: numpy.ndarray = drawn >> numpy.uint64(32 - WEIGHT_BITS) | numpy.uint64(1)
    return weights
