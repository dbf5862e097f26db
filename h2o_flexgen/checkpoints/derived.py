"""Folders in the user's cache that are made from a model's files: once, whole or not at all, by one process at a time.

A manifest beside the files says what was written to them. Everything small is compared with it when a folder is opened, the
weights whenever they are read: disks fail, and copies are trusted for years. A damaged folder is removed and made again.

Beside these folders lies what was measured for a model here, in a file that its identity names (`kept_file`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from h2o_flexgen.checkpoints.gguf_format import is_gguf
from h2o_flexgen.checkpoints.model_places import cached_folder, local_place
from h2o_flexgen.checkpoints.safetensors_format import header_of, raw_header
from h2o_flexgen.checkpoints.stale_files import PARTIAL, nbytes_in, writer
from h2o_flexgen.checkpoints.stored_tensors import StoredTensor, Sums
from h2o_flexgen.core.environment import cache_folder
from h2o_flexgen.core.files import parse_json
from h2o_flexgen.core.hints import reason

COPIES = CONVERTED, PACKED = ("converted", "packed")  # the kinds of folders
TAIL_BYTES = 1 << 16
MANIFEST = "copy.json"
FORMATS = {CONVERTED: 2, PACKED: 3}  # of what lies in a folder, its manifest included; a copy of an older one is made again
WEIGHTS = ".safetensors"


def model_name(place: Path) -> str:
    """The model's name. In the hub's cache a folder is named by its commit, and the model's name stands two levels above.
    A file there is a link to one that is named by its contents, so links to files are not followed."""
    if place.is_file():
        return place.stem
    folder = place.resolve()
    return folder.parents[1].name if folder.parent.name == "snapshots" else folder.name


def fingerprint(files: Sequence[Path], asked: str = "") -> str:
    """Identifies files and what is made from them, without reading all of a file: the end of a zip archive holds the checksums
    of its contents, and the start of safetensors says what lies where."""
    digest = blake2b(asked.encode(), digest_size=8)
    for path in files:
        try:
            status = path.stat()
            digest.update(f"{path.name}/{status.st_size}/{status.st_mtime_ns}/".encode())
            with path.open("rb") as file:
                digest.update(file.read(TAIL_BYTES))
                file.seek(max(0, status.st_size - TAIL_BYTES))
                digest.update(file.read())
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {reason(error)}") from error
    return digest.hexdigest()


# -- a folder that was made ------------------------------------------------------------------------------------------------


LOST = (None, errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.ESTALE)  # None: a file that ends too early


def is_lost(error: OSError) -> bool:
    """True if the bytes are gone. Too few descriptors, too little memory or missing rights say nothing about them."""
    return error.errno in LOST


class Damaged(ValueError):
    """A copy in the cache differs from what was written."""

    def __init__(self, copy: Copy, what: str) -> None:
        self.copy = copy
        self.what = f"{copy.path}, a copy of weights that was made here, is damaged: {what}"
        super().__init__(f"{self.what}; remove the folder, and the copy is made again")


@dataclass(frozen=True)
class CopyRecord:
    """What was written to a file: its size, a digest of all that is not weights, and the weights' checksums."""

    nbytes: int
    head: str
    sums: Mapping[str, Sums]

    @classmethod
    def of(cls, file: Path, sums: Mapping[str, Sums]) -> CopyRecord:
        return cls(file.stat().st_size, _head(file), sums)

    @classmethod
    def from_json(cls, one: Mapping[str, object]) -> CopyRecord:
        nbytes, head, sums = one["nbytes"], one["head"], one["sums"]
        if not (isinstance(nbytes, int) and isinstance(head, str) and isinstance(sums, dict)):
            raise TypeError(one)
        return cls(nbytes, head, {str(name): Sums(str(text)) for name, text in sums.items()})

    def as_json(self) -> dict[str, object]:
        return {"nbytes": self.nbytes, "head": self.head, "sums": {name: one.text for name, one in self.sums.items()}}


