"""Pictures of a study: kept tokens, accumulated scores, sparsity, overlap with the oracle, and how long tokens stay; and
which KV heads look at a noted fact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from h2o_flexgen.evaluation.study.facts import FactsStudy
from h2o_flexgen.evaluation.study.heavy_hitters import HeavyHitterStudy
from h2o_flexgen.evaluation.study.readers import ORACLE, Array, Gone, even_scores, held_after, sorted_scores

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAP_ROWS = 512  # rows of a heat map; more steps than these cannot be distinguished
COLUMNS = 3
GREY = "#7f7f7f"
# colour-blind eyes can tell them apart too; usually one more than there are policies in a study
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#b8a800")
ENDING = ".png"


def check_can_draw() -> None:
    """Refuses before the work, not after it."""
    if find_spec("matplotlib") is None:
        raise ValueError(
            "pictures of a study need matplotlib; install it, or the extra [plot] from a checkout: pip install -e '.[plot]'"
        )


def draw(study: HeavyHitterStudy, folder: Path, layer: int | None = None) -> tuple[Path, ...]:
    """Writes every picture into the folder and returns the files. The heat map is of `layer`, or else of the middle one."""
    check_can_draw()
    layers = len(study.sparsity)
    layer = layers // 2 if layer is None else layer
    if not 0 <= layer < layers:
        raise ValueError(f"layer {layer} is not in {study.model}; it has 0 to {layers - 1}")
    folder.mkdir(parents=True, exist_ok=True)
    pictures: Mapping[str, Callable[[], Figure]] = {
        "who-is-kept": lambda: _who_is_kept(study, layer),
        "accumulated-scores": lambda: _accumulated_scores(study),
        "sparsity": lambda: _sparsity(study),
        "overlap": lambda: _overlap(study),
        "persistence": lambda: _persistence(study),
    }
    files = []
    for name, make in pictures.items():
        files.append(folder / f"{name}{ENDING}")
        make().savefig(files[-1], dpi=130)
    return tuple(files)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # the extra [plot]; without pyplot no display is asked for

    return Figure(figsize=(width, height), layout="constrained")


def _text(study: HeavyHitterStudy) -> str:
    return f"{Path(study.model).name}, {study.tokens} tokens, budget {100 * study.budget:g} % ({study.slots} slots)"


# -- kept tokens -----------------------------------------------------------------------------------------------------------


def _who_is_kept(study: HeavyHitterStudy, layer: int) -> Figure:
    rows = -(-len(study.names) // COLUMNS)
    figure = _figure(4.2 * COLUMNS, 3.6 * rows)
    panels = list(figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).flat)
    steps = np.unique(np.linspace(study.prompt_len, study.tokens, MAP_ROWS).astype(int))
    for axes, name in zip(panels, study.names):
        extent = (0, study.tokens, study.tokens, study.prompt_len)
        image = axes.imshow(
            kept_map(study.gone[name][layer], steps), aspect="auto", extent=extent, cmap="viridis", vmin=0, vmax=1
        )
        axes.set_title(name, fontsize="medium")
    for axes in panels[max(0, len(study.names) - COLUMNS) : len(study.names)]:
        axes.tick_params(labelbottom=True)  # the lowest panel of its column
    for axes in panels[len(study.names) :]:
        axes.axis("off")
    figure.supxlabel("position in the text")
    figure.supylabel("tokens read")
    figure.suptitle(f"tokens kept in layer {layer}: {_text(study)}", fontsize="medium")
    figure.colorbar(image, ax=panels, label="share of KV heads that hold the token", shrink=0.8)
    return figure


def kept_map(gone: Gone, steps: NDArray[np.int64]) -> Array:
    """The share of heads that hold each token after each number of tokens read; NaN for tokens to come.
    gone (kv_heads, tokens); result (steps, tokens)"""
    held = np.stack([held_after(gone, read).mean(0) for read in steps])
    return np.where(np.arange(gone.shape[-1]) < steps[:, None], held, np.nan)


# -- curves ----------------------------------------------------------------------------------------------------------------


def _accumulated_scores(study: HeavyHitterStudy) -> Figure:
    from matplotlib import colormaps

    figure = _figure(8, 5)
    axes = figure.subplots()
    layers, ranks = len(study.scores), np.arange(1, study.tokens + 1)
    curves, even = study.sorted_scores.mean(1), sorted_scores(even_scores(study.tokens))
    for layer, (curve, laws) in enumerate(zip(curves, study.laws)):
        exponent = np.mean([law.exponent for law in laws])
        shown = f"layer {layer}, exponent {exponent:.2f}" if layer in _labelled(layers) else None
        axes.loglog(ranks, curve / curve.sum(), color=colormaps["viridis"](layer / max(1, layers - 1)), lw=1.2, label=shown)
    axes.loglog(ranks, even / even.sum(), "--", color=GREY, lw=1.5, label="even attention")
    floor = min(curves[curves > 0].min() / curves[0].sum(), even.min() / even.sum())
    axes.set_ylim(bottom=max(floor, 1e-8))
    axes.set(xlabel="rank of the token", ylabel="share of all attention, mean of the heads")
    return _finished(figure, axes, f"accumulated scores: {Path(study.model).name}, {study.tokens} tokens")


def _labelled(layers: int, most: int = 8) -> set[int]:
    return {round(layer) for layer in np.linspace(0, layers - 1, min(layers, most))}


def _sparsity(study: HeavyHitterStudy) -> Figure:
    figure = _figure(8, 4.5)
    axes = figure.subplots()
    layers, shares = np.arange(len(study.sparsity)), 100 * study.sparsity
    axes.fill_between(layers, shares.min(1), shares.max(1), color=COLOURS[1], alpha=0.2, label="from head to head")
    axes.plot(layers, shares.mean(1), "-o", color=COLOURS[1], label="mean of the heads")
    axes.set(xlabel="layer", ylabel="% of entries below 1 % of their row's largest", ylim=(0, 100))
    axes.set_xticks([layer for layer in layers if layer in _labelled(len(layers), 16)])
    return _finished(figure, axes, f"sparsity of attention: {Path(study.model).name}, {study.tokens} tokens")


def _overlap(study: HeavyHitterStudy) -> Figure:
    figure = _figure(12, 4.5)
    alike, found = figure.subplots(1, 2)
    layers = np.arange(len(study.sparsity))
    for name, colour in zip(study.names, cycle(COLOURS)):
        if name != ORACLE:
            alike.plot(layers, study.overlap[name, ORACLE], "-o", ms=4, color=colour, label=name)
        found.plot(layers, 100 * study.captured[name].mean(-1), "-o", ms=4, color=colour, label=name)
    alike.set(xlabel="layer", ylabel="overlap with the oracle at the end (Jaccard)", ylim=(0, 1))
    found.set(xlabel="layer", ylabel="% of the full cache's attention that is held", ylim=(0, 100))
    for axes in (alike, found):
        axes.set_xticks([layer for layer in layers if layer in _labelled(len(layers), 16)])
        _finished(figure, axes, "")
    figure.suptitle(f"kept sets: {_text(study)}", fontsize="medium")
    return figure


def _persistence(study: HeavyHitterStudy) -> Figure:
    figure = _figure(8, 5)
    axes = figure.subplots()
    for name, colour in zip(study.names, cycle(COLOURS)):
        axes.plot(100 * study.survival[name], color=colour, lw=1.4, label=name)
    axes.axvline(study.slots, color=GREY, ls=":", lw=1)
    axes.set(xlabel="tokens that came later", ylabel="% of the tokens after the prompt that are still held", ylim=(0, 101))
    return _finished(figure, axes, f"how long a token stays: {_text(study)}")


def _finished(figure: Figure, axes: Axes, title: str) -> Figure:
    axes.set_title(title, fontsize="medium", loc="left", wrap=True)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize="small")
    return figure


INCHES = 0.36  # of a head
LOST = 0.5  # a head that holds less of the fact has lost it
HELD_MARK, LOST_MARK = ("o", "#009e73"), ("x", "#d55e00")  # with colours for colour-blind eyes too


def draw_facts(study: FactsStudy, file: Path) -> None:
    """Shows which KV heads look at a fact while they answer, and in which of these a policy has evicted it: a panel for each
    policy, with the same map of attention."""
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
