"""WeightSource: what the engine asks of weights. Checkpoint: the weights of a folder or a GGUF file, straight from its files.

Only headers are read here. A source says where a tensor lies, or makes it; moving the bytes is the disk tier's work.

The disk tier reads tensors by offset with O_DIRECT, but .bin files are pickles in zip archives. They are converted to
safetensors, once, in a cache folder that appears whole or not at all. Only torch's safe unpickler reads them, with at most one
tensor in memory (or one file, if it is an old one that is no zip archive and so cannot be mapped).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from h2o_flexgen.checkpoints.adapters import NO_ADAPTERS, Adapters
from h2o_flexgen.checkpoints.derived import CONVERTED, Copy, DerivedFolder
from h2o_flexgen.checkpoints.gguf_format import Gguf, is_gguf, read_gguf
from h2o_flexgen.checkpoints.model_files import (
    SAFETENSORS,
    TORCH,
    Progress,
    Shards,
    advancing,
    find_shards,
    refuse_pointer,
    require_free_space,
)
from h2o_flexgen.checkpoints.named_tensors import each_expert, heads_apart, matrices_of_each, stored_in
from h2o_flexgen.checkpoints.quantisation import Quantisation, folder_quantisation
from h2o_flexgen.checkpoints.quantised import FoundTensors, find_matrices
from h2o_flexgen.checkpoints.safetensors_format import CODES, FLOATS, TensorHeader, read_header, write_safetensors
from h2o_flexgen.checkpoints.stored_architecture import USUAL_NAMES, GgufModel, TensorNames, bare_name
from h2o_flexgen.checkpoints.stored_tensors import DECODED, Located, StoredAs, StoredMatrix, StoredTensor, Sums, unchecked
from h2o_flexgen.core.model_spec import DTYPE_BYTES, ModelSpec, TensorSpec
from h2o_flexgen.formats.kernel_sizes import FLOAT_BYTES
from h2o_flexgen.formats.table import PLAIN


class WeightSource(Protocol):
    def stored_as(self, name: str) -> StoredAs:
        """The format in which a tensor's values lie on disk, needed before anything is placed."""

    def locate(self, tensors: Iterable[TensorSpec]) -> Mapping[str, Located]:
        """The places of these tensors on disk, by their names in the spec. It is called once."""

    def fill(self, tensor: TensorSpec, out: torch.Tensor) -> bool:
        """Makes the tensor in `out`: its values, or the bytes of its format. Returns False if the source's tensors lie
        in files, which `locate` finds."""

    def close(self) -> None: ...


class HandedSource:
    """The weights of a process, read by another process. Weights that stay on a device are handed over tensor by tensor; those
    that every step reads from disk are read from their files."""

    def __init__(self, source: WeightSource, take: Callable[[torch.Tensor], None]) -> None:
        """`take` receives the next tensor's bytes, in the order in which the reading process sends them."""
        self._source = source
        self._take = take

    def stored_as(self, name: str) -> StoredAs:
        return self._source.stored_as(name)

    def locate(self, tensors: Iterable[TensorSpec]) -> Mapping[str, Located]:
        """The places of tensors, without checks: the process that reads has checked them."""
        return {name: unchecked(stored) for name, stored in self._source.locate(tensors).items()}

    def fill(self, tensor: TensorSpec, out: torch.Tensor) -> bool:
        self._take(out.view(-1).view(torch.uint8))
        return True

    def close(self) -> None:
        self._source.close()


