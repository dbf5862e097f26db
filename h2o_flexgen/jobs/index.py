"""The index of an input file: where its requests are, which are sound, and by which ids they are known. It holds arrays and no
texts, so that a file of a million requests takes some dozen megabytes."""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from hashlib import blake2b
from zlib import crc32

import numpy

from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.jobs.input_file import LONGEST_LINE, InputFile, LinesAt, RawLine
from h2o_flexgen.jobs.line import CUSTOM_ID, RESERVED, BadLine, Line, LineReader

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
