"""Tables: CSV files with a header, each value with the line where it stands. Whatever is wrong is named by line and column."""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

from h2o_flexgen.core.files import read_text
from h2o_flexgen.core.hints import did_you_mean, shown

MARK = "\ufeff"  # begins files of some editors
# what pandas takes for nothing, which the original reads tables with
NOTHING = frozenset(
    {
        "",
        "#N/A",
        "#N/A N/A",
        "#NA",
        "-1.#IND",
        "-1.#QNAN",
        "-NaN",
        "-nan",
        "1.#IND",
        "1.#QNAN",
        "<NA>",
        "N/A",
        "NA",
        "NULL",
        "NaN",
    }
    | {"None", "n/a", "nan", "null"}
)
WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,2})?")


@dataclass(frozen=True)
class Row:
    line: int  # where it begins, counted from 1
    values: Mapping[str, str | None]  # by column; None where there is nothing


@dataclass(frozen=True)
class Table:
    path: Path
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def read(cls, path: Path, needed: Collection[str] = ()) -> Table:
        """Reads a table that has at least these columns."""
        lines = _lines(path)
        _, header = next(lines, (1, []))
        columns = [name.strip() for name in header]
        _check_header(path, columns, needed)
        rows = []
        for line, values in lines:
            if len(values) != len(columns):
                counted = f"{len(values)} value{'s' * (len(values) != 1)}, and the header has {len(columns)} columns"
                raise ValueError(f"line {line} of {path} has {counted}; quote values that have commas or line ends in them")
            found = {column: None if value.strip() in NOTHING else value for column, value in zip(columns, values) if column}
            rows.append(Row(line, found))
        if not rows:
            raise ValueError(f"{path} has no rows below its header")
        return cls(path, tuple(column for column in columns if column), tuple(rows))

    def where(self, row: Row, column: str) -> str:
        return f"line {row.line} of {self.path}, column {shown(column)} ({self.columns.index(column) + 1})"

    def number(self, row: Row, column: str, known: Collection[str]) -> str:
        """The value of a column that has one of a few."""
        value = row.values[column]
        if value is None or value.strip() not in known:
            given = "nothing" if value is None else shown(value)
            raise ValueError(f"{self.where(row, column)}: {given} stands there; known are {' and '.join(known)}")
        return value.strip()

    def by_id(self, column: str) -> Mapping[str, Row]:
        """The rows by what a column says, each once."""
        found: dict[str, Row] = {}
        for row in self.rows:
            value = row.values[column]
            if value is None:
                raise ValueError(f"{self.where(row, column)}: nothing stands there; a row needs one")
            if (earlier := found.setdefault(value.strip(), row)) is not row:
                raise ValueError(f"{self.where(row, column)}: {shown(value)} is that of line {earlier.line}, too")
        return found

    def with_numbers_of_pandas(self) -> Table:
        """The table with its numbers written as pandas writes them: those of a column with gaps or decimals as decimals."""
        written = {column: _written(column, self.rows) for column in self.columns}
        return replace(self, rows=tuple(_replaced(row, written) for row in self.rows))


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The lines of a CSV file that are not blank, each with its number."""
    reader = csv.reader(StringIO(read_text(path, str(path)).removeprefix(MARK), newline=""), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            values = next(reader, None)
        except csv.Error as error:
            raise ValueError(f"line {line} of {path} is no line of a table: {error}") from error
        if values is None:
            return
        if values:
            yield line, values


def _check_header(path: Path, columns: list[str], needed: Collection[str]) -> None:
    if not columns:
        raise ValueError(f"{path} is empty; a table begins with a line of column names")
    twice = next((name for place, name in enumerate(columns) if name and name in columns[:place]), None)
    if twice is not None:
        raise ValueError(f"line 1 of {path} has the column {shown(twice)} twice")
    for name in needed:
        if name not in columns:
            there = ", ".join(filter(None, columns))
            raise ValueError(f"line 1 of {path} has no column {shown(name)}; it has {there}{did_you_mean(name, columns)}")


Written = Mapping[str, str]  # how values of a column are written


def _written(column: str, rows: Collection[Row]) -> Written:
    values = [row.values[column] for row in rows]
    there = {value: value.strip() for value in values if value is not None}
    if not there or not all(map(DECIMAL.fullmatch, there.values())):
        return {}
    if all(map(WHOLE.fullmatch, there.values())) and None not in values:
        return {value: str(int(text)) for value, text in there.items()}
    return {value: repr(float(text)) for value, text in there.items()}


def _replaced(row: Row, written: Mapping[str, Written]) -> Row:
    return replace(
        row, values={name: None if value is None else written[name].get(value, value) for name, value in row.values.items()}
    )
