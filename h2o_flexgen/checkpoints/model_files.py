"""The files of a model folder: its JSON objects, its files of weights, whether a disk has space for more, and how written ones
leave memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any

from h2o_flexgen.core.files import NotADocument, parse_json, read_document
from h2o_flexgen.core.hints import reason, shown
from h2o_flexgen.core.units import format_bytes

Progress = Callable[[int, int], None]  # bytes done, bytes in all

AGAIN = "download the model again"
LFS_POINTER = b"version https://git-lfs"


def read_object(path: Path, advice: str) -> Mapping[str, Any]:
    """The JSON object that a file holds; `advice` is what to do about one that cannot be read."""
    try:
        found = parse_json(read_document(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({reason(error)}); {advice}") from error
    except NotADocument as error:
        raise ValueError(f"{path} is no JSON ({error}); {advice}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object; {advice}")
    return found


@dataclass(frozen=True)
class FileNames:
    """The names of weight files of one kind: of a single one, or of the index of several."""

    single: str
    index: str


SAFETENSORS = FileNames("model.safetensors", "model.safetensors.index.json")
TORCH = FileNames("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class Shards:
    files: tuple[Path, ...]
    owner: Mapping[str, str]  # the file of each tensor according to the index; empty without an index
    index: Path | None = None

    def owns(self, file: Path, name: str) -> bool:
        return self.owner.get(name, file.name) == file.name

    def check(self, contents: Mapping[Path, Collection[str]]) -> None:
        """Refuses files that contradict the index. If two files have a tensor of the same name, the index decides; a tensor
        that it names and no file has is an error only when it is read."""
        if self.index is None:
            return
        holders = {name: file for file, names in contents.items() for name in names}
        has = {(file.name, name) for file, names in contents.items() for name in names}
        for name, file in holders.items():
            named = self.owner.get(name)
            if named is None:
                raise ValueError(f"{file} has the tensor {shown(name)}, which {self.index} does not name; {AGAIN}")
            if (named, name) not in has:
                raise ValueError(f"{self.index} names tensor {shown(name)} in {named}, but it is in {file.name}; {AGAIN}")


def find_shards(folder: Path, names: FileNames) -> Shards:
    """The files of one kind in a folder, possibly none."""
    if (folder / names.single).is_file():
        return Shards((folder / names.single,), {})
    if not (folder / names.index).is_file():
        return Shards((), {})
    owner = read_index(folder / names.index)
    files = tuple(folder / name for name in sorted(set(owner.values())))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(
            f"{folder / missing[0]} is missing ({len(missing)} of the {len(files)} files that {names.index} names); {AGAIN}"
        )
    return Shards(files, owner, folder / names.index)


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor."""
    owner = read_object(path, "download it again").get("weight_map")
    if not isinstance(owner, dict):
        raise ValueError(f"{path} is no index of weight files (it has no weight_map); download it again")
    for name in owner.values():
        if not isinstance(name, str):
            raise ValueError(f"{path} names {shown(name)} where a file should stand; download it again")
        if name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"{path} names the file {shown(name)}, which is not in the same folder; download it again")
    if not owner:
        raise ValueError(f"{path} names no tensor at all; download it again")
    return owner


def refuse_pointer(path: Path, start: bytes) -> None:
    """Refuses the short texts that a clone without git-lfs has in place of weights."""
    if start.startswith(LFS_POINTER):
        raise ValueError(f"{path} is a git-lfs pointer and not the weights themselves; run 'git lfs pull' in its folder")


def require_free_space(folder: Path, need_bytes: int, purpose: str) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if need_bytes > free_bytes:
        raise ValueError(
            f"{purpose} needs {format_bytes(need_bytes)}, but {folder} has {format_bytes(free_bytes)} free; "
            "free some space or give another folder"
        )


def flush_to_disk(file: BufferedWriter) -> None:
    """Writes a file out and drops it from the page cache: it should neither fill memory nor make later disk reads look fast."""
    file.flush()
    os.fsync(file.fileno())
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def advancing(progress: Progress | None, total_bytes: int) -> Callable[[int], None]:
    """A function that is told of bytes as they are done, and tells `progress` of all so far."""
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress(done, total_bytes)

    return advance