class Checkpoint:
    """The tensors of a folder or a file, and those matrices among them that have a format of their own. If `copy` is there, the
    files were made here, and weights are also checked when they are read."""

    def __init__(
        self,
        place: Path,
        tensors: Mapping[str, StoredTensor],
        matrices: Mapping[str, StoredMatrix] | None = None,
        copy: Copy | None = None,
    ) -> None:
        self.place = place
        self._copy = copy
        self._tensors, self._matrices = tensors, matrices or {}
        self._by_bare_name: dict[str, list[str]] = defaultdict(list)
        for name in (*self._tensors, *self._matrices):
            self._by_bare_name[bare_name(name)].append(name)

    @property
    def dtype(self) -> str:
        """The dtype in which most values are stored."""
        values: Counter[str] = Counter()
        for tensor in self._tensors.values():
            if tensor.dtype in DTYPE_BYTES:
                values[tensor.dtype] += tensor.nbytes // DTYPE_BYTES[tensor.dtype]
        if not values:
            raise ValueError(f"{self.place} stores no tensor as {', '.join(FLOATS)}; give a checkpoint that does")
        return values.most_common(1)[0][0]

    def decoding_to(self, dtype: str) -> Checkpoint:
        """The same where values that a copy is made of, since they are packed, are rounded to the type that they are computed
        in, if it is shorter. They would be when they are loaded."""
        if DTYPE_BYTES[dtype] == DTYPE_BYTES[DECODED]:
            return self
        tensors = {name: one if one.matrix is None else replace(one, dtype=dtype) for name, one in self._tensors.items()}
        return Checkpoint(self.place, tensors, self._matrices, self._copy)

    @property
    def files(self) -> tuple[Path, ...]:
        decoded = (tensor.matrix for tensor in self._tensors.values() if tensor.matrix is not None)
        sections = (section for matrix in (*self._matrices.values(), *decoded) for section in matrix.sections)
        return tuple(dict.fromkeys(tensor.file for tensor in (*self._tensors.values(), *sections)))

    @property
    def origins(self) -> tuple[Path, ...]:
        """The files that the user gave: those from which a copy was made, or else the files themselves."""
        return self.files if self._copy is None else self._copy.sources

    @property
    def matrices(self) -> Mapping[str, StoredMatrix]:
        """The matrices that have a format of their own, by their names in the checkpoint."""
        return self._matrices

    def stored_as(self, name: str) -> StoredAs:
        found = self._find(name)
        if isinstance(found, StoredMatrix) and found.merged is None:
            return StoredAs(1, found.format)
        itemsize = DTYPE_BYTES[found.dtype] if isinstance(found, StoredTensor) else FLOAT_BYTES
        return StoredAs(itemsize, is_merged=found.merged is not None)

    def locate(self, tensors: Iterable[TensorSpec]) -> Mapping[str, Located]:
        return {tensor.name: self.located(tensor) for tensor in tensors}

    def fill(self, tensor: TensorSpec, out: torch.Tensor) -> bool:
        return False

    def close(self) -> None:
        pass

    def require(self, names: Collection[str]) -> None:
        """Refuses a checkpoint that lacks any of these tensors: one that was cut off lacks many."""
        missing = [name for name in names if not self._places(name)]
        if missing:
            others = f", and so are {len(missing) - 1} of {len(names) - 1} others" if len(missing) > 1 else ""
            advice = "download the model again or check its config"
            raise ValueError(f"tensor {missing[0]} is missing in {self.place}{others}; {advice}")

    def to_write(self, spec: ModelSpec) -> Mapping[str, TensorSpec]:
        """The tensors that no file has in the format of the spec: they are to be written to a copy first."""
        return {name: tensor for name, tensor in spec.tensors.items() if not self._is_there(tensor)}

    def _is_there(self, tensor: TensorSpec) -> bool:
        stored = self._find(tensor.name)
        if stored.merged is not None:
            return False
        if isinstance(stored, StoredTensor):
            return tensor.format == PLAIN and stored.arranged is None
        return stored.is_in_place and stored.format == tensor.format

    def located(self, tensor: TensorSpec) -> StoredTensor | StoredMatrix:
        stored = self._find(tensor.name)
        if stored.shape != tensor.shape:
            raise ValueError(
                f"tensor {tensor.name} in {self.place} has the shape {stored.shape}, "
                f"but the model's config asks for {tensor.shape}; the config and the weights do not belong together"
            )
        return stored

    def _find(self, name: str) -> StoredTensor | StoredMatrix:
        self.require([name])
        found = self._places(name)
        if len(found) > 1:
            names = " and ".join(found)
            raise ValueError(f"tensor {name} is not in {self.place}, and {names} could both be meant; rename one of them")
        if found[0] in self._matrices:
            return self._matrices[found[0]]
        tensor = self._tensors[found[0]]
        if tensor.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"tensor {name} in {tensor.file} has the dtype {tensor.dtype}; only {', '.join(FLOATS)} can be run"
            )
        return tensor

    def _places(self, name: str) -> Sequence[str]:
        """The names that the checkpoint may have for a tensor."""
        known = name in self._tensors or name in self._matrices
        return [name] if known else self._by_bare_name.get(bare_name(name), [])


