"""What a checkpoint's headers say of its tensors: where their bytes lie, and in which format.

Bytes are read outside of a run, some at a time, and compared with what was written where that is known, by checksums that
are cheap enough to be computed whenever weights are read. A page of 4096 bytes is 512 words of two halves. Each half is
multiplied by an odd number that belongs to its place, and the products of lower and of upper halves are summed separately,
in 64 bits that they cannot exceed; a digest of the pages' sums stands for each stretch of a tensor. So all bits count
alike: one half that differs, any two bits that do, halves or pages that change places, and pages of zeros are always
detected, anything else almost certainly, at the cost of two multiplications and additions per eight bytes. The sums guard
against faulty disks and half-written files, not against people with bad intent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b, shake_256
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy
import torch
from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import Rearranged
from h2o_flexgen.core.buffer_layout import ALIGNMENT, aligned
from h2o_flexgen.core.files import Check
from h2o_flexgen.core.hints import reason
from h2o_flexgen.formats.blocked import Blocked
from h2o_flexgen.formats.byte_layout import Sectioned, section_starts
from h2o_flexgen.formats.table import FORMATS, PLAIN
from h2o_flexgen.kernels.raw_memory import bytes_of

DECODED = "float32"  # the type of values that are decoded to be written in another form


class StoredAs(NamedTuple):
    """The format of a tensor's values in its file."""

    itemsize: int  # bytes of a value, where the format is plain
    format: str = PLAIN
    is_merged: bool = False  # a copy has the values of the file with something added, in the type that is computed with


class Segment(NamedTuple):
    """Bytes of a tensor that lie together in a file."""

    start: int  # the place of the first of them in the tensor
    stored: StoredTensor


class Located(Protocol):
    """A tensor with its bytes in files, in the format that its spec names."""

    @property
    def segments(self) -> tuple[Segment, ...]: ...


@dataclass(frozen=True)
class InSegments:
    segments: tuple[Segment, ...]


def unchecked(located: Located) -> Located:
    """The same places, without the checks of what is read there."""
    return InSegments(tuple(Segment(start, replace(stored, check=None)) for start, stored in located.segments))


class Added(Protocol):
    """What is added to the values that a file has of a matrix."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix in its file."""

    @property
    def description(self) -> str:
        """All that it depends on."""

    def to(self, first: int, rows: Tensor) -> Tensor:
        """Rows of the matrix, from this one on, with what is added to them, in float32."""


@dataclass(frozen=True)
class StoredTensor:
    """The place of one tensor's bytes."""

    name: str
    file: Path
    offset: int  # from the start of the file
    nbytes: int
    dtype: str  # "float32", "float16" or "bfloat16"; any other type keeps the code of its format ("I8")
    shape: tuple[int, ...]
    check: Check | None = field(default=None, compare=False)  # None if it is not known what was written
    arranged: Rearranged | None = None  # how it is made of the file's values; None: they are what lies there
    matrix: StoredMatrix | None = None  # it is made of the values of this one, where they are not plain
    added: Added | None = field(default=None, compare=False)

    @property
    def merged(self) -> Added | None:
        """What is added to the values that it is made of."""
        return self.added if self.matrix is None else self.matrix.added

    @property
    def segments(self) -> tuple[Segment, ...]:
        return (Segment(0, self),)

    @property
    def description(self) -> tuple[str, ...]:
        """The type of its values, where a copy is made of packed ones and has another than these are decoded to."""
        return () if self.matrix is None or self.dtype == DECODED else (self.dtype,)


class Make(Protocol):
    """Makes the bytes of a format that no file has so."""

    @property
    def description(self) -> str:
        """All that they depend on beside the files and the format."""

    def __call__(self, out: Tensor) -> None: ...


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix in a format of its checkpoint's own."""

    name: str
    format: str
    shape: tuple[int, ...]
    sections: tuple[StoredTensor, ...]  # its bytes, in the order of the format's; or what they are made of, if `make` is there
    make: Make | None = field(default=None, compare=False)
    added: Added | None = field(default=None, compare=False)

    @property
    def merged(self) -> Added | None:
        return self.added

    @property
    def description(self) -> tuple[str, ...]:
        """The format of its values in the file."""
        return (self.format,) if self.make is None else (self.format, self.make.description)

    @property
    def file(self) -> Path:
        """The file of its codes."""
        return self.sections[0].file

    @property
    def is_in_place(self) -> bool:
        return self.make is None

    @property
    def segments(self) -> tuple[Segment, ...]:
        assert self.is_in_place, self
        format = FORMATS[self.format]
        if isinstance(format, Blocked):
            (whole,) = self.sections
            return (Segment(0, whole),)
        assert isinstance(format, Sectioned), self
        return tuple(map(Segment, section_starts(format, self.shape), self.sections))


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
