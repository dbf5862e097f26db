"""A picture of quality against the amount kept: a panel for each figure, a line for each policy, the full cache as a level."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from h2o_flexgen.evaluation.table import Results, figure_of
from h2o_flexgen.evaluation.tasks.task import Shown
from h2o_flexgen.policies.full import Full

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")  # for colour-blind eyes too
GREY = "#7f7f7f"
MARKS = "osD^vP*X"
COLUMNS = 3  # panels side by side
PANEL_INCHES = (5.2, 3.9)
SHARE_TOP = 1.05  # so that a line at 1 is seen whole
SPREAD = 20  # the largest value over the smallest from which the axis is logarithmic


def draw_quality(results: Sequence[Results], file: Path, title: str) -> None:
    from matplotlib.figure import Figure  # the extra [plot]; without pyplot no display is asked for

    panels = [(one, shown, panel) for one in results for panel in one.panels for shown in one.shown]
    across = min(COLUMNS, len(panels))
    down = ceil(len(panels) / across)
    figure = Figure(figsize=(PANEL_INCHES[0] * across, PANEL_INCHES[1] * down + 0.7), layout="constrained")
    places = list(figure.subplots(down, across, squeeze=False).flat)
    for axes, (one, shown, panel) in zip(places, panels):
        _draw(axes, one, shown, panel)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    handles = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(8, len(handles)), fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(file, dpi=130)


def _draw(axes: Axes, results: Results, shown: Shown, panel: str) -> None:
    places = {label: place for place, label in enumerate(results.columns)}
    full = figure_of(results.full, shown.name, panel)
    if full is not None:
        axes.axhline(full.value, color=GREY, linestyle="--", linewidth=1.2, label=Full.name)
    values = [] if full is None else [full.value]
    for row, colour, mark in zip((row for row in results.rows if row != Full.name), cycle(COLOURS), cycle(MARKS)):
        figures = [(place, figure_of(results.find(row, label), shown.name, panel)) for label, place in places.items()]
        points = [(place, found) for place, found in figures if found is not None]
        values += [found.value for _, found in points]
        axes.errorbar(
            [place for place, _ in points],
            [found.value for _, found in points],
            yerr=[found.error or 0.0 for _, found in points],
            color=colour,
            marker=mark,
            markersize=5,
            linewidth=1.4,
            capsize=2,
            label=row,
        )
    axes.set_xticks(list(places.values()), list(places))
    _scale(axes, shown, values)
    axes.set_title(panel_title(results.name, shown, panel), fontsize="small", loc="left", wrap=True)
    axes.set_xlabel("kept", fontsize="small")
    axes.grid(visible=True, alpha=0.25)


def panel_title(task: str, shown: Shown, panel: str) -> str:
    """The task's name comes first, unless the figure's title begins with it."""
    title = shown.title if shown.title.startswith(task) else f"{task}: {shown.title}"
    return f"{title}, {panel}" if panel else title


def _scale(axes: Axes, shown: Shown, values: Sequence[float]) -> None:
    """Axes start at 0, so that a distance on paper is a difference; a share goes to 1. Values that lie far apart are drawn on a
    logarithmic axis, with its numbers written out."""
    if not shown.is_share and min(values, default=0) > 0 and max(values) > SPREAD * min(values):
        from matplotlib.ticker import FuncFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    elif min(values, default=0) >= 0:
        axes.set_ylim(bottom=0, top=SHARE_TOP if shown.is_share else None)
