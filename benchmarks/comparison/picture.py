"""Throughput against rows, and latency against throughput, of every system that was compared.

python -m benchmarks.comparison.picture benchmarks/results/compare-....json docs/pictures      # draws what was found again
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.comparison.report import Report
from h2o_flexgen.evaluation.results import style


@dataclass(frozen=True)
class Line:
    """A system: rows, tokens per second, and seconds until the last token."""

    name: str
    points: Sequence[tuple[int, float, float]]


def lines_of(report: Report) -> list[Line]:
    return [
        Line(entry.name, sorted((point.rows, point.tokens_per_s, point.seconds) for point in entry.points))
        for entry in report.entries
    ]


def lines_in(document: Mapping[str, Any]) -> list[Line]:
    """The same of a report's JSON document."""
    return [
        Line(
            row["name"],
            sorted((one["rows"], one["tokens_per_s"], one["prefill_seconds"] + one["decode_seconds"]) for one in row["points"]),
        )
        for row in document["rows"]
    ]


def draw(title: str, lines: Sequence[Line], path: Path) -> None:
    from matplotlib.figure import Figure  # the extra [plot]; without pyplot no display is asked for
    from matplotlib.ticker import FuncFormatter, LogFormatter

    figure = Figure(figsize=(14, 5), layout="constrained")
    figure.suptitle(title)
    by_rows, by_throughput = figure.subplots(1, 2)
    for number, line in enumerate(lines):
        rows, throughputs, seconds = zip(*line.points)
        looks = {"label": line.name, **style(number, len(lines))}
        by_rows.plot(rows, throughputs, **looks)
        by_throughput.plot(throughputs, seconds, **looks)
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


if __name__ == "__main__":
    file, folder = map(Path, sys.argv[1:])
    found = json.loads(file.read_text(encoding="utf-8"))
    draw(found["title"], lines_in(found), folder / f"{file.stem}.png")
