"""A file that only grows: whole lines are appended, and what was synced is there after a loss of power."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from h2o_flexgen.core.files import lock, sync_folder
from h2o_flexgen.core.hints import reason

MODE = 0o644
RESUMED = "go on with --resume"


class AppendFile:
    """One process writes it at a time, however it ends: the lock goes with the process. Used in a `with`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
        except OSError as error:
            raise ValueError(f"{path} cannot be written ({reason(error)}); give another file") from error
        try:
            if not lock(self._descriptor):
                raise ValueError(f"{self.path} is being written by another process; wait for its end")
            sync_folder(path.parent)
            self.size = self._durable = os.fstat(self._descriptor).st_size
        except BaseException:
            os.close(self._descriptor)
            raise
        self._is_synced = False  # whoever wrote it before may have been killed before all was on the disk

    def append(self, line: bytes) -> int:
        """Appends a line and returns where it begins. If it does not fit, none of it stays."""
        start, rest = self.size, memoryview(line)
        self._is_synced = False
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            self.cut(start)
            raise self._full(error) from error
        self.size = start + len(line)
        return start

    def sync(self) -> None:
        """Returns when all that was appended is on the disk. What the disk refuses is cut off: it would be read as if it were
        there, and a later try would find nothing to write."""
        if self._is_synced:
            return
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self.cut(self._durable)
            raise self._full(error) from error
        self._is_synced, self._durable = True, self.size

    def read(self, start: int, nbytes: int) -> bytes:
        return os.pread(self._descriptor, nbytes, start)

    def cut(self, nbytes: int) -> None:
        """Keeps only the first bytes."""
        try:
            os.ftruncate(self._descriptor, nbytes)
        except OSError:
            return  # half a line at the end is dropped by whoever goes on
        self.size, self._durable = nbytes, min(nbytes, self._durable)
        self._is_synced = False

    def take_name(self, path: Path) -> None:
        """Takes the place of another file, once all of it is on the disk."""
        self.sync()
        os.replace(self.path, path)
        sync_folder(path.parent)
        self.path = path

    def _full(self, error: OSError) -> ValueError:
        kept = "whole records stay there"
        return ValueError(f"{self.path} cannot be written ({reason(error)}); {kept}: mend that, and {RESUMED}")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> AppendFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
