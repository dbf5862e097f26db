"""PackedCheckpoint: a checkpoint with some matrices and tables in a format that its files do not have, or have transposed. They
are encoded once, some rows at a time, into safetensors in a cache folder. Later they are read from there, in every step if
they are placed on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch

from h2o_flexgen.checkpoints.checkpoint import Checkpoint
from h2o_flexgen.checkpoints.decoded_values import plain_rows, stored_values
from h2o_flexgen.checkpoints.derived import PACKED, DerivedFolder
from h2o_flexgen.checkpoints.file_reading import Sums
from h2o_flexgen.checkpoints.model_files import Progress, advancing, require_free_space
from h2o_flexgen.checkpoints.safetensors_format import TensorHeader, write_safetensors
from h2o_flexgen.checkpoints.stored_tensors import DECODED, Located, StoredAs, StoredMatrix, StoredTensor
from h2o_flexgen.core.buffer_layout import aligned
from h2o_flexgen.core.model_spec import DTYPE_BYTES, ModelSpec, TensorSpec
from h2o_flexgen.formats.table import FORMATS, PLAIN, chosen_format
from h2o_flexgen.kernels.operations import encode

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
