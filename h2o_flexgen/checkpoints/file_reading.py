"""Bytes of stored tensors read outside of a run, some at a time, and compared with what was written where that is known."""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import FileIO

import torch

from h2o_flexgen.checkpoints.stored_tensors import StoredTensor
from h2o_flexgen.checkpoints.sums import STRETCH_BYTES
from h2o_flexgen.core.hints import reason
from h2o_flexgen.kernels.raw_memory import bytes_of

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
