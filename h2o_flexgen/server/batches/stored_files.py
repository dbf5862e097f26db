"""The data folder of a server: what clients have left there, and what became of it. One server uses it at a time.

    files/ID.jsonl      the bytes of a file
    files/ID.json       its name, its size and what it is for; without this the file is not there
    batches/ID.json     a batch: what was asked, and how far it is
    batches/ID.jsonl    the records of a batch that has begun and not ended

Names that begin with a dot are on their way in.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import BufferedWriter
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, TypeVar

from h2o_flexgen.core.files import lock, parse_json, read_text, sync_folder, write_durably
from h2o_flexgen.core.hints import reason
from h2o_flexgen.jobs.openai_answers import Said
from h2o_flexgen.server.problems import Refused, unknown_file

LOCK = "lock"
OURS_ALONE = 0o700  # what clients have sent is for this user alone
FORM = 1  # counted up when older documents can no longer be read
DOCUMENT, LINES = ".json", ".jsonl"
T = TypeVar("T")


@dataclass(frozen=True)
class DataFolder:
    path: Path

    @property
    def files(self) -> Path:
        return self.path / "files"

    @property
    def batches(self) -> Path:
        return self.path / "batches"


@contextmanager
def data_folder(path: Path, flag: str) -> Iterator[DataFolder]:
    """A context in which the folder is this server's. `flag`: what a person names it by."""
    folder = DataFolder(path)
    try:
        for each in (path, folder.files, folder.batches):
            each.mkdir(OURS_ALONE, parents=True, exist_ok=True)
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be used ({reason(error)}); give another folder") from error
    try:
        if not lock(descriptor):
            raise ValueError(f"{flag} {path} is another server's, which runs; wait for its end, or give another folder")
        yield folder
    finally:
        os.close(descriptor)


def new_id(kind: str) -> str:
    """A name that no other has; later ones come behind earlier ones."""
    return f"{kind}{time.time_ns():016x}{secrets.token_hex(6)}"


def write_document(path: Path, said: Mapping[str, object]) -> None:
    write_durably(path, json.dumps({"form": FORM, **said}, indent=1, default=str) + "\n")


def documents(folder: Path, of: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    """Everything that is written down in a folder. What was on its way there when a server was killed is removed."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            path.unlink()
        elif path.suffix == DOCUMENT:
            yield _read(path, of)


def _read(path: Path, of: Callable[[dict[str, Any]], T]) -> T:
    text = read_text(path, str(path))
    try:
        said = parse_json(text)
        if said.pop("form") != FORM:
            raise ValueError("another form")
        return of(said)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not understood by this version; move it away") from error


OF_INPUT, OF_OUTPUT = "batch", "batch_output"  # what files are for
KIND = "file-"


@dataclass(frozen=True)
class StoredFile:
    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int  # seconds since 1970

    @property
    def said(self) -> Said:
        return {**asdict(self), "object": "file", "status": "processed", "status_details": None, "expires_at": None}


class NewFile:
    """A file on its way in. Used in a `with`, behind which nothing is left of it unless it was kept."""

    def __init__(self, file_id: str, path: Path) -> None:
        self.id, self.path = file_id, path
        self._opened: BufferedWriter = path.open("wb")

    def write(self, data: bytes) -> None:
        self._opened.write(data)

    def settle(self) -> int:
        """Returns when all of it is on the disk, with its size."""
        self._opened.flush()
        os.fsync(self._opened.fileno())
        return self._opened.tell()

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._opened.close()
        finally:
            self.path.unlink(missing_ok=True)


class StoredFiles:
    """All files of a folder, by their ids. A change is on the disk before it can be seen. Readers never wait for the disk, as
    the lock guards the known state alone."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, Lock()
        self._known = {one.id: one for one in documents(folder, lambda said: StoredFile(**said))}
        for path in folder.glob(f"*{LINES}"):
            if path.stem not in self._known:
                path.unlink()  # a server was killed before it was there, or when it was removed

    def all(self) -> list[StoredFile]:
        """The oldest first."""
        with self._lock:
            return sorted(self._known.values(), key=lambda one: (one.created_at, one.id))

    def one(self, file_id: str) -> StoredFile:
        with self._lock:
            if file_id not in self._known:
                raise Refused(unknown_file(file_id))
            return self._known[file_id]

    def lines(self, file_id: str) -> Path:
        """The file with its bytes."""
        return self._folder / f"{file_id}{LINES}"

    def new(self, file_id: str | None = None) -> NewFile:
        """A file that is to be written. `file_id`: of one that may have been begun before."""
        given = new_id(KIND) if file_id is None else file_id
        return NewFile(given, self._folder / f".{given}{LINES}")

    def keep(self, new: NewFile, filename: str, purpose: str) -> StoredFile:
        """Makes it one that is there."""
        file = StoredFile(new.id, filename, purpose, new.settle(), int(time.time()))
        os.replace(new.path, self.lines(file.id))
        try:
            write_document(self._document(file.id), asdict(file))
        except BaseException:
            if not self._is_known(file.id):
                self._unlink(file.id)
            raise
        with self._lock:
            self._known[file.id] = file
        return file

    def remove(self, file_id: str) -> None:
        """It is known until nothing of it is left, so that a removal that fails can be asked for again."""
        self._unlink(file_id)
        with self._lock:
            del self._known[file_id]

    def _is_known(self, file_id: str) -> bool:
        with self._lock:
            return file_id in self._known

    def _unlink(self, file_id: str) -> None:
        self._document(file_id).unlink(missing_ok=True)
        sync_folder(self._folder)
        self.lines(file_id).unlink(missing_ok=True)

    def _document(self, file_id: str) -> Path:
        return self._folder / f"{file_id}{DOCUMENT}"
