"""Overlap: how alike two policies choose: tokens that both hold over tokens that either holds (Jaccard), at the text's end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from h2o_flexgen.evaluation.study.scores import Array

Held = NDArray[np.bool_]  # (layers, kv_heads, tokens)


def jaccard(one: Held, other: Held) -> Array:
    """The overlap, averaged over the heads of each layer. (layers,)"""
    either = (one | other).sum(-1)
    return np.asarray(((one & other).sum(-1) / np.maximum(either, 1)).mean(-1))


def heaviest_found(held: Held, scores: Array, count: int) -> Array:
    """The share held of the `count` tokens that got most attention in the whole text, averaged over the heads of each layer.
    scores (layers, kv_heads, tokens); result (layers,)

    Unlike the overlap, this ignores what else is held, such as the newest tokens, which had no time to get much attention."""
    heaviest = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    return np.asarray(np.take_along_axis(held, heaviest, -1).mean(-1).mean(-1))
