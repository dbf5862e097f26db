"""Cells: the figures of one task in one setting, each kept as a line of a file as soon as it is finished. A command that was
interrupted finds them there and continues. A figure has its standard error and its number of examples."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from statistics import fmean, stdev

from h2o_flexgen.core.files import parse_json

DIGITS = 9  # kept of the value of a single example


@dataclass(frozen=True)
class Figure:
    """A value for all examples of a cell, or only for those where `by` (such as depth) has the value `at` (such as 50 %)."""

    name: str
    value: float
    error: float | None  # standard error; a single example has none
    count: int  # examples
    panel: str = ""  # figures of different panels are never added up: questions that were visible, and hidden ones
    by: str = ""
    at: str = ""
    examples: tuple[float, ...] = ()  # their values in order, so that two cells can be compared pair by pair

    def as_json(self) -> dict[str, object]:
        return {key: value for key, value in asdict(self).items() if value not in ("", ())}

    @classmethod
    def of_json(cls, fields: Mapping[str, object]) -> Figure:
        return cls(**{**fields, "examples": tuple(fields.get("examples", ()))})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Relation:
    """A figure divided by the same figure of the full cache, on the same examples."""

    ratio: float
    error: float | None


def mean(name: str, values: Sequence[float], panel: str = "", by: str = "", at: str = "") -> Figure:
    """The values of single examples are kept only in the figure for the whole cell."""
    rounded = tuple(round(value, DIGITS) for value in values)
    return Figure(name, fmean(values), standard_error(values), len(values), panel, by, at, () if by else rounded)


def standard_error(values: Sequence[float]) -> float | None:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def ratio_of_sums(parts: Sequence[float], wholes: Sequence[float]) -> tuple[float, float | None]:
    """The ratio and its standard error, from the residual of each example against the ratio."""
    ratio = math.fsum(parts) / math.fsum(wholes)
    left = standard_error([part - ratio * whole for part, whole in zip(parts, wholes)])
    return ratio, None if left is None else left / fmean(wholes)


def of_means(values: Sequence[float], of_full: Sequence[float]) -> Relation | None:
    if len(values) != len(of_full) or not any(of_full):
        return None
    return Relation(*ratio_of_sums(values, of_full))


def of_exponents(values: Sequence[float], of_full: Sequence[float]) -> Relation | None:
    """The ratio of two perplexities; their examples are mean losses."""
    if len(values) != len(of_full):
        return None
    differences = [value - full for value, full in zip(values, of_full)]
    ratio, error = math.exp(fmean(differences)), standard_error(differences)
    return Relation(ratio, None if error is None else ratio * error)


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
