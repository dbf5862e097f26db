"""Single tokens of KV that are read from a file to their places in an image, by many threads at once. In C and in Python.

Each thread calls with a buffer of its own, and takes page groups from the list until none is left. So a disk has as many reads
under way as there are threads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy
from torch import Tensor

from h2o_flexgen.kernels.native import run
from h2o_flexgen.kernels.raw_memory import address_of, bytes_of, numpy_of

ENDED = -1  # the file has less than was asked for


@dataclass(frozen=True)
class TokenReads:
    """What is read: page groups, in which tokens have their values of all sets and heads side by side."""

    file: int  # a descriptor
    alignment: int  # of places in the file, and of buffers
    groups: numpy.ndarray  # (count, 3), int64: a row of the image, where it begins in the file, and a page group's number in it
    held: numpy.ndarray  # (rows,), int64: the tokens that a row has in the file
    group_bytes: int
    group_tokens: int
    image: numpy.ndarray  # (sets, rows, heads, slots, width), contiguous in width
    progress: numpy.ndarray  # (2,), int64, zeros: in C the first page group that is not taken, and what went wrong
    taken: Iterator[int] = field(default_factory=count)  # the same in Python: each next number goes to one thread


def read_tokens(wanted: TokenReads, buffer: Tensor) -> None:
    """Reads page groups until none is left. `buffer`: bytes for some of them, of this thread alone."""
    sets, _, heads, _, width = wanted.image.shape
    set_bytes, row_bytes, head_bytes, slot_bytes, value_bytes = wanted.image.strides
    given = _TokenReads(
        *(array.ctypes.data for array in (wanted.groups, wanted.held, wanted.progress)),
        address_of(buffer, writes=True),
        wanted.image.ctypes.data,
        *(len(wanted.groups), len(buffer) // wanted.group_bytes),
        *(wanted.group_bytes, wanted.group_tokens),
        *(sets, heads, width * value_bytes),
        *(set_bytes, row_bytes, head_bytes, slot_bytes),
        *(wanted.alignment, wanted.file),
    )
    run("read_tokens", given, 1)


def read_tokens_twin(wanted: TokenReads, buffer: Tensor) -> None:
    """One page group at a time."""
    sets, _, heads, _, width = wanted.image.shape
    for place in wanted.taken:
        if place >= len(wanted.groups) or wanted.progress[1]:
            return
        row, begins, group = map(int, wanted.groups[place])
        raw = buffer[: wanted.group_bytes]
        if failed := _read_whole(wanted, begins + group * wanted.group_bytes, bytes_of(raw, writes=True)):
            wanted.progress[1] = failed
            return
        first = group * wanted.group_tokens
        tokens = min(wanted.group_tokens, int(wanted.held[row]) - first)
        values = numpy_of(raw).view(wanted.image.dtype)[: tokens * sets * heads * width]
        wanted.image[:, row, :, first : first + tokens] = values.reshape(tokens, sets, heads, width).transpose(1, 2, 0, 3)


def _read_whole(wanted: TokenReads, start: int, out: memoryview) -> int:
    """Fills `out`, and says what went wrong, or 0. A read past the page cache goes on where a page begins."""
    done = 0
    while done < len(out):
        at = done // wanted.alignment * wanted.alignment
        try:
            got = os.preadv(wanted.file, [out[at:]], start + at)
        except OSError as error:
            return error.errno or ENDED
        if at + got <= done:
            return ENDED
        done = at + got
    return 0


class _TokenReads(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("groups", "held", "progress", "buffer", "image")),
        *((name, ctypes.c_long) for name in ("count", "at_once", "group_bytes", "group_tokens", "sets", "heads", "width")),
        *((name, ctypes.c_long) for name in ("set", "row", "head", "slot", "alignment", "file")),
    )
