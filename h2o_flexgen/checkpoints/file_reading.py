"""Bytes of stored tensors: read outside of a run, some at a time, and compared with what was written where that is known, by
checksums that are cheap enough to be computed whenever weights are read.

A page of 4096 bytes is 512 words of two halves. Each half is multiplied by an odd number that belongs to its place, and the
products of lower and of upper halves are summed separately, in 64 bits that they cannot exceed; a digest of the pages' sums
stands for each stretch of a tensor. So all bits count alike: one half that differs, any two bits that do, halves or pages that
change places, and pages of zeros are always detected, anything else almost certainly, at the cost of two multiplications and
additions per eight bytes. The sums guard against faulty disks and half-written files, not against people with bad intent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b, shake_256
from io import FileIO

import numpy
import torch

from h2o_flexgen.checkpoints.stored_tensors import StoredTensor
from h2o_flexgen.core.buffer_layout import ALIGNMENT, aligned
from h2o_flexgen.core.hints import reason
from h2o_flexgen.kernels.raw_memory import bytes_of

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


# -- reading -----------------------------------------------------------------------------------------------------------

PART_BYTES = 16 << 20  # of a checkpoint's values, worked on at once


def read_parts(stored: StoredTensor, step: int) -> Iterator[tuple[int, torch.Tensor]]:
    """A tensor's bytes in parts of `step`, with their places. Those of a copy come in whole stretches, the very bytes that were
    checked."""
    step = step if stored.check is None else max(1, step // STRETCH_BYTES) * STRETCH_BYTES
    for start in range(0, stored.nbytes, step):
        part = read_range(stored, start, min(start + step, stored.nbytes))
        if stored.check is not None:
            stored.check(stored.offset + start, bytes_of(part))
        yield start, part


def read_rows(stored: StoredTensor, row_bytes: int, together: int) -> Iterator[torch.Tensor]:
    """Whole rows of a tensor as (rows, bytes of a row), some times `together` of them at once but for the last ones."""
    rest = torch.empty(0, dtype=torch.uint8)  # the beginning of rows that are not complete yet
    unit = together * row_bytes
    for start, part in read_parts(stored, max(PART_BYTES // unit, 1) * unit):
        both = torch.cat((rest, part)) if len(rest) else part
        is_last = start + len(part) == stored.nbytes
        whole = len(both) // row_bytes * row_bytes if is_last else len(both) // unit * unit
        rest = both[whole:].clone()  # a view would keep the whole part alive
        if whole:
            yield both[:whole].view(-1, row_bytes)


def read_whole(stored: StoredTensor) -> torch.Tensor:
    """All bytes of a tensor that is small."""
    out = torch.empty(stored.nbytes, dtype=torch.uint8)
    for start, part in read_parts(stored, PART_BYTES):
        out[start : start + len(part)] = part
    return out


def read_range(stored: StoredTensor, start: int, stop: int) -> torch.Tensor:
    """The bytes from `start` to `stop` of a tensor, not compared. Read pages leave the page cache, where they would displace
    others."""
    part = torch.empty(stop - start, dtype=torch.uint8)
    try:
        with stored.file.open("rb", buffering=0) as file:
            file.seek(stored.offset + start)
            if _read_fully(file, part) < len(part):
                raise OSError(f"the file ends before its tensor {stored.name} does; is it truncated?")
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), stored.offset + start, len(part), os.POSIX_FADV_DONTNEED)
    except OSError as error:
        if stored.check is not None:
            raise stored.check.unreadable(error) from error
        raise ValueError(f"tensor {stored.name} in {stored.file} cannot be read: {reason(error)}") from error
    return part


def _read_fully(file: FileIO, out: torch.Tensor) -> int:
    room, done = bytes_of(out, writes=True), 0
    while done < len(room) and (count := file.readinto(room[done:])):
        done += count
    return done
