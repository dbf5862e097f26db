"""WeightSource: what the engine asks of weights. Checkpoint: a model folder's weights, straight from its safetensors files.

Only headers are read here. A source says where a tensor lies, or makes it; moving the bytes is the disk tier's work.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch

from h2o_flexgen.core.model_spec import DTYPE_BYTES, TensorSpec
from h2o_flexgen.models.convert import convert
from h2o_flexgen.models.derived import Copy
from h2o_flexgen.models.files import SAFETENSORS, TORCH, Progress, Shards, find_shards
from h2o_flexgen.models.safetensors_format import FLOATS, StoredTensor, read_header

__all__ = ["Checkpoint", "StoredTensor", "WeightSource", "open_checkpoint"]

BASE_PREFIXES = ("model.", "transformer.", "gpt_neox.", "decoder.")  # missing in base models' files, added with a head


class WeightSource(Protocol):
    def stored_itemsize(self, name: str) -> int:
        """Bytes of a value on disk, needed before anything is placed."""

    def locate(self, tensors: Iterable[TensorSpec]) -> dict[str, StoredTensor]:
        """The places of these tensors on disk, by their names in the spec. It is called once."""

    def fill(self, tensor: TensorSpec, out: torch.Tensor) -> bool:
        """Makes the tensor in `out`: its values, or the codec's bytes if it is not plain. Returns False if the source's tensors
        lie in files, which `locate` finds."""

    def close(self) -> None: ...


class Checkpoint:
    """Opening it reads and checks every header in the folder. If the folder is a copy made here, weights are also checked when
    they are read."""

    def __init__(self, folder: Path, copy: Copy | None = None) -> None:
        self.folder = folder
        self._copy = copy
        shards = find_shards(folder, SAFETENSORS) if copy is None else Shards(tuple(copy.files), {})  # named by its manifest
        if not shards.files:
            raise ValueError(f"{folder} has no weights: neither {SAFETENSORS.single} nor {SAFETENSORS.index} is there")
        read = read_header if copy is None else copy.tensors
        held = {file: {tensor.name: tensor for tensor in read(file)} for file in shards.files}
        shards.check(held)
        self._tensors = {
            name: tensor for file, tensors in held.items() for name, tensor in tensors.items() if shards.owns(file, name)
        }
        self._by_bare_name: dict[str, list[StoredTensor]] = defaultdict(list)
        for tensor in self._tensors.values():
            self._by_bare_name[_bare_name(tensor.name)].append(tensor)

    @property
    def dtype(self) -> str:
        """The dtype in which most values are stored."""
        values: Counter[str] = Counter()
        for tensor in self._tensors.values():
            if tensor.dtype in DTYPE_BYTES:
                values[tensor.dtype] += tensor.nbytes // DTYPE_BYTES[tensor.dtype]
        if not values:
            raise ValueError(f"{self.folder} stores no tensor as {', '.join(FLOATS)}; give a checkpoint that does")
        return values.most_common(1)[0][0]

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(tensor.file for tensor in self._tensors.values()))

    @property
    def origins(self) -> tuple[Path, ...]:
        """The files that the user gave: those from which a copy was made, or else the files themselves."""
        return self.files if self._copy is None else self._copy.sources

    def stored_itemsize(self, name: str) -> int:
        return DTYPE_BYTES[self._find(name).dtype]

    def locate(self, tensors: Iterable[TensorSpec]) -> dict[str, StoredTensor]:
        return {tensor.name: self._checked(tensor) for tensor in tensors}

    def fill(self, tensor: TensorSpec, out: torch.Tensor) -> bool:
        return False

    def close(self) -> None:
        pass

    def _checked(self, tensor: TensorSpec) -> StoredTensor:
        stored = self._find(tensor.name)
        if stored.shape != tensor.shape:
            raise ValueError(
                f"tensor {tensor.name} in {stored.file} has the shape {stored.shape}, "
                f"but the model's config asks for {tensor.shape}; the config and the weights do not belong together"
            )
        return stored

    def _find(self, name: str) -> StoredTensor:
        exact = self._tensors.get(name)
        found = [exact] if exact else self._by_bare_name.get(_bare_name(name), [])
        if not found:
            raise ValueError(f"tensor {name} is missing in {self.folder}; download the model again or check its config")
        if len(found) > 1:
            names = " and ".join(tensor.name for tensor in found)
            raise ValueError(f"tensor {name} is not in {self.folder}, and {names} could both be meant; rename one of them")
        if found[0].dtype not in DTYPE_BYTES:
            raise ValueError(
                f"tensor {name} in {found[0].file} has the dtype {found[0].dtype}; only {', '.join(FLOATS)} can be run"
            )
        return found[0]


def _bare_name(name: str) -> str:
    for prefix in BASE_PREFIXES:
        if name.startswith(prefix):
            return _bare_name(name.removeprefix(prefix))
    return name


def open_checkpoint(folder: Path, cache_dir: Path | None = None, progress: Progress | None = None) -> Checkpoint:
    """Opens safetensors directly, and .bin files through a converted copy in `cache_dir`, which is made once."""
    if not folder.is_dir():
        raise ValueError(f"model folder {folder} does not exist")
    if any((folder / name).exists() for name in (SAFETENSORS.single, SAFETENSORS.index)):
        return Checkpoint(folder)
    if any((folder / name).exists() for name in (TORCH.single, TORCH.index)):
        copy = convert(folder, cache_dir, progress)
        return Checkpoint(copy.path, copy)
    looked_for = ", ".join((SAFETENSORS.single, SAFETENSORS.index, TORCH.single, TORCH.index))
    advice = "give another folder, or dummy weights (--dummy-weights)"
    raise ValueError(f"{folder} has no weights: none of {looked_for} is there; {advice}")
