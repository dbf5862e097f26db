"""DummySource: seeded random weights for a model without files, so that speed can be measured without a download.

A value depends only on the seed, the tensor's name and its place in the tensor. Tensors are cut from one random block that
repeats for ever, so making weights costs a copy. The block's length is prime; otherwise rows of a matrix would equal each other
and tokens would tie. Floats of 4 bits have codes of such a block, and one scale.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import blake2b
from io import BufferedWriter
from pathlib import Path

import torch

from h2o_flexgen.checkpoints.derived import alone_in
from h2o_flexgen.checkpoints.model_files import Progress, flush_to_disk, require_free_space
from h2o_flexgen.checkpoints.quantisation import Quantisation
from h2o_flexgen.checkpoints.safetensors_format import tensor_bytes
from h2o_flexgen.checkpoints.stale_files import WEIGHTS_PREFIX, WEIGHTS_SUFFIX, writer
from h2o_flexgen.checkpoints.stored_tensors import StoredAs, StoredTensor
from h2o_flexgen.core.buffer_layout import aligned
from h2o_flexgen.core.hints import reason
from h2o_flexgen.core.model_spec import DTYPE_BYTES, TensorSpec
from h2o_flexgen.formats.mxfp4 import MXFP4_SECTIONS, Fp4
from h2o_flexgen.formats.table import FORMATS, PLAIN
from h2o_flexgen.kernels.operations import encode
from h2o_flexgen.kernels.stored_values import sections_of

BLOCK_VALUES = 4_194_301  # at most 16 MiB of them are in memory
SCALE, FP4_EXPONENT = 0.02, 120  # random codes are about 3 on average: 2 ** -7 of that is as much
PART_VALUES = 1 << 20  # encoded at once
FLUSH_BYTES = 512 << 20
UNNAMED = "/proc/self/fd/{}"  # if the system has it, an open file can be opened again even without a name


def random_format(quantisation: Quantisation, matrix: TensorSpec) -> str | None:
    """The format that a matrix has in a checkpoint which is quantised so, if random weights can have it; None: it is plain."""
    format, module = MXFP4_SECTIONS, matrix.name.removesuffix(".weight")
    is_plain = any(fnmatchcase(module, f"{name}*") for name in quantisation.plain)
    return None if is_plain or matrix.shape[-1] % format.group else format.name


class DummySource:
    """A WeightSource that makes tensors for memory in place, and really writes those for disk, to `offload_dir`."""

    def __init__(self, seed: int, dtype: str, offload_dir: Path, progress: Progress | None = None) -> None:
        self.seed = seed
        self.dtype = dtype
        self._offload_dir = offload_dir
        self._progress = progress
        self._files: list[OwnFile] = []
        weakref.finalize(self, _remove, self._files)  # in case this source is never closed

    @cached_property
    def _block(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        block = torch.empty(BLOCK_VALUES, dtype=torch.float32).normal_(0.0, SCALE, generator=generator)
        return block.to(getattr(torch, self.dtype))

    @cached_property
    def _codes(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(256, (BLOCK_VALUES,), dtype=torch.uint8, generator=generator)

    def stored_as(self, name: str) -> StoredAs:
        return StoredAs(DTYPE_BYTES[self.dtype])

    def fill(self, tensor: TensorSpec, out: torch.Tensor) -> bool:
        if tensor.format == PLAIN:
            assert tuple(out.shape) == tensor.shape, (tensor, out.shape)
            self._fill_values(tensor, out.view(-1))
        elif isinstance(format := FORMATS[tensor.format], Fp4):
            self._fill_codes(format, tensor, out)
        else:
            self._fill_packed(tensor, out)
        return True

    def locate(self, tensors: Iterable[TensorSpec]) -> dict[str, StoredTensor]:
        """Writes the tensors to one file, each where O_DIRECT can read it."""
        wanted = list(tensors)
        if not wanted:
            return {}
        try:
            self._offload_dir.mkdir(parents=True, exist_ok=True)  # another process may have removed it
            require_free_space(self._offload_dir, sum(self._room(tensor) for tensor in wanted), "random weights on disk")
            with alone_in(self._offload_dir):
                prefix = f"{WEIGHTS_PREFIX}{writer()}-"
                descriptor, path = tempfile.mkstemp(prefix=prefix, suffix=WEIGHTS_SUFFIX, dir=self._offload_dir)
                self._files.append(OwnFile.of(Path(path), descriptor))
            with os.fdopen(descriptor, "wb") as file:
                return self._write(file, self._files[-1].path, wanted)
        except OSError as error:
            self.close()
            raise ValueError(
                f"cannot write random weights in {self._offload_dir}: {reason(error)}; give another folder"
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        _remove(self._files)

    def _write(self, file: BufferedWriter, path: Path, tensors: list[TensorSpec]) -> dict[str, StoredTensor]:
        total = sum(self._room(tensor) for tensor in tensors)
        located = {}
        offset = flushed = 0
        for tensor in tensors:
            nbytes = self._nbytes(tensor)
            located[tensor.name] = StoredTensor(tensor.name, path, offset, nbytes, self.dtype, tensor.shape)
            for piece in self._pieces(tensor) if tensor.format == PLAIN else [self._packed(tensor)]:
                file.write(tensor_bytes(piece))
            file.write(bytes(self._room(tensor) - nbytes))
            offset += self._room(tensor)
            if offset - flushed >= FLUSH_BYTES or offset == total:
                flush_to_disk(file)
                flushed = offset
            if self._progress:
                self._progress(offset, total)
        return located

    def _room(self, tensor: TensorSpec) -> int:
        return aligned(self._nbytes(tensor))

    def _nbytes(self, tensor: TensorSpec) -> int:
        return FORMATS[tensor.format].nbytes(tensor.shape, DTYPE_BYTES[self.dtype])

    def _packed(self, tensor: TensorSpec) -> torch.Tensor:
        out = torch.empty(self._nbytes(tensor), dtype=torch.uint8)
        self.fill(tensor, out)
        return out

    def _fill_packed(self, tensor: TensorSpec, out: torch.Tensor) -> None:
        """Encodes some rows at a time, since all plain values of a table would need more memory than the packed ones."""
        rows, columns = tensor.numel // tensor.shape[-1], tensor.shape[-1]
        together = FORMATS[tensor.format].rows_together
        units, step = out.view(-(-rows // together), -1), max(1, PART_VALUES // (together * columns)) * together
        values = torch.empty(min(step, rows), columns, dtype=getattr(torch, self.dtype))
        for row in range(0, rows, step):
            part = values[: rows - row]
            self._fill_values(tensor, part.view(-1), row * columns)
            encode(tensor.format, part, units[row // together : (row + step) // together])

    def _fill_codes(self, format: Fp4, tensor: TensorSpec, out: torch.Tensor) -> None:
        outputs, inputs = tensor.shape
        codes, scales = sections_of(format, out.zero_().view(1, -1), outputs, inputs)
        scales.fill_(FP4_EXPONENT)
        start = self._start(tensor.name)
        while len(codes):
            piece = self._codes[start : start + len(codes)]
            codes[: len(piece)], codes, start = piece, codes[len(piece) :], 0

    def _fill_values(self, tensor: TensorSpec, flat: torch.Tensor, first: int = 0) -> None:
        start = 0
        for piece in self._pieces(tensor, first, len(flat)):
            flat[start : start + len(piece)].copy_(piece)
            start += len(piece)

    def _pieces(self, tensor: TensorSpec, first: int = 0, count: int | None = None) -> Iterator[torch.Tensor]:
        """Cuts of the block that are a tensor's values from `first` on. Norm weights, the only flat ones, lie around one."""
        is_norm = len(tensor.shape) == 1 and tensor.name.endswith("weight")
        start = (self._start(tensor.name) + first) % BLOCK_VALUES
        left = tensor.numel if count is None else count
        while left:
            piece = self._block[start : start + left]
            yield piece + 1 if is_norm else piece
            left -= len(piece)
            start = 0

    def _start(self, name: str) -> int:
        digest = blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % BLOCK_VALUES


@dataclass(frozen=True)
class OwnFile:
    """A file that is gone when its process is. If the system can open it again without a name, it has none. Otherwise it is
    locked as long as its process lives: a file without a lock is not needed any more."""

    path: Path  # under which this process opens it
    lock: int  # another descriptor of the same opening
    process: int

    @classmethod
    def of(cls, path: Path, descriptor: int) -> OwnFile:
        """Takes over an open file. If this fails, the descriptor is closed and the file removed."""
        with ExitStack() as undo:
            undo.callback(path.unlink, missing_ok=True)
            undo.callback(os.close, descriptor)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            own = os.dup(descriptor)
            undo.callback(os.close, own)
            unnamed = Path(UNNAMED.format(own))
            if unnamed.exists():
                path.unlink()
                path = unnamed
            undo.pop_all()
            return cls(path, own, os.getpid())

    def remove(self) -> None:
        if self.process == os.getpid():  # not in a forked copy of it
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
        os.close(self.lock)


def _remove(files: list[OwnFile]) -> None:
    while files:
        files.pop().remove()
