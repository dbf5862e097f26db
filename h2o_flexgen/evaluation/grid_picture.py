"""A picture of quality against the amount kept: a panel for each figure, a line for each policy, the full cache as a level.

Lines that lie on each other are all seen: the first are the widest, with the largest marks, and points of one amount stand a
little beside each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h2o_flexgen.evaluation.result_table import Results, figure_of
from h2o_flexgen.evaluation.tasks.task import Shown
from h2o_flexgen.policies.full import Full

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