def folder_checkpoint(
    folder: Path,
    copy: Copy | None = None,
    quantisation: Quantisation | None = None,
    names: TensorNames = USUAL_NAMES,
    adapters: Adapters = NO_ADAPTERS,
) -> Checkpoint:
    """Reads and checks every header in a folder of safetensors."""
    shards = find_shards(folder, SAFETENSORS) if copy is None else Shards(tuple(copy.files), {})  # named by its manifest
    if not shards.files:
        raise ValueError(f"{folder} has no weights: neither {SAFETENSORS.single} nor {SAFETENSORS.index} is there")
    read = read_header if copy is None else copy.tensors
    held = {file: {tensor.name: tensor for tensor in read(file)} for file in shards.files}
    shards.check(held)
    tensors = {name: tensor for file, own in held.items() for name, tensor in own.items() if shards.owns(file, name)}
    found = adapters.on(find_matrices(quantisation, tensors), names, folder)
    apart = heads_apart(each_expert(found.tensors, names), matrices_of_each(found.matrices, names), names)
    return Checkpoint(folder, *apart, copy)


def open_checkpoint(
    place: Path,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    names: TensorNames = USUAL_NAMES,
    read: Callable[[Path], Gguf] = read_gguf,
    adapters: Adapters = NO_ADAPTERS,
) -> Checkpoint:
    """Opens safetensors and GGUF files directly, and .bin files through a converted copy in `cache_dir`, which is made once.
    `names` are those of the model's architecture; a GGUF file is not read without them. `read` reads its header. `adapters` are
    merged into matrices when these are copied."""
    if is_gguf(place):
        assert names.gguf is not None, names
        said = GgufModel.of(read(place), {names.model_type: names.gguf})
        found = adapters.on(FoundTensors(*stored_in(said)), names, place)
        return Checkpoint(place, *heads_apart(found.tensors, found.matrices, names))
    if not place.is_dir():
        raise ValueError(f"model folder {place} does not exist")
    quantisation = folder_quantisation(place)
    if any((place / name).exists() for name in (SAFETENSORS.single, SAFETENSORS.index)):
        return folder_checkpoint(place, quantisation=quantisation, names=names, adapters=adapters)
    if any((place / name).exists() for name in (TORCH.single, TORCH.index)):
        copy = convert(place, cache_dir, progress)
        return folder_checkpoint(copy.path, copy, quantisation, names, adapters)
    looked_for = ", ".join((SAFETENSORS.single, SAFETENSORS.index, TORCH.single, TORCH.index))
    advice = "give another folder, or dummy weights (--dummy-weights, in Python dummy_weights=True)"
    raise ValueError(f"{place} has no weights: none of {looked_for} is there; {advice}")


# -- .bin files --------------------------------------------------------------------------------------------------------

ZIP_MAGIC = b"PK\x03\x04"
REOPEN_BYTES = 256 << 20  # touched pages count as our memory as long as their file is mapped


@dataclass(frozen=True)
class Conversion:
    """One .bin file, the tensors in it, and the name of the file that it becomes."""

    source: Path
    headers: tuple[TensorHeader, ...]
    file_name: str

    @property
    def nbytes(self) -> int:
        return sum(header.nbytes for header in self.headers)


