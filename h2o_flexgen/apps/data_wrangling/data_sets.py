"""The tasks, and the data sets of each: where the published download has them, their columns, and how rows are asked about.
Tables are CSV files with a header, each value with the line where it stands. Whatever is wrong is named by line and column.

Folders, columns, instructions and questions are facts of the benchmark, as fm_data_tasks and FlexGen's data_wrangle have them
(constants.py in both); a misspelt instruction is misspelt there.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path

from h2o_flexgen.core.files import local_path, read_text
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


DOWNLOAD = "https://fm-data-tasks.s3.us-west-1.amazonaws.com/datasets.tar.gz"
MATCH, IMPUTE, DETECT = "entity_match", "impute", "detect_errors"
EXACT, BEGINS = "exact", "begins"
MATCHES = {EXACT: "it is the answer", BEGINS: "it begins with the answer, as a word"}
SPLITS = {"train": "train.csv", "valid": "valid.csv", "test": "test.csv"}


@dataclass(frozen=True)
class QuestionKind:
    """A kind of question. `match` is how the original compares an answer with what was expected."""

    name: str
    folder: str  # in the download
    tables: tuple[str, ...]  # beside those of the splits
    of_splits: tuple[str, ...]  # columns that the tables of splits need
    is_yes_or_no: bool
    match: str


TASKS: Mapping[str, QuestionKind] = {
    task.name: task
    for task in (
        QuestionKind(
            MATCH,
            "entity_matching/structured",
            ("tableA.csv", "tableB.csv"),
            ("ltable_id", "rtable_id", "label"),
            True,
            EXACT,
        ),
        QuestionKind(IMPUTE, "data_imputation", (), (), False, EXACT),
        QuestionKind(DETECT, "error_detection", ("table.csv",), ("row_id", "col_name", "is_clean"), True, BEGINS),
    )
}


@dataclass(frozen=True)
class DataSet:
    name: str
    task: QuestionKind
    columns: tuple[str, ...]  # of the tables, but for the id
    instruction: str
    question: str  # after a row
    entity: str = "Product"  # what a row is, where two of them are matched
    dropped: frozenset[str] = frozenset()  # columns that rows are not described by
    renamed: Mapping[str, str] = field(default_factory=dict)
    imputed: str | None = None  # the column that is asked for
    examples_by: str | None = None  # the column by which examples that were chosen by hand differ
    gen_len: int = 3  # tokens of an answer, at most
    missing: str = "nan"  # what is written where a table has nothing

    @property
    def needed(self) -> tuple[str, ...]:
        """Columns without which it is another data set."""
        if self.imputed is not None:
            return (self.imputed,)
        return self.columns if self.task.name == MATCH else ()


SAME_PRODUCT = "Are Product A and Product B the same? Yes or No?"
SAME_SONG = "Are Song A and Song B the same? Yes or No?"
ASKED_PRODUCT = " Are Product A and Product B the same?"
PAPERS = ("title", "authors", "venue", "year")
BEERS = {"Beer_Name": "name", "Brew_Factory_Name": "factory", "Style": "style", "ABV": "ABV"}
SONGS = {
    "Song_Name": "name", "Artist_Name": "artist name", "Album_Name": "album name", "Genre": "genre", "Price": "price",
    "CopyRight": "CopyRight", "Time": "time", "Released": "released",
}  # fmt: skip
HOSPITAL = (
    "ProviderNumber", "HospitalName", "Address1", "Address2", "Address3", "City", "State", "ZipCode", "CountyName",
    "PhoneNumber", "HospitalType", "HospitalOwner", "EmergencyService", "Condition", "MeasureCode", "MeasureName", "Score",
    "Sample", "Stateavg",
)  # fmt: skip


def _matching(
    name: str, columns: tuple[str, ...], instruction: str = SAME_PRODUCT, question: str = ASKED_PRODUCT, **facts: object
) -> DataSet:
    return DataSet(name, TASKS[MATCH], columns, instruction, question, missing="", **facts)  # type: ignore[arg-type]


DATA_SETS: Mapping[str, DataSet] = {
    one.name: one
    for one in (
        _matching("Fodors-Zagats", ("name", "addr", "city", "phone", "type", "class")),
        _matching("Beer", tuple(BEERS), dropped=frozenset({"Style", "ABV"}), renamed=BEERS),
        _matching(
            "iTunes-Amazon",
            tuple(SONGS),
            SAME_SONG,
            " Same Song?",
            entity="Song",
            dropped=frozenset({"CopyRight"}),
            renamed=SONGS,
        ),
        _matching(
            "Walmart-Amazon",
            ("title", "category", "brand", "modelno", "price"),
            question=" Are A and B the Same?",
            dropped=frozenset({"category", "price", "brand"}),
        ),
        _matching("Amazon-Google", ("title", "manufacturer", "price"), examples_by="manufacturer_A"),
        _matching("DBLP-ACM", PAPERS, examples_by="venue_A"),
        _matching("DBLP-GoogleScholar", PAPERS, examples_by="venue_A"),
        DataSet(
            "Restaurant",
            TASKS[IMPUTE],
            ("name", "addr", "phone", "type", "city"),
            "What is the city? san fransisco, new york, denver?",
            " What is the city?",
            imputed="city",
            gen_len=5,
        ),
        DataSet(
            "Buy",
            TASKS[IMPUTE],
            ("name", "description", "manufacturer"),
            "Who is the manufacturer? apple, sony, lg electronics?",
            " Who is the manufacturer?",
            imputed="manufacturer",
            gen_len=10,
        ),
        DataSet(
            "Hospital",
            TASKS[DETECT],
            HOSPITAL,
            "Is there a x spelling error? Yes or No?",
            "?",
            examples_by="col_name",
        ),
    )
}


def names_of(task: QuestionKind) -> list[str]:
    return [one.name for one in DATA_SETS.values() if one.task is task]


def data_set_of(task: QuestionKind, name: str, said: str) -> DataSet:
    """The data set of this name; `said` is where the name comes from."""
    known = names_of(task)
    if name in known:
        return DATA_SETS[name]
    if name in DATA_SETS:
        other = DATA_SETS[name].task.name
        raise ValueError(f"{said} {shown(name)} is one of {other}, and --task is {task.name}; known: {', '.join(known)}")
    hint = did_you_mean(name, known)
    raise ValueError(f"{said} {shown(name)} is no data set of {task.name}; known: {', '.join(known)}{hint}")


DATA_DIR, DATA_SET = "--data-dir", "--data-set"


@dataclass(frozen=True)
class Folder:
    path: Path
    data_set: DataSet

    @classmethod
    def of(cls, task: QuestionKind, given: str, name: str | None) -> Folder:
        """The folder that is given, or the data set of this name below it."""
        top = local_path(given)
        if not top.is_dir():
            raise ValueError(f"{DATA_DIR} {given} is no folder; {_advice(task)}")
        if name is None:
            own = top.resolve().name
            if own not in names_of(task):
                known = ", ".join(names_of(task))
                raise ValueError(f"{DATA_DIR} {given} is called like no data set of {task.name}; add {DATA_SET}: {known}")
            return cls(top, data_set_of(task, own, DATA_DIR))
        data_set = data_set_of(task, name, DATA_SET)
        below = f"{task.folder}/{name}"
        places = [top / place for place in (below, f"datasets/{below}", f"data/datasets/{below}", name)]
        if top.resolve().name == name:
            places.append(top)
        if (found := next((place for place in places if place.is_dir()), None)) is None:
            raise ValueError(f"{DATA_DIR} {given} has no data set {name}: there is no {places[0]}; {_advice(task)}")
        return cls(found, data_set)

    def file(self, name: str) -> Path:
        path = self.path / name
        if not path.is_file():
            raise ValueError(f"{self.data_set.name} has no {name}: there is no {path}; {_advice(self.data_set.task)}")
        return path

    def split(self, name: str) -> Path:
        return self.file(SPLITS[name])


def _advice(task: QuestionKind) -> str:
    return f"unpack {DOWNLOAD}, which has {task.folder}/..., and give its folder"
