"""Folders in the user's cache that are made from the files of a model: once, whole or not at all, by one process at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from h2o_flexgen.models.files import reason
from h2o_flexgen.models.leftovers import PARTIAL, remove_leftovers, writer

COPIES = ("converted", "packed")  # the kinds of folders
TAIL_BYTES = 1 << 16


def cache_folder(kind: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "h2o_flexgen" / kind


def model_name(folder: Path) -> str:
    """In the cache of the hub a folder is named by its commit; the model's name stands two levels above."""
    folder = folder.resolve()
    return folder.parents[1].name if folder.parent.name == "snapshots" else folder.name


def fingerprint(files: Sequence[Path], asked: str = "") -> str:
    """Of files, and of what is made from them. The end of a zip archive holds the checksums of all that is in it: as good as
    reading the whole file; the start of safetensors says what lies where."""
    digest = blake2b(asked.encode(), digest_size=8)
    for path in files:
        status = path.stat()
        digest.update(f"{path.name}/{status.st_size}/{status.st_mtime_ns}/".encode())
        with path.open("rb") as file:
            digest.update(file.read(TAIL_BYTES))
            file.seek(max(0, status.st_size - TAIL_BYTES))
            digest.update(file.read())
    return digest.hexdigest()


@dataclass(frozen=True)
class DerivedFolder:
    path: Path
    purpose: str  # "convert X to safetensors": for what is said when it fails

    @property
    def is_there(self) -> bool:
        return self.path.is_dir()

    def made(self, build: Callable[[Path], None]) -> Path:
        """The folder; `build` fills it where it is not there yet."""
        cache = self.path.parent
        try:
            if not self.is_there:
                cache.mkdir(parents=True, exist_ok=True)
                remove_leftovers(cache, [cache])
                with alone_in(cache):
                    if not self.is_there:  # another process may have made it while we waited
                        self._make(build)
        except OSError as error:
            raise ValueError(
                f"cannot {self.purpose} in {cache}: {reason(error)}; free some space, or set XDG_CACHE_HOME to another folder"
            ) from error
        return self.path

    def _make(self, build: Callable[[Path], None]) -> None:
        partial = self.path.with_name(f"{self.path.name}{PARTIAL}{writer()}")
        try:
            partial.mkdir()
            build(partial)
            os.rename(partial, self.path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextmanager
def alone_in(cache: Path) -> Iterator[None]:
    """One at a time: two of the same model would need twice the disk."""
    descriptor = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
