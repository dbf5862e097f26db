"""Persistence: how long a token stays that is kept.

One token comes and one goes at each step, so on average every token stays for as many steps as there are slots, whatever the
policy. What differs is the spread: a window lets all go at the same age, with heavy hitters most go early and some never.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from h2o_flexgen.evaluation.study.kept import Gone
from h2o_flexgen.evaluation.study.scores import Array


def held_at_age(gone: Gone, prompt_len: int) -> Array:
    """Of the tokens that came so many tokens ago, the share that is held, over all times from the prompt's end on and over
    all layers and heads. (tokens,), from age 0: the newest."""
    tokens = gone.shape[-1]
    place = np.arange(tokens)
    first = np.maximum(prompt_len - 1 - place, 0)  # the age of each token when it is first looked at
    looked = _ranges(first, tokens - place, tokens)
    held = sum(_ranges(first, np.minimum(one - 1, tokens) - place, tokens) for one in gone.reshape(-1, tokens))
    return np.asarray(held / (looked * (gone.size // tokens)))


def _ranges(first: NDArray[np.integer], end: NDArray[np.integer], length: int) -> NDArray[np.integer]:
    """How many of the ranges [first, end) each number lies in."""
    steps = np.zeros(length + 1, dtype=np.int64)
    np.add.at(steps, first, 1)
    np.add.at(steps, np.maximum(first, end), -1)
    return np.cumsum(steps)[:length]


def still_held(gone: Gone, prompt_len: int, later: int) -> Array:
    """Of what is held at one time, the share that is held so many tokens later too. (layers,)"""
    tokens = gone.shape[-1]
    last = tokens - later  # the last time that there is such a later one for
    first = np.maximum(prompt_len, np.arange(tokens) + 1)
    at_one_time = np.maximum(0, np.minimum(gone - 1, last) - first + 1).sum((1, 2))
    also_later = np.maximum(0, np.minimum(gone - 1 - later, last) - first + 1).sum((1, 2))
    return np.asarray(also_later / at_one_time)
