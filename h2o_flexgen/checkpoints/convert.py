"""Converts the .bin files of a model folder to safetensors, once, in a cache folder that appears whole or not at all.

The engine reads tensors by offset with O_DIRECT, but .bin files are pickles in zip archives. Only torch's safe unpickler reads
them, with at most one tensor in memory (or one file, if it is an old one that is no zip archive and so cannot be mapped).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from h2o_flexgen.checkpoints.derived import CONVERTED, Copy, DerivedFolder
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
from h2o_flexgen.checkpoints.safetensors_format import CODES, TensorHeader, write_safetensors
from h2o_flexgen.checkpoints.stored_tensors import Sums

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
