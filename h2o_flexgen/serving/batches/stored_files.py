"""Files that clients have sent, and those that were made for them."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from io import BufferedWriter
from pathlib import Path
from threading import Lock
from types import TracebackType

from h2o_flexgen.core.files import sync_folder
from h2o_flexgen.jobs.openai_answers import Said
from h2o_flexgen.serving.batches.data_folder import DOCUMENT, LINES, documents, new_id, write_document
from h2o_flexgen.serving.problems import Refused, unknown_file

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
