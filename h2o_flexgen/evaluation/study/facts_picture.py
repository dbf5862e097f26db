"""A picture of which KV heads look at a fact while they answer, and in which of these heads a policy has evicted it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from h2o_flexgen.evaluation.study.facts_study import FactsStudy
from h2o_flexgen.evaluation.study.pictures import check_can_draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INCHES = 0.36  # of a head
LOST = 0.5  # a head that holds less of the fact has lost it
HELD_MARK, LOST_MARK = ("o", "#009e73"), ("x", "#d55e00")  # with colours for colour-blind eyes too


def draw_facts(study: FactsStudy, file: Path) -> None:
    """A panel for each policy, with the same map of attention."""
    check_can_draw()
    from matplotlib.figure import Figure  # the extra [plot]; without pyplot no display is asked for

    layers, heads = study.looked.shape
    size = (max(7.0, 2.2 + INCHES * layers), 1.4 + len(study.names) * (0.7 + INCHES * heads))
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(len(study.names), 1, sharex=True, squeeze=False).flat)
    for axes, name in zip(panels, study.names):
        image = axes.imshow(100 * study.looked.T, vmin=0, cmap="Blues", aspect="auto")
        axes.set_xticks(range(0, layers, 1 + layers // 40))
        axes.set_yticks(range(0, heads, 1 + heads // 40))
        axes.set_ylabel("KV head", fontsize="small")
        axes.set_title(_said(study, name), fontsize="small", loc="left")
        _mark(axes, study, name)
    panels[-1].set_xlabel("layer")
    marks = {label: mark for axes in panels for mark, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(marks.values(), marks.keys(), loc="outside lower center", ncols=1, fontsize="small")
    figure.suptitle(_title(study), fontsize="medium")
    figure.colorbar(image, ax=panels, label="% of the head's attention on the fact")
    figure.savefig(file, dpi=110)


def _title(study: FactsStudy) -> str:
    name = Path(study.model).name.removesuffix(".gguf")
    asked = f"at a budget of {100 * study.budget:g} %, question {study.asked.question}"
    return f"{name}: few KV heads look at the fact while they answer. Which still have it, {asked}?"


def _said(study: FactsStudy, name: str) -> str:
    kept = study.over_finders(study.held[name]) >= LOST
    return f"{name}: {kept.sum()} of the {len(kept)} heads that look most hold most of the fact"


def _mark(axes: Axes, study: FactsStudy, name: str) -> None:
    for is_held, (mark, colour), label in (
        (True, HELD_MARK, f"one of the {len(study.finders)} heads that look most: at least half of the fact is held"),
        (False, LOST_MARK, f"one of the {len(study.finders)} heads that look most: more than half of the fact was evicted"),
    ):
        places = [place for place in study.finders if bool(study.held[name][place] >= LOST) is is_held]
        if places:
            across, down = zip(*places)
            axes.plot(across, down, mark, color=colour, fillstyle="none", markersize=8, markeredgewidth=2, label=label)
