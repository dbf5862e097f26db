"""Tables in Markdown: for each task a row per policy and a column per budget; after each value its standard error and, in
brackets, its ratio to the full cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from h2o_flexgen.evaluation.cells import Cell, Figure, Relation
from h2o_flexgen.evaluation.grid import Setting
from h2o_flexgen.evaluation.tasks.task import Bound, Shown
from h2o_flexgen.policies.full import Full

MISSING = "-"


@dataclass(frozen=True)
class Results:
    """The cells of one task by setting, the full cache first if it is among them."""

    name: str
    shown: tuple[Shown, ...]
    bound: Bound
    cells: Mapping[Setting, Cell]

    @property
    def full(self) -> Cell | None:
        """The full cache's cell, preferably the one with uncompressed weights and KV."""
        found = [setting for setting in self.cells if setting.policy == Full.name]
        setting = next((setting for setting in found if setting.is_reference), found[0] if found else None)
        return None if setting is None else self.cells[setting]

    @property
    def columns(self) -> list[str]:
        amounts = dict.fromkeys(setting.amount for setting in self.cells)
        return [amount.label for amount in sorted(amounts, key=lambda amount: amount.order)]

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(setting.label for setting in self.cells))

    @property
    def panels(self) -> list[str]:
        """Figures shown side by side: those of visible and of hidden questions."""
        return list(dict.fromkeys(figure.panel for cell in self.cells.values() for figure in cell.figures))

    def find(self, row: str, column: str) -> Cell | None:
        """The cell at this place of the table. Every policy that keeps everything is the full cache."""
        for setting, cell in self.cells.items():
            if (setting.label, setting.amount.label) == (row, column):
                return cell
        of_row = next((setting for setting in self.cells if setting.label == row), None)
        return None if of_row is None or of_row.full.amount.label != column else self.cells.get(of_row.full)

    def relation(self, cell: Cell, shown: Shown, panel: str) -> Relation | None:
        own, of_full = figure_of(cell, shown.name, panel), figure_of(self.full, shown.name, panel)
        if cell is self.full or shown.compare is None or own is None or of_full is None:
            return None
        return shown.compare(own.examples, of_full.examples)

    def ways(self, panel: str) -> list[str]:
        """The properties that distinguish a panel's examples, such as depth."""
        found = (figure.by for cell in self.cells.values() for figure in cell.figures if figure.panel == panel)
        return [by for by in dict.fromkeys(found) if by]


def figure_of(cell: Cell | None, name: str, panel: str = "", by: str = "", at: str = "") -> Figure | None:
    wanted = (name, panel, by, at)
    figures = () if cell is None else cell.figures
    return next((one for one in figures if (one.name, one.panel, one.by, one.at) == wanted), None)


def tables(results: Sequence[Results]) -> Iterator[str]:
    """The lines of all tables."""
    for one in results:
        yield from (f"## {one.name}", "", *(f"{note}." for note in one.bound.notes), "")
        for panel in one.panels:
            for shown in one.shown:
                yield from _table(one, shown, panel)


def details(results: Sequence[Results]) -> Iterator[str]:
    """The same figures for examples of one kind, one length or one depth."""
    for one in results:
        for panel in one.panels:
            for by in one.ways(panel):
                yield from _by_kind(one, one.shown[0], panel, by)


def _title(shown: Shown, panel: str) -> str:
    better = "higher is better" if shown.higher_is_better else "lower is better"
    return f"{shown.title}{f', {panel}' if panel else ''} ({better})"


def _table(results: Results, shown: Shown, panel: str) -> Iterator[str]:
    values = {
        row: [_value(results, results.find(row, column), shown, panel) for column in results.columns] for row in results.rows
    }
    if all(value == MISSING for row in values.values() for value in row):
        return
    yield from (f"**{_title(shown, panel)}**", "")
    yield from _markdown(["policy", *results.columns], values)


def _value(results: Results, cell: Cell | None, shown: Shown, panel: str) -> str:
    figure = figure_of(cell, shown.name, panel)
    if figure is None or cell is None:
        return MISSING
    relation = results.relation(cell, shown, panel)
    behind = "" if relation is None else f" (x {relation.ratio:.4g})"
    return _with_error(figure.value, figure.error) + behind


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"


def _by_kind(results: Results, shown: Shown, panel: str, by: str) -> Iterator[str]:
    figures = [one for cell in results.cells.values() for one in cell.figures if (one.panel, one.by) == (panel, by)]
    kinds = list(dict.fromkeys(one.at for one in figures))
    values = {}
    for setting, cell in results.cells.items():
        found = [figure_of(cell, shown.name, panel, by, at) for at in kinds]
        values[f"{setting.label}, {setting.amount.label}"] = [
            MISSING if one is None else f"{one.value:.4g} ({one.count})" for one in found
        ]
    yield from (f"**{results.name}: {_title(shown, panel)}, by {by}; number of examples in brackets**", "")
    yield from _markdown([f"policy and {by}", *kinds], values)


def _markdown(heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for name, values in rows.items():
        yield f"| {' | '.join((name, *values))} |"
    yield ""
