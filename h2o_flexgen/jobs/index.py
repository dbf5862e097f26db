"""The index of an input file: where its requests are, which are sound, and by which ids they are known. It holds arrays and no
texts, so that a file of a million requests takes some dozen megabytes. The check of the whole file before anything is loaded
makes it, line by line.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from zlib import crc32

import numpy

from h2o_flexgen.core.files import DOCUMENT, JSON_LINES, may_hold_texts, parse_json
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.jobs.line import (
    CUSTOM_ID,
    LONGEST_LINE,
    RESERVED,
    BadLine,
    InputFile,
    Line,
    LineReader,
    LinesAt,
    RawLine,
)
from h2o_flexgen.jobs.line_fields import ModelNames, Options

SOUND, REFUSED, TWICE = range(3)
HALVES = struct.Struct("QQ")  # of a digest


class ChangedInput(ValueError):
    """The input file is no longer what was checked."""


@dataclass
class Index:
    """The requests of a file, by their places among its lines that are not blank."""

    file: InputFile
    reader: LineReader
    offsets: array[int] = field(default_factory=lambda: array("q"))
    numbers: array[int] = field(default_factory=lambda: array("q"))  # of lines
    sums: array[int] = field(default_factory=lambda: array("I"))
    states: bytearray = field(default_factory=bytearray)
    _digests: array[int] = field(default_factory=lambda: array("Q"))  # of ids, two halves each
    _order: numpy.ndarray = field(default_factory=lambda: numpy.empty(0, numpy.int64))  # places, sorted by digests
    _lines: LinesAt | None = None

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def num_refused(self) -> int:
        return len(self.states) - self.states.count(SOUND)

    def add(self, raw: RawLine, line_id: str | None, state: int) -> None:
        self.offsets.append(raw.offset)
        self.numbers.append(raw.number)
        self.sums.append(crc32(raw.data))
        self.states.append(state)
        self._digests.extend(_digest(_own_id(raw.number) if line_id is None else line_id))

    # -- ids -----------------------------------------------------------------------------------------------------------

    def settle_ids(self) -> list[int]:
        """Marks requests with the id of an earlier one; they are then known by their lines. Returns their places."""
        twice = self._later_ones()
        for place in twice:
            self.states[place] = TWICE
            self._digests[2 * place : 2 * place + 2] = array("Q", _digest(_replaced_id(self.numbers[place])))
        if twice:
            self._later_ones()
        return twice

    def _later_ones(self) -> list[int]:
        """Sorts the places; returns those with a digest that an earlier place has, too."""
        pairs = self._pairs
        self._order = numpy.lexsort((pairs[:, 1], pairs[:, 0]))  # stable: of equal ones the earliest comes first
        in_order = pairs[self._order]
        is_later = (in_order[1:] == in_order[:-1]).all(axis=1)
        return sorted(self._order[1:][is_later].tolist())

    @property
    def _pairs(self) -> numpy.ndarray:
        return numpy.array(self._digests, dtype=numpy.uint64).reshape(-1, 2)

    def place_of(self, record_id: str) -> int | None:
        """The place of the request that is known by this id."""
        wanted = _digest(record_id)
        first, last = 0, len(self._order)
        while first < last:
            middle = (first + last) // 2
            place = int(self._order[middle])
            found = self._digests[2 * place], self._digests[2 * place + 1]
            if found == wanted:
                return place
            first, last = (middle + 1, last) if found < wanted else (first, middle)
        return None

    def id_of(self, place: int, line_id: str | None) -> str:
        """The id by which the record of a request is known; `line_id` is the one that the line gives it."""
        if self.states[place] == TWICE:
            return _replaced_id(self.numbers[place])
        return _own_id(self.numbers[place]) if line_id is None else line_id

    # -- numbers -------------------------------------------------------------------------------------------------------

    def request_number(self, place: int) -> int:
        """The number by which a request is known to the engine, and draws: that of its line, counted from 0."""
        return self.numbers[place] - 1

    def place_of_number(self, number: int) -> int:
        return bisect_left(self.numbers, number + 1)

    # -- a line, read again --------------------------------------------------------------------------------------------

    def line(self, place: int) -> Line:
        """Reads a request again; a BadLine says what is wrong with it."""
        raw = self.raw(place)
        line = read_line(self.reader, raw)
        if self.states[place] == TWICE:
            raise self.said_twice(place, line.custom_id)
        return line

    def said_twice(self, place: int, line_id: str | None) -> BadLine:
        own = _own_id(self.numbers[place]) if line_id is None else line_id
        first = self.place_of(own)
        where = "another line" if first is None else f"line {self.numbers[first]}"
        return BadLine(f"its {CUSTOM_ID} {shown(own)} is that of {where}, too; give it another one", line_id)

    def raw(self, place: int) -> bytes:
        """The bytes of a line, as they were checked."""
        if self._lines is None:
            self._lines = self.file.open()
        raw = self._lines.line(self.offsets[place])
        if crc32(raw) != self.sums[place]:
            changed = f"line {self.numbers[place]} of {self.file.name} is another one than when it was checked"
            raise ChangedInput(f"{changed}; put the file back as it was, and go on with --resume")
        return raw

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def read_line(reader: LineReader, raw: bytes) -> Line:
    if len(raw) > (most := min(reader.most_bytes, LONGEST_LINE)):
        raise BadLine(f"it is longer than {format_bytes(most)}")
    return reader.read(raw)


def _own_id(number: int) -> str:
    """The id of a line that gives none."""
    return f"line-{number}"


def _replaced_id(number: int) -> str:
    """The id of a line, if its own is already another line's."""
    return f"{RESERVED}{number}"


