"""A picture of head budgets: what each KV head keeps of a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from h2o_flexgen.policies.head_budgets import ByHead, HeadBudgets

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INCHES = 0.42  # of a head
MOST_WRITTEN = 400  # heads; the numbers of more could not be read
DARK = 0.6  # share from which a number is written in white


def draw_heads(budgets: HeadBudgets, budget: float, file: Path) -> None:
    from matplotlib.figure import Figure  # the extra [plot]; without pyplot no display is asked for

    layers, heads = budgets.shape
    by_head = budgets.at(budget)
    figure = Figure(figsize=(2.5 + INCHES * layers, 1.6 + INCHES * heads), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(100 * np.array(by_head).T, vmin=0, vmax=100, cmap="Blues", aspect="auto")
    axes.set(xlabel="layer", ylabel="KV head")
    blocks = budgets.blocks or range(layers)
    axes.set_xticks(_ticks(layers), [str(blocks[layer]) for layer in _ticks(layers)])
    axes.set_yticks(_ticks(heads))
    if layers * heads <= MOST_WRITTEN:
        _write(axes, by_head)
    axes.set_title(f"{budgets.model}: what each KV head keeps of a text where all together keep {100 * budget:g} %", loc="left")
    figure.colorbar(image, ax=axes, label="% of the tokens")
    figure.savefig(file, dpi=110)


def _ticks(count: int) -> list[int]:
    return list(range(0, count, 1 + count // 40))


def _write(axes: Axes, by_head: ByHead) -> None:
    for layer, of_layer in enumerate(by_head):
        for head, share in enumerate(of_layer):
            colour = "white" if share > DARK else "black"
            axes.text(layer, head, f"{100 * share:.0f}", ha="center", va="center", fontsize="x-small", color=colour)
