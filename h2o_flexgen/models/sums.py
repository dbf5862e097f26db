"""Checksums that are cheap enough to be computed whenever weights are read.

A page of 4096 bytes is 512 words of two halves. Each half is multiplied by an odd number that belongs to its place, and the
products of lower and of upper halves are added up apart, in 64 bits that they cannot exceed; a digest of the pages' sums stands
for each stretch of a tensor. So no bit counts less than another: one half that differs, any two bits that do, halves or pages
that change places, and pages of zeros are always seen, anything else with all but certainty, for two multiplications and
additions per eight bytes. The sums guard against faulty disks and half-written files; against somebody who means harm they are
no help.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import blake2b, shake_256

import numpy

from h2o_flexgen.core.layout import ALIGNMENT, aligned

STRETCH_BYTES = 1 << 20  # whoever reads a part of a tensor reads whole stretches
WORDS = ALIGNMENT // 8  # of a page
HALF_BITS = 32  # of a word
WEIGHT_BITS = 64 - HALF_BITS - (WORDS - 1).bit_length()
DIGEST_BYTES = 8
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Sums:
    """One for each stretch of a tensor's bytes."""

    text: str  # the digests one behind the other, in hexadecimal digits

    @classmethod
    def of(cls, data: Buffer) -> Sums:
        return cls("".join(_digest(part).hex() for part in _stretches(data)))

    def are_of(self, data: Buffer, start: int, nbytes: int) -> bool:
        """Whether the sums were made of this part of a tensor: `data` from byte `start` on, of `nbytes` in all."""
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
    if whole < len(stretch):  # the rest is taken as a page that ends in zeros
        pages.append(_page_sums(bytes(stretch[whole:]).ljust(ALIGNMENT, b"\0")))
    return blake2b(numpy.concatenate(pages).tobytes(), digest_size=DIGEST_BYTES).digest()


def _page_sums(pages: Buffer) -> numpy.ndarray:
    """Two sums for each page: of whole words, where what exceeds 64 bits is lost, and of their upper halves, where nothing is.
    The sum of the lower halves follows from both, so that no bit of either half can hide."""
    words = numpy.frombuffer(pages, dtype="<u8").reshape(-1, WORDS)
    halves = (words, words >> numpy.uint64(HALF_BITS))
    return numpy.stack([numpy.einsum("ij,j->i", half, page_weights()) for half in halves], axis=1)


@cache
def page_weights() -> numpy.ndarray:
    """Odd and all different: a sum of these times words of 32 bits stays below 2**64."""
    drawn = numpy.frombuffer(shake_256(b"weights of a page").digest(4 * WORDS), dtype="<u4").astype(numpy.uint64)
    weights: numpy.ndarray = drawn >> numpy.uint64(32 - WEIGHT_BITS) | numpy.uint64(1)
    return weights
