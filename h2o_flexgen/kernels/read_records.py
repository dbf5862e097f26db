"""Single tokens of KV that are read from a file to their places in an image, by many threads at once. In C and in Python.

Each thread calls with a buffer of its own, and takes units from the list until none is left. So a disk has as many reads under
way as there are threads.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import numpy
from torch import Tensor

from h2o_flexgen.kernels.native import run
from h2o_flexgen.kernels.raw_memory import address_of, bytes_of, numpy_of

ENDED = -1  # the file has less than was asked for


@dataclass(frozen=True)
class RecordReads:
    """What is read: units of whole pages, in which tokens have their values of all sets and heads side by side."""

    file: int  # a descriptor
    alignment: int  # of places in the file, and of buffers
    units: numpy.ndarray  # (count, 3), int64: a row of the image, where that row begins in the file, and a unit's number in it
    held: numpy.ndarray  # (rows,), int64: the tokens that a row has in the file
    unit_bytes: int
    unit_tokens: int
    image: numpy.ndarray  # (sets, rows, heads, slots, width), contiguous in width
    progress: numpy.ndarray  # (2,), int64, zeros: the first unit that is not taken, and what went wrong


def read_records(wanted: RecordReads, buffer: Tensor) -> None:
    """Reads units until none is left. `buffer`: bytes for some of them, of this thread alone."""
    sets, _, heads, _, width = wanted.image.shape
    set_bytes, row_bytes, head_bytes, slot_bytes, value_bytes = wanted.image.strides
    given = _RecordReads(
        *(array.ctypes.data for array in (wanted.units, wanted.held, wanted.progress)),
        address_of(buffer, writes=True),
        wanted.image.ctypes.data,
        *(len(wanted.units), len(buffer) // wanted.unit_bytes),
        *(wanted.unit_bytes, wanted.unit_tokens),
        *(sets, heads, width * value_bytes),
        *(set_bytes, row_bytes, head_bytes, slot_bytes),
        *(wanted.alignment, wanted.file),
    )
    run("read_records", given, 1)


def read_records_twin(wanted: RecordReads, buffer: Tensor) -> None:
    """Unit by unit. Only the interpreter's lock keeps two threads from taking the same one, which would do no harm."""
    sets, _, heads, _, width = wanted.image.shape
    while wanted.progress[0] < len(wanted.units) and not wanted.progress[1]:
        row, begins, unit = map(int, wanted.units[wanted.progress[0]])
        wanted.progress[0] += 1
        raw = buffer[: wanted.unit_bytes]
        try:
            if os.preadv(wanted.file, [bytes_of(raw, writes=True)], begins + unit * wanted.unit_bytes) < len(raw):
                wanted.progress[1] = ENDED
                return
        except OSError as error:
            wanted.progress[1] = error.errno or ENDED
            return
        first = unit * wanted.unit_tokens
        count = min(wanted.unit_tokens, int(wanted.held[row]) - first)
        values = numpy_of(raw).view(wanted.image.dtype)[: count * sets * heads * width]
        wanted.image[:, row, :, first : first + count] = values.reshape(count, sets, heads, width).transpose(1, 2, 0, 3)


class _RecordReads(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("units", "held", "progress", "buffer", "image")),
        *((name, ctypes.c_long) for name in ("count", "at_once", "unit_bytes", "unit_tokens", "sets", "heads", "width")),
        *((name, ctypes.c_long) for name in ("set", "row", "head", "slot", "alignment", "file")),
    )
