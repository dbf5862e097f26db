"""The check of a whole input file before anything is loaded: line by line, in memory that does not grow with the texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from h2o_flexgen.core.files import parse_json
from h2o_flexgen.jobs.index import REFUSED, SOUND, Index, read_line
from h2o_flexgen.jobs.input_file import JSON_LINES, InputFile, RawLine
from h2o_flexgen.jobs.line import BadLine, LineReader
from h2o_flexgen.jobs.line_fields import Options

NAMED = 5  # bad lines that a message names
OnLine = Callable[[int], None]  # hears how many lines were read


@dataclass(frozen=True)
class InputPart:
    """The beginning of an input file: so many bytes, and a digest of their lines."""

    nbytes: int
    digest: str


@dataclass(frozen=True)
class CheckedFile:
    index: Index
    whole: InputPart
    chats: int
    refused: tuple[tuple[int, str], ...]  # the first bad lines: their numbers, and what is wrong with them
    num_refused: int
    begins_as_known: bool  # the part that was known before is there, unchanged

    def error(self) -> str:
        """What a person is told of the bad lines."""
        first = "; ".join(f"line {number}: {reason}" for number, reason in self.refused)
        more = self.num_refused - len(self.refused)
        lines = f"{self.index.file.name} has {self.num_refused} of {len(self.index)} lines that cannot be run"
        advice = "--skip-invalid runs the others and records these as errors"
        return f"{lines} ({advice}): {first}{f'; and {more} more' if more else ''}"


def check_file(
    file: InputFile, defaults: Options, known: InputPart | None = None, on_line: OnLine | None = None
) -> CheckedFile:
    """Reads every line once. `known` is what an earlier run had checked."""
    return check_lines(Index(file, LineReader(file.is_json, defaults)), known, on_line)


def check_lines(index: Index, known: InputPart | None = None, on_line: OnLine | None = None, named: int = NAMED) -> CheckedFile:
    """Reads every line of an index's file, and puts it there. `named`: how many bad lines are told of."""
    checker = _Checker(index, known, named)
    for raw in index.file.lines():
        checker.take(raw)
        if on_line is not None:
            on_line(raw.number)
    return checker.checked()


class _Checker:
    def __init__(self, index: Index, known: InputPart | None, named: int) -> None:
        self._index, self._known, self._named = index, known, named
        self._digest = blake2b(digest_size=16)
        self._end = self._chats = 0
        self._refused: list[tuple[int, str]] = []
        self._digest_of_known: str | None = None

    def take(self, raw: RawLine) -> None:
        if not len(self._index):
            self._refuse_json_in_disguise(raw)
        if self._known is not None and self._digest_of_known is None and raw.offset >= self._known.nbytes:
            self._digest_of_known = self._digest.hexdigest()
        self._digest.update(b"%d:%b\n" % (raw.number, raw.data))
        self._end = raw.end
        try:
            line = read_line(self._index.reader, raw.data)
        except BadLine as bad:
            self._index.add(raw, bad.custom_id, REFUSED)
            self._note(raw.number, bad)
        else:
            self._chats += line.is_chat
            self._index.add(raw, line.custom_id, SOUND)

    def _note(self, number: int, bad: BadLine) -> None:
        if len(self._refused) < self._named:
            self._refused.append((number, str(bad)))

    def _refuse_json_in_disguise(self, raw: RawLine) -> None:
        """Refuses a file of JSON lines with a name for text: each line would be taken for a prompt."""
        if self._index.reader.is_json or not raw.data.lstrip().startswith(b"{"):
            return
        try:
            parse_json(raw.data)
        except ValueError:
            return
        name = self._index.file.name
        raise ValueError(f"{name} has JSON in its first line, but not {JSON_LINES} in its name, which texts lack; rename it")

    def checked(self) -> CheckedFile:
        index = self._index
        if not len(index):
            raise ValueError(f"{index.file.name} is empty; write a request per line")
        for place in index.settle_ids()[: self._named]:
            try:
                index.line(place)
            except BadLine as bad:
                self._refused.append((index.numbers[place], str(bad)))
        digest = self._digest.hexdigest()
        is_known = self._known is None or (self._digest_of_known or digest) == self._known.digest
        named = tuple(sorted(set(self._refused))[: self._named])
        return CheckedFile(index, InputPart(self._end, digest), self._chats, named, index.num_refused, is_known)
