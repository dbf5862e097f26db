"""Accumulated scores: the attention each token got from all queries, sorted. The paper finds a power law: few tokens hold most.

A token is only seen by those after it, so the first ones hold most even if attention is spread evenly. Every figure is
therefore shown beside this baseline (`even_scores`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class PowerLaw:
    """score = scale * rank ** -exponent, with ranks from 1."""

    exponent: float
    scale: float
    r_squared: float


def sorted_scores(scores: Array) -> Array:
    """The scores (..., tokens), heaviest first."""
    return -np.sort(-scores, axis=-1)


def fit_power_law(heaviest_first: Array) -> PowerLaw:
    """A least-squares line through the logarithms of ranks and scores. Tokens without any score are left out."""
    got = heaviest_first[heaviest_first > 0]
    if len(got) < 3:
        raise ValueError(f"{len(got)} tokens got any attention, and a power law needs 3; give a longer text")
    rank, score = np.log(np.arange(1, len(got) + 1)), np.log(got)
    slope, start = np.polyfit(rank, score, 1)
    spread = float(((score - score.mean()) ** 2).sum())
    missed = float(((score - start - slope * rank) ** 2).sum())
    return PowerLaw(-float(slope), float(np.exp(start)), 1.0 - missed / spread if spread else 1.0)


def share_of_heaviest(heaviest_first: Array, part: float) -> Array:
    """The share of all attention that the heaviest tokens hold: `part` of the tokens, but at least one. (...,)"""
    count = max(1, round(part * heaviest_first.shape[-1]))
    return np.asarray(heaviest_first[..., :count].sum(-1) / heaviest_first.sum(-1))


def even_scores(tokens: int) -> Array:
    """The accumulated scores if every query attended equally to every key that it sees."""
    return np.cumsum(1.0 / np.arange(tokens, 0, -1))[::-1]
