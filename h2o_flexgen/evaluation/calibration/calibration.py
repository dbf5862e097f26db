"""Calibration: texts are read twice, and what each head then keeps of them at several budgets makes head budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from h2o_flexgen.core.tiers import DEVICE, HOST
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.evaluation.calibration.probe_fit import ProbeFit, sums_bytes
from h2o_flexgen.evaluation.calibration.repeated import LayerRead, RepeatedText
from h2o_flexgen.evaluation.calibration.shares import Scores, Shares, shares_at
from h2o_flexgen.evaluation.study.text_reading import OnLayer, read_texts
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.positions import of_windows
from h2o_flexgen.policies.head_budgets import HeadBudgets

BUDGETS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7)
FEWEST_TOKENS = 16
DIGITS = 3  # of a share


@dataclass(frozen=True, eq=False)
class Calibration:
    """What each head keeps of each text."""

    model: str
    source: str
    shares: Mapping[float, tuple[Shares, ...]]  # of every text, at each budget

    @property
    def head_budgets(self) -> HeadBudgets:
        """The means over all texts, rounded: another text would have others anyway."""
        means = (np.mean(of_texts, axis=0).round(DIGITS).tolist() for of_texts in self.shares.values())
        return HeadBudgets(self.model, self.source, tuple(self.shares), tuple(tuple(map(tuple, one)) for one in means))

    def spread(self, budget: float) -> float | None:
        """How much a head's share differs from text to text: its standard deviation, averaged over heads. One text has none."""
        of_texts = self.shares[budget]
        return float(np.std(of_texts, axis=0, ddof=1).mean()) if len(of_texts) > 1 else None


@torch.inference_mode()
def calibrate(
    llm: LLM,
    texts: Sequence[Sequence[int]],
    source: str,
    on_layer: OnLayer | None = None,
    fit: ProbeFit | None = None,
) -> Calibration:
    """Reads all texts layer by layer, so that weights are read once, and one layer's at a time lie in memory. `on_layer` is
    called with the number of layers done and the number of all; `fit` is given what is read."""
    _check(llm, texts, 0 if fit is None else sums_bytes(llm.spec))
    seen: list[list[Scores]] = [[] for _ in texts]
    readers = [RepeatedText(ids, partial(_note, scores, fit)) for ids, scores in zip(texts, seen)]
    read_texts(llm, [reader.reading for reader in readers], on_layer)
    by_text = [np.stack(layers) for layers in seen]
    shares = {budget: tuple(shares_at(budget, scores) for scores in by_text) for budget in BUDGETS}
    return Calibration(_name(llm.name), source, shares)


def _note(scores: list[Scores], fit: ProbeFit | None, read: LayerRead) -> None:
    if fit is not None:
        fit.note(read)
    scores.append(np.asarray(read.scores.cpu().numpy()))


def _name(model: str) -> str:
    """The model's name, without the folder that it lies in here."""
    place = Path(model).expanduser()
    return place.name.removesuffix(".gguf") if place.exists() else model


def _check(llm: LLM, texts: Sequence[Sequence[int]], beside: int) -> None:
    spec, longest = llm.spec, max(map(len, texts))
    if min(map(len, texts)) < FEWEST_TOKENS:
        raise ValueError(f"a text has {min(map(len, texts))} tokens; give {FEWEST_TOKENS} or more")
    if 2 * longest > spec.seen_positions:
        there = f"{spec.name} has {spec.seen_positions} positions{of_windows(spec)}"
        most = spec.seen_positions // 2
        raise ValueError(f"texts of {longest} tokens are read twice, and {there}; give {most} tokens or fewer")
    tier = DEVICE if llm.device.accelerator else HOST
    limit = llm.limits.of(tier)
    hidden = sum(2 * len(ids) * spec.width * spec.itemsize for ids in texts)
    needed = max(layer.nbytes for layer in spec.layers) + hidden + beside
    if limit is not None and needed > limit:
        held = f"the largest layer of {spec.name} and what goes through it take {format_bytes(needed)}"
        raise ValueError(f"{held}, and {format_bytes(limit)} may be held; give more memory, or fewer or shorter texts")
