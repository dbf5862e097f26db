"""Shares: what each KV head has where the tokens of all heads and layers compete for one budget."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]  # (layers, kv_heads, tokens)
Shares = NDArray[np.float64]  # (layers, kv_heads)
FIRST = 4  # tokens that every head keeps, of the first
PART_OF_NEWEST = 10  # one in so many slots is for the newest tokens, in every head


def shares_at(budget: float, scores: Scores) -> Shares:
    """The share of the text that each head keeps if as much of all is kept as the budget says: the tokens of highest score. Of
    equal ones the earlier layer's, head's and token's is kept."""
    layers, heads, tokens = scores.shape
    slots = int(budget * tokens)
    ranks = scores.copy()
    ranks[..., : min(FIRST, slots // 2)] = np.inf
    ranks[..., tokens - slots // PART_OF_NEWEST :] = np.inf
    best = np.argsort(-ranks, axis=None, kind="stable")[: round(budget * scores.size)]
    kept = np.bincount(best // tokens, minlength=layers * heads)
    return np.asarray(kept.reshape(layers, heads) / tokens)
