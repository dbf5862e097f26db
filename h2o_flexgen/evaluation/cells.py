"""Cells: the figures of one task in one setting, each kept as a line of a file as soon as it is finished. A command that was
interrupted finds them there and continues."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from h2o_flexgen.core.documents import parse_json
from h2o_flexgen.evaluation.figures import Figure

FILE = "cells.jsonl"


@dataclass(frozen=True)
class Cell:
    identity: Mapping[str, object]  # everything that its figures depend on
    figures: tuple[Figure, ...]
    seconds: float

    @property
    def key(self) -> str:
        return key_of(self.identity)

    def as_line(self) -> bytes:
        figures = [figure.as_json() for figure in self.figures]
        fields = {"key": self.key, "identity": self.identity, "seconds": self.seconds, "figures": figures}
        return json.dumps(fields, sort_keys=True).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> Cell:
        fields = parse_json(line)
        figures = tuple(Figure.of_json(one) for one in fields["figures"])
        cell = cls(fields["identity"], figures, fields["seconds"])
        if cell.key != fields["key"]:
            raise ValueError(fields["key"])
        return cell


def key_of(identity: Mapping[str, object]) -> str:
    return blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=12).hexdigest()


class Cells:
    """The finished cells. Without a folder they are kept for as long as the object lives."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = None if folder is None else folder / FILE
        self._cells: dict[str, Cell] = {}
        if self._file is not None and self._file.exists():
            self._read(self._file)

    def _read(self, file: Path) -> None:
        for line in file.read_bytes().splitlines():
            try:
                cell = Cell.of_line(line)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # no cell: an interrupted write leaves one such line at most
            self._cells[cell.key] = cell

    def forget(self) -> None:
        """Deletes all cells, and their file."""
        self._cells.clear()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def find(self, identity: Mapping[str, object]) -> Cell | None:
        return self._cells.get(key_of(identity))

    def add(self, cell: Cell) -> None:
        """Appends the cell in one write, which is on the disk before the evaluation continues."""
        self._cells[cell.key] = cell
        if self._file is None:
            return
        descriptor = os.open(self._file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, _begun_anew(descriptor) + cell.as_line())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _begun_anew(descriptor: int) -> bytes:
    """A newline, if an interrupted write left the last line unfinished."""
    length = os.fstat(descriptor).st_size
    return b"\n" if length and os.pread(descriptor, 1, length - 1) != b"\n" else b""
