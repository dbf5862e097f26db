"""A picture of what a search has found: how soon a block is over against how many tokens come per second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h2o_flexgen.planning.search import Candidate, Found

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREY, BLUE, RED = "#7f7f7f", "#0072b2", "#d55e00"  # told apart by colour-blind eyes too
LABEL = (0.08, 0.06)  # the room that a label takes, of the picture's width and height
SPREAD = 8  # from so many times as long on, seconds are on a logarithmic axis


def draw_front(found: Found, file: Path, title: str) -> None:
    from matplotlib.figure import Figure  # the extra [plot]; without pyplot no display is asked for

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    everything = list({one.plan: one for one in (*found.all, *found.front)}.values())
    _points(axes, everything, marker="o", s=28, color=GREY, label="simulated", zorder=2)
    seconds, rates = _coordinates(found.front)
    axes.plot(seconds, rates, "-o", color=BLUE, markersize=6, label="nothing is both sooner and faster", zorder=3)
    _points(axes, [found.best], marker="*", s=260, color=RED, edgecolors="white", label="chosen", zorder=4)
    axes.set(xlabel="latency: seconds until a block is over", ylabel="tokens per second")
    axes.set_title(title, fontsize="small", loc="left", wrap=True)
    for scale, values in ((axes.set_xscale, [one.block_seconds for one in everything]), (axes.set_yscale, rates)):
        if max(values) > SPREAD * min(values):
            scale("log")
    axes.margins(0.12)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.autoscale_view()
    _label(axes, [found.best, *found.front, *everything])
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(file, dpi=130)


def _coordinates(candidates: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    return [one.block_seconds for one in candidates], [one.tokens_per_second for one in candidates]


def _points(axes: Axes, candidates: list[Candidate], **style: Any) -> None:
    axes.scatter(*_coordinates(candidates), **style)


def _label(axes: Axes, candidates: list[Candidate]) -> None:
    """Rows x batches, where there is room for it: to the upper left, where the front, which rises, does not pass."""
    taken: list[tuple[float, float]] = []
    for one in candidates:
        at = (one.block_seconds, one.tokens_per_second)
        across, up = axes.transAxes.inverted().transform(axes.transData.transform(at))
        if any(abs(across - other) < LABEL[0] and abs(up - height) < LABEL[1] for other, height in taken):
            continue
        taken.append((across, up))
        text = f"{one.plan.gpu_batch_size} x {one.plan.num_gpu_batches}"
        axes.annotate(text, at, xytext=(-7, 6), textcoords="offset points", ha="right", fontsize="small")
