"""Single tokens of KV that are read from a file to their places in an image, many at once. In C and in Python.

Where the system has queues of reads (`ReadQueue`), one thread of C has many under way, at a quarter of the processor's time
that threads take. They only work past the page cache. Elsewhere many threads call, each with a buffer of its own, and take page
groups from the list until none is left.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from weakref import finalize

import numpy
from torch import Tensor

from h2o_flexgen.kernels.native import open_read_queue, run
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
    entries: numpy.ndarray | None = None  # (rows, slots), int32: the slot of the image for each token, or less than 0
    taken: Iterator[int] = field(default_factory=count)  # the same in Python: each next number goes to one thread


class ReadQueue:
    """A queue of the system for reads that are under way. It is kept, because to make and to remove one takes long."""

    def __init__(self, number: int, close: Callable[[], object]) -> None:
        self.number = number
        self.close = finalize(self, close)
        self.close.atexit = False  # a process that ends closes it by itself

    @classmethod
    def opened(cls) -> ReadQueue | None:
        """None where the system has none, or keeps it from this process."""
        number, close = open_read_queue()
        return cls(number, close) if number else None


def read_tokens(wanted: TokenReads, buffer: Tensor, at_once: int, queue: ReadQueue | None = None) -> None:
    """Reads page groups until none is left, `at_once` if they lie side by side. `buffer`: bytes for so many, of this thread
    alone; and that for each read that may be under way, where they are queued."""
    sets, _, heads, _, width = wanted.image.shape
    set_bytes, row_bytes, head_bytes, slot_bytes, value_bytes = wanted.image.strides
    entries = wanted.entries
    assert entries is None or (entries.dtype == numpy.int32 and entries.flags.c_contiguous)
    given = _TokenReads(
        *(array.ctypes.data for array in (wanted.groups, wanted.held)),
        None if entries is None else entries.ctypes.data,
        wanted.progress.ctypes.data,
        address_of(buffer, writes=True),
        wanted.image.ctypes.data,
        0 if queue is None else queue.number,
        *(len(wanted.groups), at_once, len(buffer) // (at_once * wanted.group_bytes)),
        *(wanted.group_bytes, wanted.group_tokens),
        *(sets, heads, width * value_bytes),
        *(set_bytes, row_bytes, head_bytes, slot_bytes),
        0 if entries is None else entries.shape[1],
        *(wanted.alignment, wanted.file),
    )
    run("read_tokens", given, 1)


def read_tokens_twin(wanted: TokenReads, buffer: Tensor, at_once: int, queue: ReadQueue | None = None) -> None:
    """One page group at a time, and one read."""
    for place in wanted.taken:
        if place >= len(wanted.groups) or wanted.progress[1]:
            return
        row, begins, group = map(int, wanted.groups[place])
        raw = buffer[: wanted.group_bytes]
        if failed := _read_whole(wanted, begins + group * wanted.group_bytes, bytes_of(raw, writes=True)):
            wanted.progress[1] = failed
            return
        _place(wanted, row, group * wanted.group_tokens, numpy_of(raw))


def _place(wanted: TokenReads, row: int, first: int, raw: numpy.ndarray) -> None:
    """Places the tokens of a page group from this one on."""
    sets, _, heads, _, width = wanted.image.shape
    tokens = min(wanted.group_tokens, int(wanted.held[row]) - first)
    values = raw.view(wanted.image.dtype)[: tokens * sets * heads * width].reshape(tokens, sets, heads, width)
    slots = numpy.arange(first, first + tokens) if wanted.entries is None else wanted.entries[row, first : first + tokens]
    there = slots >= 0
    wanted.image[:, row][:, :, slots[there]] = values[there].transpose(1, 2, 0, 3)


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
        *((name, ctypes.c_void_p) for name in ("groups", "held", "entries", "progress", "buffer", "image")),
        ("queue", ctypes.c_int64),
        *((name, ctypes.c_long) for name in ("count", "at_once", "most", "group_bytes", "group_tokens")),
        *((name, ctypes.c_long) for name in ("sets", "heads", "width", "set", "row", "head", "slot")),
        *((name, ctypes.c_long) for name in ("slots", "alignment", "file")),
    )
