"""PackedCheckpoint: a checkpoint with some matrices and tables in a format that its files do not have, or have transposed.
They are encoded once, some rows at a time, into safetensors in a cache folder. Later they are read from there, in every step
if they are placed on disk.

The values of a tensor are read in whatever format its checkpoint has it, some rows at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch

from h2o_flexgen.checkpoints.checkpoint import Checkpoint
from h2o_flexgen.checkpoints.derived import PACKED, DerivedFolder
from h2o_flexgen.checkpoints.model_files import Progress, advancing, require_free_space
from h2o_flexgen.checkpoints.safetensors_format import TensorHeader, write_safetensors
from h2o_flexgen.checkpoints.stored_tensors import (
    DECODED,
    PART_BYTES,
    Added,
    Located,
    StoredAs,
    StoredMatrix,
    StoredTensor,
    Sums,
    read_range,
    read_rows,
    read_whole,
)
from h2o_flexgen.core.buffer_layout import aligned
from h2o_flexgen.core.model_spec import DTYPE_BYTES, ModelSpec, TensorSpec
from h2o_flexgen.formats.blocked import Blocked
from h2o_flexgen.formats.byte_layout import Sectioned, parts_of_sections, section_starts
from h2o_flexgen.formats.table import FORMATS, PLAIN, chosen_format
from h2o_flexgen.kernels.operations import decode, encode

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


FILE_BYTES = 2 << 30  # of a packed file, approximately
LARGEST = 1e38  # so that the difference of two values is still a float32
NAMING = 1  # in the names of folders: with another number, earlier folders would not be found


class PackedCheckpoint:
    """A WeightSource that encodes nothing before the first packed tensor is asked for."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        cache_dir: Path | None = None,
        progress: Progress | None = None,
        renewing: Callable[[], None] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._progress, self._renewing = progress, renewing
        self._tensors = checkpoint.to_write(spec)
        self._dtype = spec.dtype
        asked = json.dumps([NAMING, *map(self._asked, self._tensors.values())])
        purpose = f"pack the weights of {checkpoint.place}"
        self._folder = DerivedFolder.of(checkpoint.place, checkpoint.origins, PACKED, purpose, asked, cache_dir)

    def _asked(self, tensor: TensorSpec) -> tuple[object, ...]:
        """What a copy depends on. It is not the layout of a format: a copy of an older layout has the same name."""
        stored = self._checkpoint.located(tensor)
        merged = () if stored.merged is None else (stored.merged.description,)
        rounded = (self._dtype_of(tensor, stored),) if merged and tensor.format == PLAIN else ()
        return tensor.name, tensor.shape, chosen_format(tensor.format), *stored.description, *merged, *rounded

    def _dtype_of(self, tensor: TensorSpec, stored: StoredTensor | StoredMatrix) -> str:
        """The type of plain values in a copy: that of the file, or where something is added that of computation."""
        if stored.merged is None:
            assert isinstance(stored, StoredTensor), stored
            return stored.dtype
        return self._dtype if tensor.itemsize == DTYPE_BYTES[self._dtype] else DECODED

    @property
    def folder(self) -> Path:
        return self._folder.path

    @property
    def bytes_to_write(self) -> int:
        """Bytes that it will write to the cache, once."""
        return 0 if self._folder.is_there else self._nbytes

    @property
    def bytes_to_free(self) -> int:
        """Bytes of a copy of an older layout, which is removed before."""
        return self._folder.older_bytes

    @property
    def _nbytes(self) -> int:
        return sum(aligned(tensor.stored_nbytes) for tensor in self._tensors.values())

    # -- a source of weights -----------------------------------------------------------------------------------------------

    def stored_as(self, name: str) -> StoredAs:
        return self._checkpoint.stored_as(name)

    def locate(self, tensors: Iterable[TensorSpec]) -> Mapping[str, Located]:
        wanted = list(tensors)
        there = self._checkpoint.locate(tensor for tensor in wanted if tensor.name not in self._tensors)
        return {**there, **{tensor.name: self._packed[tensor.name] for tensor in wanted if tensor.name in self._tensors}}

    def fill(self, tensor: TensorSpec, out: torch.Tensor) -> bool:
        return False

    def close(self) -> None:
        self._checkpoint.close()

    # -- the packed files --------------------------------------------------------------------------------------------------

    @cached_property
    def _packed(self) -> Mapping[str, StoredTensor]:
        copy = self._folder.made(self._build, self._renewing)
        return {tensor.name: self._as_asked(tensor) for file in copy.files for tensor in copy.tensors(file)}

    def _as_asked(self, packed: StoredTensor) -> StoredTensor:
        """Plain values have a type; all others are bytes."""
        tensor = self._tensors[packed.name]
        if tensor.format != PLAIN:
            return packed
        return replace(packed, dtype=self._dtype_of(tensor, self._checkpoint.located(tensor)), shape=tensor.shape)

    def _build(self, folder: Path) -> dict[str, dict[str, Sums]]:
        sums = {}
        require_free_space(folder.parent, self._nbytes, "packing the weights")
        advance = advancing(self._progress, self._nbytes)
        for number, tensors in enumerate(_in_files(self._tensors.values())):
            # as whole pages, so that each starts where direct reads can
            headers = [TensorHeader(tensor.name, torch.uint8, (aligned(tensor.stored_nbytes),)) for tensor in tensors]
            value = partial(self._encoded, advance)
            name = f"packed-{number:05d}.safetensors"
            sums[name] = write_safetensors(folder / name, headers, value)
        return sums

    def _encoded(self, advance: Callable[[int], None], name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        out = torch.zeros(aligned(tensor.stored_nbytes), dtype=torch.uint8)
        stored = self._checkpoint.located(tensor)
        if tensor.format == PLAIN:
            dtype: torch.dtype = getattr(torch, self._dtype_of(tensor, stored))
            _round(tensor, stored, out[: tensor.stored_nbytes].view(dtype).view(tensor.shape))
        elif isinstance(stored, StoredMatrix) and stored.make is not None and stored.format == tensor.format:
            stored.make(out[: tensor.nbytes])
        else:
            _encode(tensor, stored, out)
        advance(len(out))
        return out


def _round(tensor: TensorSpec, stored: StoredTensor | StoredMatrix, out: torch.Tensor) -> None:
    """Fills plain values; those to which something was added are rounded here, once."""
    first = 0
    for rows in plain_rows(stored, 1) if isinstance(stored, StoredTensor) else stored_values(stored, 1):
        out[first : first + len(rows)] = rows
        first += len(rows)
    if stored.merged is not None and not bool(out.isfinite().all()):
        problem = "would hold NaN or infinity with what adapters add to it; give other adapters"
        raise ValueError(f"tensor {tensor.name} in {stored.file} {problem}")


def _encode(tensor: TensorSpec, stored: StoredTensor | StoredMatrix, out: torch.Tensor) -> None:
    format, start = FORMATS[tensor.format], 0
    for values in stored_values(stored, format.rows_together):
        end = start + format.nbytes(tuple(values.shape), values.itemsize)
        if not float(values.abs().amax()) < LARGEST:  # false for NaN too
            problem = "holds NaN, infinity or a value beyond 1e38, which cannot be packed; give another checkpoint"
            raise ValueError(f"tensor {tensor.name} in {stored.file} {problem}")
        encode(tensor.format, values, out[start:end])
        start = end


def _in_files(tensors: Iterable[TensorSpec]) -> Iterator[list[TensorSpec]]:
    own: list[TensorSpec] = []
    for tensor in tensors:
        if own and sum(one.stored_nbytes for one in own) + tensor.stored_nbytes > FILE_BYTES:
            yield own
            own = []
        own.append(tensor)
    yield own
