"""Questions about the rows of a split: how rows are put into words, how each is asked about, and what is right. Prompts of
them: an instruction, examples and a question, and the file of requests that a job is run from. Examples are drawn from the
training rows, the same for every question, or written by hand in a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from h2o_flexgen.apps.data_wrangling.data_sets import DETECT, IMPUTE, MATCH, DataSet, Folder, Row, Table
from h2o_flexgen.core.files import local_path, parse_json, read_text
from h2o_flexgen.core.hints import shown

FULL_STOP = "."
YES, NO = "Yes", "No"
SPELLING = "Is there a x spelling error in"


@dataclass(frozen=True)
class Wording:
    """How rows of a data set are written: which columns, what stands between them, and what where there is nothing."""

    data_set: DataSet
    columns: Mapping[str, str]  # of a table, and what each is called
    separator: str = FULL_STOP
    missing: str = ""

    def row(self, row: Row, columns: Mapping[str, str] | None = None) -> str:
        columns = self.columns if columns is None else columns
        parts = (f"{name}: {self._value(row.values[column])}".lstrip() for column, name in columns.items())
        return f"{self._between} ".join(parts)

    @property
    def _between(self) -> str:
        """The separator; one that is no full stop stands apart from what is before it."""
        return self.separator if self.separator in ("", FULL_STOP) else f" {self.separator}"

    def _value(self, value: str | None) -> str:
        return self.missing if value is None else value.strip()

    # -- questions -------------------------------------------------------------------------------------------------------

    def pair(self, first: Row, second: Row) -> str:
        kind = self.data_set.entity
        return f"{kind} A is {self.row(first)}. {kind} B is {self.row(second)}.{self.data_set.question} "

    def gap(self, row: Row) -> str:
        return f"{self.row(row)}{self._between}{self.data_set.question} "

    def spelling(self, row: Row, column: str) -> str:
        return f"{SPELLING} {self.row(row, {column: column})}{self.data_set.question} "


def columns_of(data_set: DataSet, there: tuple[str, ...], chosen: tuple[str, ...] | None) -> Mapping[str, str]:
    """The columns by which rows are described, in their order: those that were chosen, or all but those that the benchmark
    drops."""
    kept = [name for name in there if name != "id" and name not in data_set.dropped] if chosen is None else chosen
    return {name: data_set.renamed.get(name, name) for name in kept if name != data_set.imputed}


TRUE, FALSE = "1", "0"
BOTH = (TRUE, FALSE)
NOTHING_THERE = "nan"  # what examples by hand are kept under for rows with nothing in their column


@dataclass(frozen=True)
class Question:
    """A row of a split. `by` is what its examples depend on, where they depend on anything."""

    line: int  # in the file of the split
    text: str
    expected: str
    by: str | None = None


@dataclass(frozen=True)
class Serialising:
    """The user's choice of how rows are written; None for the benchmark's own."""

    columns: tuple[str, ...] | None = None
    separator: str = FULL_STOP
    missing: str | None = None
    numbers_of_pandas: bool = True


@dataclass(frozen=True)
class Questions:
    """The questions of any split of a data set. Tables that splits share are read once."""

    folder: Folder
    serialising: Serialising
    tables: tuple[Table, ...]
    wording: Wording | None  # None: each split is a table with columns of its own

    @classmethod
    def of(cls, folder: Folder, serialising: Serialising) -> Questions:
        data_set = folder.data_set
        tables = tuple(_table(folder, serialising, name, ("id", *data_set.needed)) for name in _with_ids(data_set))
        tables += tuple(_table(folder, serialising, name, ()) for name in _without_ids(data_set))
        for table in tables:
            _check_chosen(table, serialising)
        return cls(folder, serialising, tables, _wording(data_set, tables[0], serialising) if tables else None)

    def split(self, name: str) -> list[Question]:
        task = self.folder.data_set.task
        needed = (*task.of_splits, *(self.folder.data_set.needed if task.name == IMPUTE else ()))
        table = Table.read(self.folder.split(name), needed)
        return list(READERS[task.name](self, table))

    # -- a reader for each task --------------------------------------------------------------------------------------------

    def pairs(self, labels: Table) -> Iterator[Question]:
        assert self.wording is not None
        first, second = (table.by_id("id") for table in self.tables)
        by = self.folder.data_set.examples_by
        for label in labels.rows:
            a = self._row(labels, label, "ltable_id", self.tables[0], first)
            b = self._row(labels, label, "rtable_id", self.tables[1], second)
            is_same = labels.number(label, "label", BOTH) == TRUE
            key = None if by is None else a.values[by.removesuffix("_A")] or NOTHING_THERE
            yield Question(label.line, self.wording.pair(a, b), YES if is_same else NO, key)

    def _row(self, labels: Table, label: Row, column: str, table: Table, rows: Mapping[str, Row]) -> Row:
        value = label.values[column]
        row = None if value is None else rows.get(value.strip())
        if row is None:
            raise ValueError(f"{labels.where(label, column)}: {table.path} has no row with the id {shown(value)}")
        return row

    def gaps(self, table: Table) -> Iterator[Question]:
        _check_chosen(table, self.serialising)
        table = table.with_numbers_of_pandas() if self.serialising.numbers_of_pandas else table
        data_set = self.folder.data_set
        assert data_set.imputed is not None
        wording = _wording(data_set, table, self.serialising)
        for row in table.rows:
            expected = row.values[data_set.imputed]
            if expected is None:
                raise ValueError(f"{table.where(row, data_set.imputed)}: nothing stands there, so no answer would be right")
            yield Question(row.line, wording.gap(row), expected.strip())

    def errors(self, labels: Table) -> Iterator[Question]:
        assert self.wording is not None
        (table,) = self.tables
        for label in labels.rows:
            number, column = label.values["row_id"], (label.values["col_name"] or "").strip()
            if number is None or not number.strip().isdigit() or int(number) >= len(table.rows):
                most = f"{table.path} has rows 0 to {len(table.rows) - 1}"
                raise ValueError(f"{labels.where(label, 'row_id')}: {shown(number)} is no row; {most}")
            if column not in table.columns:
                raise ValueError(f"{labels.where(label, 'col_name')}: {table.path} has no column {shown(column)}")
            text = self.wording.spelling(table.rows[int(number)], column)
            is_clean = labels.number(label, "is_clean", BOTH) == TRUE
            yield Question(label.line, text, NO if is_clean else YES, column)


READERS: Mapping[str, Callable[[Questions, Table], Iterator[Question]]] = {
    MATCH: Questions.pairs,
    IMPUTE: Questions.gaps,
    DETECT: Questions.errors,
}


def _with_ids(data_set: DataSet) -> tuple[str, ...]:
    return data_set.task.tables if data_set.task.name == MATCH else ()


def _without_ids(data_set: DataSet) -> tuple[str, ...]:
    return () if data_set.task.name == MATCH else data_set.task.tables


def _table(folder: Folder, serialising: Serialising, name: str, needed: tuple[str, ...]) -> Table:
    table = Table.read(folder.file(name), needed)
    return table.with_numbers_of_pandas() if serialising.numbers_of_pandas else table


def _check_chosen(table: Table, serialising: Serialising) -> None:
    for name in serialising.columns or ():
        if name not in table.columns:
            raise ValueError(f"--columns has {shown(name)}, and line 1 of {table.path} has {', '.join(table.columns)}")


def _wording(data_set: DataSet, table: Table, asked: Serialising) -> Wording:
    columns = columns_of(data_set, table.columns, asked.columns)
    if not columns:
        raise ValueError(f"no column of {table.path} is left to describe its rows by; give others with --columns")
    return Wording(data_set, columns, asked.separator, data_set.missing if asked.missing is None else asked.missing)


COUNT, FILE = "--examples", "--examples-file"
JSON = ".json"


@dataclass(frozen=True)
class Examples:
    """A text for all questions, or one for each value of a column."""

    text: str = ""
    by: Mapping[str, str] | None = None
    source: str = ""  # of texts by value, for messages

    def before(self, question: Question) -> str:
        if self.by is None:
            return self.text
        value = question.by
        if value is None or value not in self.by:
            raise ValueError(f"{self.source} has no examples under {shown(value)}, which line {question.line} of the rows has")
        return self.by[value]


# -- drawn -----------------------------------------------------------------------------------------------------------------


def drawn(rows: Sequence[Question], source: Path, count: int, seed: int, balanced: bool) -> Examples:
    """The same for the same seed. `balanced`: from as many rows that are answered Yes as No."""
    random = Random(seed)
    pool = _balanced(rows, random) if balanced else list(rows)
    if count > len(pool):
        left = f"{source} has {len(rows)} rows" + (f", {len(pool)} of them balanced" if balanced else "")
        raise ValueError(f"{COUNT} {count} is more than there are: {left}; give {len(pool)} or fewer")
    texts = (f"{row.text}{row.expected}".strip() for row in random.sample(pool, count))
    return Examples("\n\n".join(texts) + "\n" if count else "")


def _balanced(rows: Sequence[Question], random: Random) -> list[Question]:
    kinds = [[row for row in rows if row.expected == answer] for answer in (YES, NO)]
    least = min(map(len, kinds))
    return [row for kind in kinds for row in random.sample(kind, least)]


# -- by hand ---------------------------------------------------------------------------------------------------------------


def by_hand(file: str, data_set: DataSet) -> Examples:
    """Examples of a file: a text that stands before every question, or in a .json file one text, or an object with a text for
    each value of the column that the data set's examples depend on."""
    path = local_path(file)
    text = read_text(path, f"{FILE} {file}")
    if path.suffix != JSON:
        return Examples(_some(text, file))
    try:
        given = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{FILE} {file} is not JSON: {error}") from error
    if isinstance(given, str):
        return Examples(_some(given, file))
    if not isinstance(given, dict) or not all(isinstance(one, str) for one in given.values()):
        raise ValueError(f"{FILE} {file} has {shown(given)}; it takes a text, or an object with texts as its values")
    if data_set.examples_by is None:
        raise ValueError(f"{FILE} {file} has texts by value, and {data_set.name} has one for all rows; give a text")
    return Examples(by=given, source=f"{FILE} {file}")


def _some(text: str, file: str) -> str:
    if not text.strip():
        raise ValueError(f"{FILE} {file} is empty; for no examples say {COUNT} 0")
    return text


STOP = "\n"  # an answer is one line
BEGINNING = b'{"custom_id": "'  # of every request


@dataclass(frozen=True)
class PromptedQuestion:
    """A question as the model gets it, under the id of its record."""

    id: str
    question: Question
    prompt: str


def asked(questions: Iterable[Question], split: str, examples: Examples, instruction: str | None) -> Iterator[PromptedQuestion]:
    for question in questions:
        text = f"{examples.before(question)}\n{question.text}".strip()
        yield PromptedQuestion(f"{split}-{question.line}", question, text if instruction is None else f"{instruction} {text}")


def requests_of(rows: Sequence[PromptedQuestion], gen_len: int) -> str:
    """The requests of a batch job, a line each, which say all that the answers depend on but the model."""
    how = {"max_tokens": gen_len, "temperature": 0, "stop": [STOP]}
    return "".join(json.dumps({"custom_id": one.id, "prompt": one.prompt, **how}) + "\n" for one in rows)
