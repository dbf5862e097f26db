"""Rows in words, as the benchmark writes them: `title: ... manufacturer: ... price: ...`, and a question after them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from h2o_flexgen.apps.data_wrangling.data_sets import DataSet
from h2o_flexgen.apps.data_wrangling.tables import Row

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
