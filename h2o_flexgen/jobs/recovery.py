"""What an earlier run of a job has left in its output: which requests are finished, and where whole records end. The output
itself says so; nothing else is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from h2o_flexgen.core.files import NotADocument, parse_json
from h2o_flexgen.core.hints import shown
from h2o_flexgen.jobs.append import AppendFile
from h2o_flexgen.jobs.index import Index
from h2o_flexgen.jobs.openai_answers import BEGINNING, is_refusal

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
