"""PackedCheckpoint: a checkpoint some of whose matrices and tables are kept in a form that its files do not have. They are
encoded once, some rows at a time, into safetensors in a cache folder, and read from there ever after, in every step if they are
placed on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from io import FileIO
from pathlib import Path

import torch

from h2o_flexgen.core.hints import reason
from h2o_flexgen.core.layout import aligned
from h2o_flexgen.core.model_spec import ModelSpec, TensorSpec
from h2o_flexgen.kernels.operations import encode
from h2o_flexgen.kernels.raw_memory import bytes_of
from h2o_flexgen.models.checkpoint import Checkpoint
from h2o_flexgen.models.derived import PACKED, DerivedFolder
from h2o_flexgen.models.files import Progress, advancing, require_free_space
from h2o_flexgen.models.safetensors_format import TensorForm, write_safetensors
from h2o_flexgen.models.stored import Located, StoredAs, StoredTensor
from h2o_flexgen.models.sums import STRETCH_BYTES, Sums
from h2o_flexgen.quant.codec import CODECS, chosen_codec

FILE_BYTES = 2 << 30  # of a packed file, approximately
PART_BYTES = 16 << 20  # of a checkpoint's values, encoded at once
LARGEST = 1e38  # so that the difference of two values is still a float32
NAMING = 1  # in the names of folders: with another number nobody would find those of before


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
        packed = ((tensor.name, tensor.shape, chosen_codec(tensor.codec)) for tensor in self._tensors.values())
        asked = json.dumps([NAMING, *packed])  # and not the form: a copy of an older one has this name too
        purpose = f"pack the weights of {checkpoint.place}"
        self._folder = DerivedFolder.of(checkpoint.place, checkpoint.origins, PACKED, purpose, asked, cache_dir)

    @property
    def folder(self) -> Path:
        return self._folder.path

    @property
    def bytes_to_write(self) -> int:
        """Bytes that it will write to the cache, once."""
        return 0 if self._folder.is_there else self._nbytes

    @property
    def bytes_to_free(self) -> int:
        """Bytes of a copy in an older form, which is removed before."""
        return self._folder.older_bytes

    @property
    def _nbytes(self) -> int:
        return sum(aligned(tensor.nbytes) for tensor in self._tensors.values())

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
        return {tensor.name: tensor for file in copy.files for tensor in copy.tensors(file)}

    def _build(self, folder: Path) -> dict[str, dict[str, Sums]]:
        sums = {}
        require_free_space(folder.parent, self._nbytes, "packing the weights")
        advance = advancing(self._progress, self._nbytes)
        for number, tensors in enumerate(_in_files(self._tensors.values())):
            # as whole pages, so that each starts where direct reads can
            forms = [TensorForm(tensor.name, torch.uint8, (aligned(tensor.nbytes),)) for tensor in tensors]
            value = partial(self._encoded, advance)
            name = f"packed-{number:05d}.safetensors"
            sums[name] = write_safetensors(folder / name, forms, value)
        return sums

    def _encoded(self, advance: Callable[[int], None], name: str) -> torch.Tensor:
        tensor, out = self._tensors[name], torch.zeros(aligned(self._tensors[name].nbytes), dtype=torch.uint8)
        stored = self._checkpoint.located(tensor)
        if isinstance(stored, StoredTensor):
            self._encode(tensor, stored, out)
        elif stored.make is not None and stored.codec == tensor.codec:
            stored.make(out[: tensor.nbytes])
        else:
            raise NotImplementedError(tensor)
        advance(len(out))
        return out

    def _encode(self, tensor: TensorSpec, stored: StoredTensor, out: torch.Tensor) -> None:
        codec, columns, start = CODECS[tensor.codec], tensor.shape[-1], 0
        for values in _parts(stored, columns, codec.rows_together):
            end = start + codec.nbytes(tuple(values.shape), values.itemsize)
            values = values.float() if values.dtype == torch.float16 else values  # exact, and readable from C
            if not float(values.abs().amax()) < LARGEST:  # false for NaN too
                problem = "holds NaN, infinity or a value beyond 1e38, which cannot be packed; give another checkpoint"
                raise ValueError(f"tensor {tensor.name} in {stored.file} {problem}")
            encode(tensor.codec, values, out[start:end])
            start = end


def _in_files(tensors: Iterable[TensorSpec]) -> Iterator[list[TensorSpec]]:
    own: list[TensorSpec] = []
    for tensor in tensors:
        if own and sum(one.nbytes for one in own) + tensor.nbytes > FILE_BYTES:
            yield own
            own = []
        own.append(tensor)
    yield own


def _parts(stored: StoredTensor, columns: int, together: int) -> Iterator[torch.Tensor]:
    """The values of a matrix, some times `together` rows at a time but for the last ones. Those of a copy are cut from the very
    bytes that were checked."""
    dtype: torch.dtype = getattr(torch, stored.dtype)
    row_bytes = columns * dtype.itemsize
    rest = torch.empty(0, dtype=torch.uint8)  # the beginning of rows that are not complete yet
    for start, part in _read(stored, PART_BYTES if stored.check is None else _whole_stretches(PART_BYTES)):
        if stored.check is not None:
            stored.check(stored.offset + start, bytes_of(part))
        both = torch.cat((rest, part)) if len(rest) else part
        is_last = start + len(part) == stored.nbytes
        whole = len(both) // row_bytes * row_bytes if is_last else len(both) // (together * row_bytes) * together * row_bytes
        rest = both[whole:].clone()  # a view would keep the whole part alive
        if whole:
            yield both[:whole].view(dtype).view(-1, columns)


def _whole_stretches(nbytes: int) -> int:
    return max(1, nbytes // STRETCH_BYTES) * STRETCH_BYTES


def _read(stored: StoredTensor, step: int) -> Iterator[tuple[int, torch.Tensor]]:
    """A tensor's bytes in parts, with their places. Read pages leave the page cache, where they would displace others."""
    try:
        with stored.file.open("rb", buffering=0) as file:
            for start in range(0, stored.nbytes, step):
                part = torch.empty(min(step, stored.nbytes - start), dtype=torch.uint8)
                file.seek(stored.offset + start)
                if _read_fully(file, part) < len(part):
                    raise OSError(f"the file ends before its tensor {stored.name} does; is it truncated?")
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), stored.offset + start, len(part), os.POSIX_FADV_DONTNEED)
                yield start, part
    except OSError as error:
        if stored.check is not None:
            raise stored.check.unreadable(error) from error
        raise ValueError(f"tensor {stored.name} in {stored.file} cannot be read: {reason(error)}") from error


def _read_fully(file: FileIO, out: torch.Tensor) -> int:
    room, done = bytes_of(out, writes=True), 0
    while done < len(room) and (count := file.readinto(room[done:])):
        done += count
    return done
