"""Throughput against rows, and latency against throughput, of every system that was compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.comparison.point import Point
from benchmarks.comparison.report import Report

COLOURS = 10  # of matplotlib's cycle: from there on lines differ
LINES = ("-", "--", ":")


def draw(report: Report, path: Path) -> None:
    from matplotlib.figure import Figure  # the extra [plot]; without pyplot no display is asked for
    from matplotlib.ticker import FuncFormatter, LogFormatter

    figure = Figure(figsize=(14, 5), layout="constrained")
    figure.suptitle(report.title)
    by_rows, by_throughput = figure.subplots(1, 2)
    for number, entry in enumerate(report.entries):
        points = sorted(entry.points, key=lambda point: point.rows)
        style = {"marker": "o", "label": entry.name, "linestyle": LINES[number // COLOURS % len(LINES)]}
        by_rows.plot([point.rows for point in points], _throughputs(points), **style)
        by_throughput.plot(_throughputs(points), [point.seconds for point in points], **style)
    by_rows.set(xscale="log", yscale="log", xlabel="rows", ylabel="tokens/s")
    by_throughput.set(xscale="log", yscale="log", xlabel="tokens/s", ylabel="seconds until the last token")
    handles, names = by_rows.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize="small")  # beside the lines and not on them
    for axis in (by_rows.xaxis, by_rows.yaxis, by_throughput.xaxis, by_throughput.yaxis):
        axis.set_major_formatter(FuncFormatter(_plain))
        axis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.4)))
    for axes in (by_rows, by_throughput):
        axes.grid(visible=True, which="both", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _plain(value: float, _: int | None) -> str:
    """Not as a power of ten."""
    return f"{value:g}"


def _throughputs(points: Sequence[Point]) -> list[float]:
    return [point.tokens_per_s for point in points]
