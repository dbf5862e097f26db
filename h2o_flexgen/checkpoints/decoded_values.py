"""The values of a tensor in whatever format its checkpoint has it, some rows at a time, to be written in another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from h2o_flexgen.checkpoints.file_reading import PART_BYTES, read_range, read_rows, read_whole
from h2o_flexgen.checkpoints.stored_tensors import Added, StoredMatrix, StoredTensor
from h2o_flexgen.formats.blocked import Blocked
from h2o_flexgen.formats.sectioned import Sectioned, parts_of_sections, section_starts
from h2o_flexgen.formats.table import FORMATS
from h2o_flexgen.kernels.operations import decode

FLOAT32_BYTES = 4
CUTS = 128  # outputs: every format can be cut at multiples of it

ReadSection = Callable[[int, int, int], torch.Tensor]  # number of the section, first and last byte


def stored_values(stored: StoredTensor | StoredMatrix, together: int) -> Iterator[torch.Tensor]:
    """The rows (rows, columns), some times `together` of them at once but for the last ones."""
    if isinstance(stored, StoredTensor):
        return _plain(stored, together)
    rows = _decoded_rows(stored, together)
    return rows if stored.added is None else _with_added(rows, stored.added)


def _decoded_rows(stored: StoredMatrix, together: int) -> Iterator[torch.Tensor]:
    format = FORMATS[stored.format]
    if isinstance(format, Blocked):
        return _blocked(format, stored, together)
    assert isinstance(format, Sectioned)
    return _sectioned(format, stored, -(-CUTS // together) * together)


def _with_added(each: Iterable[torch.Tensor], added: Added) -> Iterator[torch.Tensor]:
    first = 0
    for rows in each:
        yield added.to(first, rows)
        first += len(rows)


def plain_rows(stored: StoredTensor, together: int) -> Iterator[torch.Tensor]:
    """The rows in the type of the file, or in float32 where something is added to them, some times `together` of them at once
    but for the last ones."""
    dtype: torch.dtype = getattr(torch, stored.dtype)
    if stored.arranged is not None:  # rows lie in no range, so all are read, which are those of an expert or of an attention
        yield from stored.arranged.of(_whole(stored, dtype)).split(_rows_at_once(stored.shape[1], together))
        return
    each = (rows.view(dtype) for rows in read_rows(stored, stored.shape[-1] * dtype.itemsize, together))
    yield from each if stored.added is None else _with_added(each, stored.added)


def _whole(stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    if stored.matrix is not None:
        rows = stored_values(stored.matrix, 1)
        return torch.cat([*rows] if stored.merged is not None else [values.to(dtype) for values in rows])
    values = read_whole(stored).view(dtype)
    return values if stored.added is None else stored.added.to(0, values.view(stored.added.shape)).flatten()


def _plain(stored: StoredTensor, together: int) -> Iterator[torch.Tensor]:
    for rows in plain_rows(stored, together):
        values = rows.contiguous()
        yield values.float() if values.dtype == torch.float16 else values  # exact, and readable from C


def _blocked(format: Blocked, stored: StoredMatrix, together: int) -> Iterator[torch.Tensor]:
    columns = stored.shape[1]
    row_bytes = format.nbytes((1, columns), FLOAT32_BYTES)
    for rows in read_rows(stored.sections[0], row_bytes, together):
        for part in rows.split(_rows_at_once(columns, together)):
            yield _decoded(stored.format, part, len(part), columns)


def _sectioned(format: Sectioned, stored: StoredMatrix, together: int) -> Iterator[torch.Tensor]:
    outputs, columns = stored.shape
    read = _reader(format, stored)
    step = _rows_at_once(columns, together)
    for first in range(0, outputs, step):
        last = min(first + step, outputs)
        shape = (last - first, columns)
        data = torch.zeros(format.nbytes(shape, FLOAT32_BYTES), dtype=torch.uint8)
        ranges = parts_of_sections(format, stored.shape, first, last)
        for number, (start, (begin, end)) in enumerate(zip(section_starts(format, shape), ranges)):
            data[start : start + end - begin] = read(number, begin, end)
        yield _decoded(format.name, data, *shape)


def _reader(format: Sectioned, stored: StoredMatrix) -> ReadSection:
    """Reads from the file; or from memory, where bytes are made, or are checked as a whole."""
    if stored.make is None:
        if any(section.check is not None for section in stored.sections):
            held = [read_whole(section) for section in stored.sections]
            return lambda number, begin, end: held[number][begin:end]
        return lambda number, begin, end: read_range(stored.sections[number], begin, end)
    made = torch.empty(format.nbytes(stored.shape, FLOAT32_BYTES), dtype=torch.uint8)
    stored.make(made)
    starts = section_starts(format, stored.shape)
    return lambda number, begin, end: made[starts[number] + begin : starts[number] + end]


def _rows_at_once(columns: int, together: int) -> int:
    return max(1, PART_BYTES // (FLOAT32_BYTES * columns * together)) * together


def _decoded(format: str, data: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    out = torch.empty(rows, columns)
    decode(format, data, out)
    return out