def convert(folder: Path, cache_dir: Path | None = None, progress: Progress | None = None) -> Copy:
    """The folder with the converted weights, made now if there is none for exactly these files."""
    shards = find_shards(folder, TORCH)
    if not shards.files:
        raise ValueError(f"{folder} has no weights: neither {TORCH.single} nor {TORCH.index} is there")
    purpose = f"convert {folder} to safetensors"
    derived = DerivedFolder.of(folder, shards.files, CONVERTED, purpose, cache=cache_dir)
    return derived.made(partial(_build, shards, progress))


def _build(shards: Shards, progress: Progress | None, target: Path) -> dict[str, dict[str, Sums]]:
    conversions = _survey(shards)
    require_free_space(target.parent, sum(conversion.nbytes for conversion in conversions), "converting the model")
    return _write_all(target, conversions, progress)


def _survey(shards: Shards) -> list[Conversion]:
    """Opens every file before anything is written, so that damage is found at once."""
    conversions, held = [], {}
    for number, source in enumerate(shards.files, start=1):
        single = len(shards.files) == 1
        file_name = SAFETENSORS.single if single else f"model-{number:05d}-of-{len(shards.files):05d}.safetensors"
        tensors, _ = load_shard(source)
        held[source] = set(tensors)
        headers = [_header(source, name, tensor) for name, tensor in tensors.items() if shards.owns(source, name)]
        conversions.append(Conversion(source, tuple(headers), file_name))
    shards.check(held)
    return conversions


def _header(source: Path, name: str, tensor: torch.Tensor) -> TensorHeader:
    if tensor.dtype not in CODES or tensor.layout is not torch.strided:
        kind = f"{tensor.dtype} {tensor.layout}".replace("torch.", "")
        raise ValueError(f"tensor {name} in {source} is of the kind {kind}, which safetensors cannot hold")
    return TensorHeader(name, tensor.dtype, tuple(tensor.shape))


def load_shard(path: Path) -> tuple[dict[str, torch.Tensor], bool]:
    """The tensors of a .bin file by name, and whether they are only mapped, so that values are read when touched."""
    with path.open("rb") as file:
        start = file.read(64)
    refuse_pointer(path, start)
    mapped = start.startswith(ZIP_MAGIC)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # of many kinds, with texts that advise unsafe unpickling
        raise ValueError(
            f"{path} is damaged or holds more than plain tensors ({type(error).__name__}); "
            "it is not unpickled unsafely: download it again, or save it as safetensors"
        ) from error
    items = loaded.items() if isinstance(loaded, dict) else ()
    tensors = {name: value for name, value in items if isinstance(name, str) and isinstance(value, torch.Tensor)}
    if not tensors:
        raise ValueError(f"{path} holds no named tensors; save the model's state_dict as safetensors")
    return tensors, mapped


def _write_all(folder: Path, conversions: list[Conversion], progress: Progress | None) -> dict[str, dict[str, Sums]]:
    """Writes all files and returns the checksums of every tensor in every file."""
    total = sum(conversion.nbytes for conversion in conversions)
    sums, advance = {}, advancing(progress, total)
    for conversion in conversions:
        reader = ShardReader(conversion.source, advance)
        sums[conversion.file_name] = write_safetensors(folder / conversion.file_name, conversion.headers, reader.value)
    if len(conversions) > 1:
        owner = {header.name: conversion.file_name for conversion in conversions for header in conversion.headers}
        index = {"metadata": {"total_size": total}, "weight_map": owner}
        (folder / SAFETENSORS.index).write_text(json.dumps(index, indent=2))
    return sums


class ShardReader:
    """Hands out each tensor of a .bin file once, and maps the file anew before too many of its pages are touched."""

    def __init__(self, path: Path, advance: Callable[[int], None]) -> None:
        self._path = path
        self._advance = advance
        self._tensors, self._mapped = load_shard(path)
        self._touched = 0

    def value(self, name: str) -> torch.Tensor:
        if self._mapped and self._touched >= REOPEN_BYTES:
            self._tensors = {}
            self._tensors, _ = load_shard(self._path)
            self._touched = 0
        tensor = self._tensors.pop(name)
        self._touched += tensor.nbytes
        self._advance(tensor.nbytes)
        return tensor
