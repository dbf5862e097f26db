"""Results of a grid, as tables in Markdown and as a picture. Tables have for each task a row per policy and a column per
budget; the picture has a panel for each figure, a line for each policy, and the full cache as a level.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h2o_flexgen.evaluation.cells import Cell, Figure, Relation
from h2o_flexgen.evaluation.grid import Setting
from h2o_flexgen.evaluation.tasks.task import Bound, Shown
from h2o_flexgen.policies.by_position import Full

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        found = [setting for setting in self.cells if setting.is_full]
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
    """The lines of all tables. After each value come its standard error and, in brackets, its ratio to the full cache."""
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


COLOURS = (  # for colour-blind eyes too
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933"),
    *("#882255", "#332288", "#44aa99", "#7f3f00"),
)
GREY = "#7f7f7f"
MARKS = "osD^vP*X<>ph"
DASHES = "-", "--", ":", "-."
NARROW, WIDE = 1.3, 3.9  # points: of the last line, and of the first
SMALL, LARGE = 5.0, 9.0  # of their marks
ASIDE = 0.28  # of the distance between two amounts, over which the points of one are spread
COLUMNS = 3  # panels side by side
PANEL_INCHES = (5.2, 3.9)
SHARE_TOP = 1.05  # so that a line at 1 is seen whole
SPREAD = 20  # the largest value over the smallest from which the axis is logarithmic


@dataclass(frozen=True)
class Panel:
    title: str
    amounts: tuple[str, ...]
    full: float | None  # the value of the full cache
    lines: Mapping[str, Sequence[tuple[int, float, float]]]  # by policy: the place of an amount, the value, its error
    is_share: bool


def panels_of(results: Sequence[Results]) -> list[Panel]:
    return [_panel(one, shown, panel) for one in results for panel in one.panels for shown in one.shown]


def _panel(results: Results, shown: Shown, panel: str) -> Panel:
    full, amounts = figure_of(results.full, shown.name, panel), tuple(results.columns)
    lines = {}
    for row in (row for row in results.rows if row != Full.name):
        found = [figure_of(results.find(row, amount), shown.name, panel) for amount in amounts]
        lines[row] = [(place, one.value, one.error or 0.0) for place, one in enumerate(found) if one is not None]
    title = panel_title(results.name, shown, panel)
    return Panel(title, amounts, None if full is None else full.value, lines, shown.is_share)


def style(number: int, count: int) -> dict[str, Any]:
    """How matplotlib draws one of so many lines: no two are alike, and none hides one that was drawn before."""
    behind = (count - 1 - number) / max(1, count - 1)
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number // len(COLOURS) % len(DASHES)],
        "marker": MARKS[number % len(MARKS)],
        "linewidth": NARROW + behind * (WIDE - NARROW),
        "markersize": SMALL + behind * (LARGE - SMALL),
        "markerfacecolor": "white",
    }


def draw_quality(panels: Sequence[Panel], file: Path, title: str) -> None:
    from matplotlib.figure import Figure  # the extra [plot]; without pyplot no display is asked for

    across = min(COLUMNS, len(panels))
    down = ceil(len(panels) / across)
    figure = Figure(figsize=(PANEL_INCHES[0] * across, PANEL_INCHES[1] * down + 0.7), layout="constrained")
    places = list(figure.subplots(down, across, squeeze=False).flat)
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    for axes, panel in zip(places, panels):
        _draw(axes, panel, names)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    handles = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(8, len(handles)), fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(file, dpi=130)


def _draw(axes: Axes, panel: Panel, names: Sequence[str]) -> None:
    if panel.full is not None:
        axes.axhline(panel.full, color=GREY, linestyle="--", linewidth=1.2, label=Full.name)
    for name, points in panel.lines.items():
        number, count = names.index(name), len(names)
        aside = ASIDE * (number / max(1, count - 1) - 0.5)
        axes.errorbar(
            [place + aside for place, _, _ in points],
            [value for _, value, _ in points],
            yerr=[error for _, _, error in points],
            capsize=2,
            elinewidth=NARROW,
            label=name,
            **style(number, count),
        )
    axes.set_xticks(range(len(panel.amounts)), panel.amounts)
    _scale(axes, panel.is_share, list(_values(panel)))
    axes.set_title(panel.title, fontsize="small", loc="left", wrap=True)
    axes.set_xlabel("kept", fontsize="small")
    axes.grid(visible=True, alpha=0.25)


def _values(panel: Panel) -> Iterator[float]:
    yield from () if panel.full is None else (panel.full,)
    yield from (value for points in panel.lines.values() for _, value, _ in points)


def panel_title(task: str, shown: Shown, panel: str) -> str:
    """The task's name comes first, unless the figure's title begins with it."""
    title = shown.title if shown.title.startswith(task) else f"{task}: {shown.title}"
    return f"{title}, {panel}" if panel else title


def _scale(axes: Axes, is_share: bool, values: Sequence[float]) -> None:
    """Axes start at 0, so that distances show differences; a share goes to 1. Values that lie far apart are drawn on a
    logarithmic axis, with its numbers written out."""
    if not is_share and min(values, default=0) > 0 and max(values) > SPREAD * min(values):
        from matplotlib.ticker import FuncFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    elif min(values, default=0) >= 0:
        axes.set_ylim(bottom=0, top=SHARE_TOP if is_share else None)
