"""The input file of a job: its lines in turn, each with its place, or one line at a place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from h2o_flexgen.core.hints import reason

JSON_LINES = ".jsonl"
LONGEST_LINE = 1 << 26  # bytes
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RawLine(NamedTuple):
    number: int  # counted from 1
    offset: int
    end: int  # where the next line begins
    data: bytes  # without the end of the line; of one that is too long only the beginning


@dataclass(frozen=True)
class InputFile:
    path: Path
    name: str  # as it was written, for messages

    @classmethod
    def of(cls, name: str) -> InputFile:
        """Refuses what cannot be read twice."""
        path = Path(name).expanduser()
        try:
            with path.open("rb") as opened:
                is_plain = S_ISREG(os.fstat(opened.fileno()).st_mode)
        except OSError as error:
            raise ValueError(f"{name} cannot be read ({reason(error)}); give a file with a request per line") from error
        if not is_plain:
            raise ValueError(f"{name} is no plain file; a request is read again when its turn comes, so write them to a file")
        return cls(path, name)

    @property
    def is_json(self) -> bool:
        return self.path.suffix == JSON_LINES

    def lines(self) -> Iterator[RawLine]:
        """The lines that are not blank."""
        with self.path.open("rb") as opened:
            number = offset = 0
            while piece := opened.readline(LONGEST_LINE + 1):
                number, start, offset = number + 1, offset, offset + len(piece)
                if len(piece) > LONGEST_LINE and not piece.endswith(b"\n"):
                    offset += _skip_line(opened)
                data = _text_of(piece, start)
                if data.strip():
                    yield RawLine(number, start, offset, data)

    def open(self) -> LinesAt:
        return LinesAt(self.path.open("rb"))


class LinesAt:
    """Lines of a file that stays open, by the place where they begin."""

    def __init__(self, opened: BufferedReader) -> None:
        self._opened = opened

    def line(self, offset: int) -> bytes:
        self._opened.seek(offset)
        return _text_of(self._opened.readline(LONGEST_LINE + 1), offset)

    def close(self) -> None:
        self._opened.close()


def _text_of(piece: bytes, offset: int) -> bytes:
    """A line without its end, and the first one without the mark that some editors put there."""
    return (piece.removeprefix(BYTE_ORDER_MARK) if offset == 0 else piece).rstrip(b"\r\n")


def _skip_line(opened: BufferedReader) -> int:
    """Reads on to the end of the line; returns how many bytes that were."""
    skipped = 0
    while piece := opened.readline(LONGEST_LINE):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped
