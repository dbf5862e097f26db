"""PackedCheckpoint: a checkpoint whose matrices and tables are kept packed. They are encoded once, some rows at a time, into
safetensors in a folder of the cache; from then on they are read from there, in every step where they are placed on disk.

What each file should be (size, time, checksum) stands beside it: one that was touched since is summed up again before its use.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from hashlib import blake2b
from io import FileIO
from pathlib import Path

import torch

from h2o_flexgen.models.checkpoint import Checkpoint
from h2o_flexgen.models.derived import DerivedFolder, cache_folder, fingerprint, model_name
from h2o_flexgen.models.files import Progress, align_up, require_free_space
from h2o_flexgen.models.safetensors_format import StoredTensor, TensorForm, read_header, write_safetensors
from h2o_flexgen.planning.model_spec import ModelSpec, TensorSpec
from h2o_flexgen.quant.codec import CODECS, PLAIN

FILE_BYTES = 2 << 30  # of a packed file, about
PART_BYTES = 16 << 20  # of a checkpoint's values, encoded at once
LARGEST = 1e38  # the distance of two such values is still a float32
FORMAT = 1  # counted up when the bytes that a codec makes change
MANIFEST = "packed.json"


class PackedCheckpoint:
    """A WeightSource. Nothing is encoded before the first packed tensor is asked for."""

    def __init__(
        self, checkpoint: Checkpoint, spec: ModelSpec, cache_dir: Path | None = None, progress: Progress | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._progress = progress
        self._tensors = {tensor.name: tensor for tensor in spec.tensors.values() if tensor.codec != PLAIN}
        asked = json.dumps([FORMAT, *((tensor.name, tensor.shape, tensor.codec) for tensor in self._tensors.values())])
        name = f"{model_name(checkpoint.folder)}-{fingerprint(checkpoint.files, asked)}"
        cache = cache_dir or cache_folder("packed")
        self._folder = DerivedFolder(cache / name, f"pack the weights of {checkpoint.folder}")

    @property
    def folder(self) -> Path:
        return self._folder.path

    @property
    def bytes_to_write(self) -> int:
        """To the cache, once."""
        return 0 if self._folder.is_there else self._nbytes

    @property
    def _nbytes(self) -> int:
        return sum(align_up(tensor.nbytes) for tensor in self._tensors.values())

    # -- a source of weights -----------------------------------------------------------------------------------------------

    def stored_itemsize(self, name: str) -> int:
        return self._checkpoint.stored_itemsize(name)

    def locate(self, tensors: Iterable[TensorSpec]) -> dict[str, StoredTensor]:
        wanted = list(tensors)
        plain = self._checkpoint.locate(tensor for tensor in wanted if tensor.codec == PLAIN)
        return plain | {tensor.name: self._packed[tensor.name] for tensor in wanted if tensor.codec != PLAIN}

    def fill(self, tensor: TensorSpec, out: torch.Tensor) -> bool:
        return False

    def close(self) -> None:
        self._checkpoint.close()

    # -- the packed files --------------------------------------------------------------------------------------------------

    @cached_property
    def _packed(self) -> Mapping[str, StoredTensor]:
        folder = self._folder.made(self._build)
        return {tensor.name: tensor for file in _checked_files(folder) for tensor in read_header(file)}

    def _build(self, folder: Path) -> None:
        require_free_space(folder.parent, self._nbytes, "packing the weights")
        located, advance = self._checkpoint.locate(self._tensors.values()), self._advancing()
        for number, tensors in enumerate(_in_files(self._tensors.values())):
            # as whole pages: each then starts where direct reads can
            forms = [TensorForm(tensor.name, torch.uint8, (align_up(tensor.nbytes),)) for tensor in tensors]
            value = partial(self._encoded, located, advance)
            write_safetensors(folder / f"packed-{number:05d}.safetensors", forms, value)
        manifest = {file.name: _description(file) for file in sorted(folder.glob("*.safetensors"))}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")

    def _advancing(self) -> Callable[[int], None]:
        done = 0

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if self._progress:
                self._progress(done, self._nbytes)

        return advance

    def _encoded(self, located: Mapping[str, StoredTensor], advance: Callable[[int], None], name: str) -> torch.Tensor:
        tensor, stored = self._tensors[name], located[name]
        codec, columns = CODECS[tensor.codec], tensor.shape[-1]
        out = torch.zeros(align_up(tensor.nbytes), dtype=torch.uint8)
        start = 0
        for values in _parts(stored, columns):
            end = start + codec.nbytes(tuple(values.shape), values.itemsize)
            values = values.float() if values.dtype == torch.float16 else values  # which is exact, and what C can read
            if not float(values.abs().amax()) < LARGEST:  # of NaN nothing is true
                problem = "holds NaN, infinity or a value beyond 1e38, which cannot be packed; give another checkpoint"
                raise ValueError(f"tensor {name} in {stored.file} {problem}")
            codec.encode(values, out[start:end])
            start = end
        advance(len(out))
        return out


def _in_files(tensors: Iterable[TensorSpec]) -> Iterator[list[TensorSpec]]:
    own: list[TensorSpec] = []
    for tensor in tensors:
        if own and sum(one.nbytes for one in own) + tensor.nbytes > FILE_BYTES:
            yield own
            own = []
        own.append(tensor)
    yield own


def _parts(stored: StoredTensor, columns: int) -> Iterator[torch.Tensor]:
    """The values of a matrix, some rows at a time. Pages that were read are not kept: they would fill the memory of others."""
    dtype: torch.dtype = getattr(torch, stored.dtype)
    row_bytes = columns * dtype.itemsize
    step = max(1, PART_BYTES // row_bytes) * row_bytes
    with stored.file.open("rb", buffering=0) as file:
        for start in range(0, stored.nbytes, step):
            part = torch.empty(min(step, stored.nbytes - start), dtype=torch.uint8)
            file.seek(stored.offset + start)
            if _read_fully(file, part) < len(part):
                raise ValueError(f"{stored.file} ends before its tensor {stored.name} does; download it again")
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), stored.offset + start, len(part), os.POSIX_FADV_DONTNEED)
            yield part.view(dtype).view(-1, columns)


def _read_fully(file: FileIO, out: torch.Tensor) -> int:
    room, done = out.numpy().data, 0
    while done < len(room) and (count := file.readinto(room[done:])):
        done += count
    return done


# -- what the files should be ----------------------------------------------------------------------------------------------


def _checked_files(folder: Path) -> list[Path]:
    """All that the manifest names, as they were written."""

    def damaged(what: str) -> ValueError:
        return ValueError(f"{folder} is damaged: {what}; remove the folder, and the weights are packed again")

    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        files = {folder / name: (one["nbytes"], one["mtime_ns"], one["blake2b"]) for name, one in manifest.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise damaged(f"{MANIFEST} cannot be read ({type(error).__name__})") from error
    for file, (nbytes, mtime_ns, digest) in files.items():
        if not file.is_file():
            raise damaged(f"{file.name} is missing")
        status = file.stat()
        if status.st_size != nbytes:
            raise damaged(f"{file.name} has {status.st_size} bytes instead of {nbytes}")
        if status.st_mtime_ns != mtime_ns and _digest(file) != digest:
            raise damaged(f"{file.name} was changed since it was packed")
    return list(files)


def _description(file: Path) -> dict[str, object]:
    status = file.stat()
    return {"nbytes": status.st_size, "mtime_ns": status.st_mtime_ns, "blake2b": _digest(file)}


def _digest(path: Path) -> str:
    digest, part = blake2b(digest_size=16), bytearray(PART_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(part):
            digest.update(memoryview(part)[:count])
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest.hexdigest()
