"""The work of the calibrate command: has the model read texts twice, writes its head budgets, and tells of them, in lines and
in a picture of what each KV head keeps of a text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from h2o_flexgen.calibration.calibration import FOUND, Calibration, ProbeFit, calibrate
from h2o_flexgen.checkpoints.derived import HEAD_BUDGETS, kept_file
from h2o_flexgen.checkpoints.probe_file import write_probe
from h2o_flexgen.cli.calibrate_request import CalibrateRequest
from h2o_flexgen.cli.output_files import OUTPUT
from h2o_flexgen.cli.terminal import page_width, say, say_document, table
from h2o_flexgen.cli.watch import open_llm
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.by_judge import KVzap
from h2o_flexgen.policies.head_budgets import ByHead, HeadBudgets, write_head_budgets
from h2o_flexgen.policies.kv_options import DEFAULT_KEPT
from h2o_flexgen.session.measured_heads import kept_reading
from h2o_flexgen.session.open_request import ModelRequest
from h2o_flexgen.text.given_texts import described, windows
from h2o_flexgen.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEARLY_ALL, LITTLE = 0.9, 0.5  # of a text; of the budget
HEAD = ("budget", f"heads that keep {100 * NEARLY_ALL:g} % and more", f"less than {LITTLE:g} of the budget", "spread")


def work(request: CalibrateRequest) -> None:
    begun = time.perf_counter()
    output = _kept(request.model) if request.keeps else request.output
    found, fit = _calibration(request)
    budgets = found.head_budgets
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_head_budgets(budgets, output)
    if request.picture is not None:
        draw_heads(budgets, DEFAULT_KEPT, request.picture)
    say(_lines(found, budgets, output, request.keeps))
    document = {
        **budgets.as_json(),
        "layers": budgets.shape[0],
        "kv_heads": budgets.shape[1],
        "blocks": budgets.blocks,
        "budgets": list(budgets.budgets),
        "spread": [found.spread(budget) for budget in budgets.budgets],
        "output": output and str(output),
        "probe": fit and request.probe and _probe_written(fit, budgets, request.probe),
        "seconds": round(time.perf_counter() - begun, 3),
    }
    say_document(document)


def _kept(model: ModelRequest) -> Path:
    """The place where every run of the model that evicts finds its head budgets. Random weights need none."""
    if model.adapter:
        raise ValueError(f"what heads need with --adapter is not kept for {model.name}; give {OUTPUT} FILE")
    place = None if model.dummy_weights else kept_file(model.source, HEAD_BUDGETS)
    if place is None:
        raise ValueError(f"{model.name} has no weights here that would identify it, so nothing is kept; give {OUTPUT} FILE")
    return place


def _probe_written(fit: ProbeFit, budgets: HeadBudgets, file: Path) -> dict[str, object]:
    """Writes the probe and tells of it."""
    probe, found = fit.probe(budgets.model, budgets.source), fmean(fit.found) if fit.found else None
    write_probe(probe, file)
    best = f"of the {100 * FOUND:g} % of a text that count most"
    known = "" if found is None else f"; {best}, other texts foretold {100 * found:.3g} %"
    say([f"probe written to {file}{known}", f"--kv-policy {KVzap.name} --probe {file} ranks tokens by it"])
    return {**probe.as_json(), "file": str(file), "found": found}


def _calibration(request: CalibrateRequest) -> tuple[Calibration, ProbeFit | None]:
    name = request.model.name
    with open_llm(request.model, request.site, Plan()) as llm, Progress(0, f"calibrating {name}", late=True) as progress:

        def on_layer(done: int, layers: int) -> None:
            progress.expect(layers)
            progress.update("layers", done)

        ids = _pieces(request, llm.tokenizer)
        fit = None if request.probe is None else ProbeFit(len(ids))
        kept = kept_reading(request.model.source, ids, llm.spec.dtype) if fit is None and _has_own_weights(request) else None
        read = described(request.texts, len(ids), request.tokens)
        found = calibrate(llm.loaded.reading, ids, read, on_layer, fit, kept)
        if kept is not None:
            kept.remove()
        return found, fit


def _has_own_weights(request: CalibrateRequest) -> bool:
    return not request.model.dummy_weights and not request.model.adapter


def _pieces(request: CalibrateRequest, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Equally many pieces of each file, or all that a short one has; the first ones give what is left over."""
    each, over = divmod(request.number, len(request.texts))
    counts = [each + (place < over) for place in range(len(request.texts))]
    taken = (windows([text], tokenizer, request.tokens, count, "--tokens") for text, count in zip(request.texts, counts))
    return [ids for of_text in taken for ids in of_text.ids]


def _lines(found: Calibration, budgets: HeadBudgets, output: Path | None, is_kept: bool) -> Iterator[str]:
    layers, heads = budgets.shape
    yield f"head budgets of {budgets.model}, {layers} layers of {heads} KV heads, measured on {budgets.source}"
    yield from table([HEAD, *_rows(found, budgets)], page_width())
    yield "spread: how much a head's share differs from text to text, in % of the text (standard deviation, mean of all heads)"
    if is_kept:
        yield f"kept in {output}; runs of this model that evict take it by themselves"
    elif output is not None:
        yield f"written to {output}; --head-budgets {output} has heads share out a --kv-budget so"


def _rows(found: Calibration, budgets: HeadBudgets) -> Iterator[list[str]]:
    for budget, by_head in zip(budgets.budgets, budgets.shares):
        shares = [*chain.from_iterable(by_head)]
        most, little = (sum(share >= NEARLY_ALL for share in shares), sum(share < LITTLE * budget for share in shares))
        spread = found.spread(budget)
        yield [f"{100 * budget:g} %", str(most), str(little), "-" if spread is None else f"{100 * spread:.2g}"]


# -- the picture -----------------------------------------------------------------------------------------------------------

INCHES = 0.42  # of a head
MOST_WRITTEN = 400  # heads; the numbers of more could not be read
DARK = 0.6  # share from which a number is written in white


def draw_heads(budgets: HeadBudgets, budget: float, file: Path) -> None:
    """Draws what each KV head keeps where all together keep this share."""
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
