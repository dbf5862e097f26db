"""Statistics of a text: the attention that each token got, and what policies hold of it: how alike two of them choose, whether
they find the heaviest tokens, and how long a token stays.

A token is only seen by those after it, so the first ones hold most even if attention is spread evenly. Every figure of
accumulated scores is therefore shown beside this baseline (`even_scores`).

An evicted token never returns, so one number per token tells everything: how many tokens had been read when it was evicted. One
token comes and one goes at each step, so in the long run tokens stay, on average, for as many steps as there are slots,
whatever the policy. The spread differs: a window evicts all at one age; with heavy hitters most go early and some never.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
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


Gone = NDArray[np.int32]  # (layers, kv_heads, tokens): tokens read when this one was evicted
Held = NDArray[np.bool_]  # (layers, kv_heads, tokens)


def of_layers(gone: Sequence[torch.Tensor]) -> Gone:
    """The layers' tensors (kv_heads, tokens) in one array."""
    return np.asarray(torch.stack([*gone]).cpu().numpy(), dtype=np.int32)


def held_after(gone: Gone, read: int) -> NDArray[np.bool_]:
    """Marks the tokens that are held when `read` tokens have been read, in the same shape."""
    tokens = gone.shape[-1]
    return (gone > read) & (np.arange(tokens) < read)


def jaccard(one: Held, other: Held) -> Array:
    """The tokens that both hold over those that either holds, averaged over the heads of each layer. (layers,)"""
    either = (one | other).sum(-1)
    return np.asarray(((one & other).sum(-1) / np.maximum(either, 1)).mean(-1))


def heaviest_found(held: Held, scores: Array, count: int) -> Array:
    """The share held of the `count` tokens that got most attention in the whole text, averaged over the heads of each layer.
    scores (layers, kv_heads, tokens); result (layers,)

    Unlike the overlap, this ignores what else is held, such as the newest tokens, which had no time to get much attention."""
    heaviest = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    return np.asarray(np.take_along_axis(held, heaviest, -1).mean(-1).mean(-1))


def survival(gone: Gone, prompt_len: int) -> Array:
    """The share of tokens after the prompt that is still held at each age in tokens, over all layers and heads.
    (tokens after the prompt,)

    The text ends before all tokens are evicted, so each age counts only the tokens observed at that age (Kaplan and Meier): the
    share of them that stays, multiplied by the shares of all earlier ages."""
    tokens = gone.shape[-1]
    behind, place = gone[..., prompt_len:].reshape(-1, tokens - prompt_len), np.arange(prompt_len, tokens)
    ages = len(place)
    went = np.bincount((behind - 1 - place)[behind <= tokens], minlength=ages)
    seen_last = np.bincount((np.minimum(behind, tokens) - 1 - place).ravel(), minlength=ages)
    could_go = behind.size - (np.cumsum(seen_last) - seen_last)
    return np.asarray(np.cumprod(1.0 - went / np.maximum(could_go, 1)))


def still_held(gone: Gone, prompt_len: int, later: int) -> Array:
    """The share of the tokens held at one time that is also held `later` tokens afterwards. (layers,)"""
    tokens = gone.shape[-1]
    last = tokens - later  # the last time that can be compared with a later one
    first = np.maximum(prompt_len, np.arange(tokens) + 1)
    at_one_time = np.maximum(0, np.minimum(gone - 1, last) - first + 1).sum((1, 2))
    also_later = np.maximum(0, np.minimum(gone - 1 - later, last) - first + 1).sum((1, 2))
    return np.asarray(also_later / at_one_time)