def _head(file: Path) -> str:
    """A digest of the header, which says where each weight lies; other files of a copy are small and digested whole."""
    content = raw_header(file) if file.suffix == WEIGHTS else file.read_bytes()
    return blake2b(content, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Copy:
    """An existing folder, what was written to its files, and the files that it was made from."""

    path: Path
    sources: tuple[Path, ...]
    records: Mapping[str, CopyRecord] = field(repr=False)
    identity: tuple[int, int]  # differs between two folders with the same path

    @classmethod
    def opened(cls, path: Path, sources: tuple[Path, ...]) -> Copy:
        """Opens a copy and compares everything but the weights with what was written."""
        copy = cls(path, sources, {}, _identity(path))
        with copy._finding_damage(MANIFEST):
            files = parse_json((path / MANIFEST).read_bytes())["files"]
            copy = replace(copy, records={name: CopyRecord.from_json(one) for name, one in files.items()})
        for name, record in copy.records.items():
            copy._compare(path / name, record)
        return copy

    def _compare(self, file: Path, record: CopyRecord) -> None:
        with self._finding_damage(file.name):
            nbytes = file.stat().st_size
            if nbytes != record.nbytes:
                raise Damaged(self, f"{file.name} has {nbytes} bytes instead of {record.nbytes}")
            if _head(file) != record.head:
                raise Damaged(self, f"{file.name} was changed since it was written")

    @contextmanager
    def _finding_damage(self, name: str) -> Iterator[None]:
        """Turns errors that mean a changed file into Damaged; others say nothing about the copy."""
        try:
            yield
        except Damaged:
            raise
        except FileNotFoundError as error:
            raise Damaged(self, f"{name} is missing") from error
        except OSError as error:
            if not is_lost(error):
                raise _unreadable(self.path, error) from error
            raise Damaged(self, f"{name} cannot be read ({reason(error)})") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Damaged(self, f"{name} cannot be read ({type(error).__name__})") from error

    @property
    def files(self) -> list[Path]:
        """The files with weights."""
        return [self.path / name for name in self.records if name.endswith(WEIGHTS)]

    def tensors(self, file: Path) -> list[StoredTensor]:
        """The tensors of a file, each with the check of its bytes."""
        sums = self.records[file.name].sums
        with self._finding_damage(file.name):
            stored = header_of(file)
        if unknown := [tensor.name for tensor in stored if tensor.name not in sums]:
            raise Damaged(self, f"its {MANIFEST} does not know tensor {unknown[0]} in {file.name}")
        return [replace(tensor, check=_Check(self, tensor, sums[tensor.name])) for tensor in stored]

    def discard(self) -> bool:
        """Removes the folder, so that the next process that opens it makes it again. Returns False if another process has
        removed it or made it again already."""
        try:
            with alone_in(self.path.parent):
                if not self.is_still_there:
                    return False
                self._refuse_without_sources()
                aside = _place_beside(self.path)
                os.rename(self.path, aside)
        except OSError as error:
            if is_lost(error) and not self.is_still_there:
                return False
            raise ValueError(f"{self.path} is damaged and cannot be removed: {reason(error)}; remove it") from error
        shutil.rmtree(aside, ignore_errors=True)  # if the disk fails here too, a later run removes it by its name
        return True

    @property
    def is_still_there(self) -> bool:
        """False if another process has removed it, even if a new folder has taken its place."""
        try:
            return _identity(self.path) == self.identity
        except OSError as error:
            if not is_lost(error):
                raise
            return False

    def _refuse_without_sources(self) -> None:
        if gone := [source for source in self.sources if not source.is_file()]:
            raise ValueError(f"{self.path} is damaged, and {gone[0]}, which it was made from, is gone; get the model again")


@dataclass(frozen=True)
class _Check:
    """Compares the bytes of a tensor with its checksums."""

    copy: Copy
    tensor: StoredTensor
    sums: Sums

    def __call__(self, offset: int, data: memoryview) -> None:
        if not self.sums.are_of(data, offset - self.tensor.offset, self.tensor.nbytes):
            where = f"of tensor {self.tensor.name} in {self.tensor.file.name}"
            raise Damaged(self.copy, f"bytes {offset} to {offset + len(data) - 1}, {where}, are not those that were written")

    def unreadable(self, error: OSError) -> Exception:
        if not is_lost(error):
            return error
        return Damaged(self.copy, f"tensor {self.tensor.name} in {self.tensor.file.name} cannot be read ({reason(error)})")


def _place_beside(path: Path) -> Path:
    """The place where a folder is filled or taken apart, cleared of what a dead process with our number left there."""
    partial = path.with_name(f"{path.name}{PARTIAL}{writer()}")
    if partial.exists():
        shutil.rmtree(partial)
    return partial


def _unreadable(copy: Path, error: OSError) -> ValueError:
    advice = "see to that and run again, or set XDG_CACHE_HOME to another folder"
    return ValueError(f"{copy}, a copy of weights, cannot be read: {reason(error)}; {advice}")


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_ino, status.st_mtime_ns


# -- making one ------------------------------------------------------------------------------------------------------------

Build = Callable[[Path], Mapping[str, Mapping[str, Sums]]]
"""Fills a folder; returns the checksums of the weights in each file that has some."""


@dataclass(frozen=True)
class DerivedFolder:
    path: Path
    format: int
    purpose: str  # "convert X to safetensors": for the message if it fails
    sources: tuple[Path, ...]  # the files that it is made from

    @classmethod
    def of(
        cls, model: Path, sources: tuple[Path, ...], kind: str, purpose: str, asked: str = "", cache: Path | None = None
    ) -> DerivedFolder:
        """The folder of exactly these files of a model. `asked` is all else that it depends on."""
        path = (cache or cache_folder(kind)) / f"{model_name(model)}-{fingerprint(sources, asked)}"
        return cls(path, FORMATS[kind], purpose, sources)

    @property
    def older_bytes(self) -> int:
        """Bytes of a copy in an older format, which the new one will replace."""
        with suppress(OSError):  # another process removes it
            return 0 if self.is_there else nbytes_in(self.path)
        return 0

    @property
    def is_there(self) -> bool:
        """True if it was made in the current format. It may be damaged."""
        try:
            found = parse_json((self.path / MANIFEST).read_bytes())["format"]
        except FileNotFoundError:
            return False
        except (OSError, ValueError, TypeError, KeyError):
            return True
        return found == self.format if isinstance(found, int) else True

    def made(self, build: Build, renewing: Callable[[], None] | None = None) -> Copy:
        """The folder, which `build` fills if it does not exist yet. `renewing` is called if there is one in an older format."""
        while True:
            self._make_if_missing(build, renewing)
            try:
                return Copy.opened(self.path, self.sources)
            except FileNotFoundError:  # another process has removed it since
                continue
            except OSError as error:
                raise _unreadable(self.path, error) from error

    def _make_if_missing(self, build: Build, renewing: Callable[[], None] | None) -> None:
        cache = self.path.parent
        try:
            if not self.is_there:
                cache.mkdir(parents=True, exist_ok=True)
                with alone_in(cache):
                    if not self.is_there:  # another process may have made it while we waited
                        self._make(build, renewing)
        except OSError as error:
            raise ValueError(
                f"cannot {self.purpose} in {cache}: {reason(error)}; free some space, or set XDG_CACHE_HOME to another folder"
            ) from error

    def _make(self, build: Build, renewing: Callable[[], None] | None) -> None:
        if self.path.is_dir():
            self._remove_older(renewing)
        partial = _place_beside(self.path)
        try:
            partial.mkdir()
            _write_manifest(partial, build(partial), self.format)
            os.rename(partial, self.path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _remove_older(self, renewing: Callable[[], None] | None) -> None:
        """Removes a copy that is no longer read, before the new one is made: a disk may not hold both. Its name becomes
        that of a leftover, so that a later run removes what stays of it if this one is killed."""
        if renewing is not None:
            renewing()
        aside = _place_beside(self.path)
        os.rename(self.path, aside)
        shutil.rmtree(aside)


def _write_manifest(folder: Path, sums: Mapping[str, Mapping[str, Sums]], format: int) -> None:
    files = {file.name: CopyRecord.of(file, sums.get(file.name, {})).as_json() for file in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"format": format, "files": files}, indent=1), encoding="utf-8")


@contextmanager
def alone_in(cache: Path) -> Iterator[None]:
    """Lets one process work at a time, since two copies of a model would need twice the disk."""
    descriptor = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


CALIBRATE = "python -m h2o_flexgen.calibrate"  # the command that measures
HEAD_BUDGETS = "head_budgets"  # a kind, and its folder in the cache
CONFIG, KINDS_OF_WEIGHTS = "config.json", (WEIGHTS, ".bin")


def kept_file(model: str, kind: str) -> Path | None:
    """The place for a measurement of the model, which may be empty. None: no files here would identify the model."""
    place = local_place(model)
    if not place.exists():
        place = cached_folder(model) or place
    files = _files(place)
    return cache_folder(kind) / f"{model_name(place)}-{fingerprint(files)}.json" if files else None


def _files(place: Path) -> list[Path]:
    if place.is_dir():
        return sorted(file for file in place.iterdir() if file.name == CONFIG or file.suffix in KINDS_OF_WEIGHTS)
    return [place] if is_gguf(place) and place.is_file() else []