def _digest(text: str) -> tuple[int, int]:
    first, second = HALVES.unpack(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=HALVES.size).digest())
    return first, second


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
    file: InputFile,
    defaults: Options,
    known: InputPart | None = None,
    on_line: OnLine | None = None,
    names: ModelNames | None = None,
) -> CheckedFile:
    """Reads every line once. `known` is what an earlier run had checked. `names`: those that a model may have in a line, where
    it has adapters."""
    return check_lines(Index(file, LineReader(file.is_json, defaults, names=names)), known, on_line)


def check_lines(index: Index, known: InputPart | None = None, on_line: OnLine | None = None, named: int = NAMED) -> CheckedFile:
    """Reads every line of an index's file, and puts it there. `named`: how many bad lines are told of."""
    checker = _Checker(index, known, named)
    for raw in index.file.lines():
        checker.take(raw)
        if on_line is not None:
            on_line(raw.number)
    return checker.checked()


def _is_json(line: bytes) -> bool:
    try:
        parse_json(line)
    except ValueError:
        return False
    return True


class _Checker:
    def __init__(self, index: Index, known: InputPart | None, named: int) -> None:
        self._index, self._known, self._named = index, known, named
        self._digest = blake2b(digest_size=16)
        self._end = self._chats = 0
        self._refused: list[tuple[int, str]] = []
        self._digest_of_known: str | None = None

    def take(self, raw: RawLine) -> None:
        if not len(self._index):
            self._refuse_no_texts(raw)
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

    def _refuse_no_texts(self, raw: RawLine) -> None:
        """Refuses a file of JSON lines with a name for text, a document, and what is called as no texts are: each line would be
        taken for a prompt."""
        name = self._index.file.name
        if self._index.reader.is_json:
            return
        if raw.data.lstrip().startswith(b"{") and _is_json(raw.data):
            raise ValueError(f"{name} has JSON in its first line, as requests have, and is not called {JSON_LINES}; rename it")
        if self._index.file.is_document:
            forms = f"a request of JSON per line, in a file called {JSON_LINES}, or a text per line, in one called .txt"
            raise ValueError(f"{name} is called {DOCUMENT}, and its lines are no requests; give {forms}")
        if not may_hold_texts(path := self._index.file.path):
            would = f"is called {path.suffix}, and each of its lines would be a prompt"
            raise ValueError(f"{name} {would}; if they are, call it .txt, or {JSON_LINES} if they are requests")

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
