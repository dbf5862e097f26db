"""Checksums that are cheap enough to be computed whenever weights are read.

A page of 4096 bytes is 512 words, each times an odd number of its place, added up modulo 2**64; a digest of the pages' sums
stands for each stretch of a tensor. So a word that differs, words or pages that change places, and pages of zeros are seen, and
no more than a multiplication and an addition is done for eight bytes. They guard against faulty disks and half-written files;
against somebody who means harm they are no help.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import blake2b

import numpy

from h2o_flexgen.models.files import ALIGNMENT, align_up

STRETCH_BYTES = 1 << 20  # whoever reads a part of a tensor reads whole stretches
WORD_BYTES = 8
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
        is_whole = len(data) % STRETCH_BYTES == 0 or align_up(start + len(data)) == align_up(nbytes)
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
    words = numpy.frombuffer(pages, dtype="<u8").reshape(-1, ALIGNMENT // WORD_BYTES)
    sums: numpy.ndarray = numpy.einsum("ij,j->i", words, _weights())
    return sums


@cache
def _weights() -> numpy.ndarray:
    return numpy.arange(1, 2 * (ALIGNMENT // WORD_BYTES), 2, dtype=numpy.uint64)
