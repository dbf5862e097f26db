"""What an earlier run of a job has left in its output: which requests are finished, and where whole records end. The output
itself says so; nothing else is asked. It is a file that only grows: whole lines are appended, and what was synced is there
after a loss of power."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from h2o_flexgen.core.files import NotADocument, lock, parse_json, sync_folder
from h2o_flexgen.core.hints import reason, shown
from h2o_flexgen.jobs.index import Index
from h2o_flexgen.jobs.openai_answers import BEGINNING, is_refusal

MODE = 0o644
FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
KEPT = ".kept"  # ends the new name of a file if another one took its own name
CHUNK_BYTES = 1 << 20
RESUMED = "go on with --resume"


class AppendFile:
    """One process writes it at a time, however it ends: the lock goes with the process. Used in a `with`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, FLAGS, MODE)
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
        self._is_synced = False  # an earlier writer may have been killed before all was on the disk

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

    def sync(self) -> bool:
        """Returns when all that was appended is on the disk, under the file's name; true if it had to be written there again.
        What the disk refuses is cut off: it would be read as if it were there, and a later try would find nothing to write."""
        is_lost = self.size > 0 and not self.has_its_name
        if is_lost:
            self._write_again()
        self._sync_file()
        return is_lost

    @property
    def has_its_name(self) -> bool:
        """False if the file was removed or replaced: it then goes with the descriptor. Other errors say nothing about that."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def _write_again(self) -> None:
        """Writes the file anew under its name. Where that is another file's now, it goes beside it, and the work ends."""
        is_replaced = self.path.exists()
        place = self.path.with_name(self.path.name + KEPT) if is_replaced else self.path
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            copy = os.open(place, FLAGS | os.O_EXCL, MODE)
            try:
                lock(copy)
                for start in range(0, self.size, CHUNK_BYTES):
                    rest = memoryview(self.read(start, min(CHUNK_BYTES, self.size - start)))
                    while rest:
                        rest = rest[os.write(copy, rest) :]
                os.fsync(copy)
                os.dup2(copy, self._descriptor, inheritable=False)
            finally:
                os.close(copy)
            sync_folder(place.parent)
        except OSError as error:
            raise ValueError(
                f"{self.path} was removed or replaced while it was written, and its records cannot be written to {place} "
                f"({reason(error)}); run the job again"
            ) from error
        if is_replaced:
            raise ValueError(
                f"{self.path} was replaced by another file while it was written; the records are in {place}: "
                f"give that the name, and {RESUMED}"
            )

    def _sync_file(self) -> None:
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
            return  # half a line at the end is discarded when the job goes on
        self.size, self._durable = nbytes, min(nbytes, self._durable)
        self._is_synced = False

    def take_name(self, path: Path) -> None:
        """Takes the place of another file, once all of it is on the disk."""
        self.sync()
        os.replace(self.path, path)
        sync_folder(path.parent)
        self.path = path

    def remove_if_empty(self) -> None:
        if not self.size and self.has_its_name:
            self.path.unlink(missing_ok=True)

    def _full(self, error: OSError) -> ValueError:
        kept = "whole records stay there"
        return ValueError(f"{self.path} cannot be written ({reason(error)}); {kept}: fix this, and {RESUMED}")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> AppendFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


OPEN, DONE, FAILED = range(3)  # of a request


@dataclass
class Finished:
    """The state of every request of an index, by place."""

    states: bytearray
    dropped: int = 0  # lines that were no whole records, which a crash had left

    @classmethod
    def nothing(cls, index: Index) -> Finished:
        return cls(bytearray(len(index)))

    @property
    def num_done(self) -> int:
        return len(self.states) - self.states.count(OPEN)

    @property
    def num_failed(self) -> int:
        return self.states.count(FAILED)

    def is_open(self, place: int) -> bool:
        return self.states[place] == OPEN

    def note(self, place: int, failed: bool) -> None:
        self.states[place] = FAILED if failed else DONE


class OutputLine(NamedTuple):
    """A line of an output file."""

    start: int
    end: int
    place: int | None  # of its request; None for a line that a crash has left
    failed: bool = False


@dataclass(frozen=True)
class OutputReader:
    """Reads outputs of one job."""

    index: Index
    retry_errors: bool = False
    on_line: Callable[[int], object] | None = None  # hears how many lines were read

    def entries(self, path: Path) -> Iterator[OutputLine]:
        """Every line of a file. A record of another job is refused."""
        start = 0
        with path.open("rb") as opened:
            for number, line in enumerate(opened, start=1):
                end = start + len(line)
                if self.on_line is not None:
                    self.on_line(number)
                yield self._entry(f"line {number} of {path}", line, start, end)
                start = end

    def _entry(self, where: str, line: bytes, start: int, end: int) -> OutputLine:
        if is_of_a_crash(line):
            return OutputLine(start, end, None)
        try:
            record = parse_json(line)
        except NotADocument:
            record = None
        custom_id = record.get("custom_id") if isinstance(record, dict) and "response" in record else None
        if not isinstance(custom_id, str):
            raise ValueError(f"{where} is no record of a job; give another output")
        place = self.index.place_of(custom_id)
        if place is None:
            name = self.index.file.name
            raise ValueError(f"{where} is of another job: {name} has no line that is called {shown(custom_id)}")
        return OutputLine(start, end, place, is_refusal(record))

    def keeps(self, entry: OutputLine, finished: Finished) -> bool:
        """Whether a record stays; then its request is finished."""
        if entry.place is None:
            finished.dropped += 1
            return False
        if not finished.is_open(entry.place) or (self.retry_errors and entry.failed):
            return False
        finished.note(entry.place, entry.failed)
        return True


def is_of_a_crash(line: bytes) -> bool:
    """Whether a line is what a crash leaves of records: half of one, or zeros in the place of what was not yet written."""
    return b"\0" in line or (not line.endswith(b"\n") and line[: len(BEGINNING)] == BEGINNING[: len(line)])


def cleaned(file: AppendFile, reader: OutputReader, finished: Finished) -> AppendFile:
    """The file with nothing but records that stay. What stands behind the last of them is cut off; only if lines between them
    have to go is the file written anew."""
    before = bytearray(finished.states)
    whole, is_broken, must_be_rewritten = 0, False, False
    for entry in reader.entries(file.path):
        stays = reader.keeps(entry, finished)
        must_be_rewritten |= stays and is_broken
        is_broken |= not stays
        whole = whole if is_broken else entry.end
    if must_be_rewritten:
        return _rewritten(file, reader, Finished(before))
    if is_broken:
        file.cut(whole)
    return file


def _rewritten(file: AppendFile, reader: OutputReader, finished: Finished) -> AppendFile:
    """Writes a neighbour that then takes the file's name; it is locked before it does."""
    path = file.path
    neighbour = path.with_name(f".{path.name}.rewritten")
    neighbour.unlink(missing_ok=True)
    new = AppendFile(neighbour)
    try:
        for entry in reader.entries(path):
            if reader.keeps(entry, finished):
                new.append(file.read(entry.start, entry.end - entry.start))
        new.take_name(path)
    except BaseException:
        new.close()
        neighbour.unlink(missing_ok=True)
        raise
    file.close()
    return new
