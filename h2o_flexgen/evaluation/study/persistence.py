"""Persistence: how long a kept token stays.

One token comes and one goes at each step, so in the long run tokens stay, on average, for as many steps as there are slots,
whatever the policy. The spread differs: a window evicts all at one age; with heavy hitters most go early and some never.
"""

from __future__ import annotations

import numpy as np

from h2o_flexgen.evaluation.study.kept import Gone
from h2o_flexgen.evaluation.study.scores import Array


def survival(gone: Gone, prompt_len: int) -> Array:
    """The share of tokens behind the prompt that is still held at each age in tokens, over all layers and heads.
    (tokens behind the prompt,)

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
