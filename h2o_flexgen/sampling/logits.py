"""What is done with logits before a token is picked, and beside it: SamplingParams forbid tokens, add biases and penalise, and
the likeliest tokens are ranked, a few rows at a time, with the log-probabilities of the model's own distribution.

The order is vLLM's: allowed_token_ids, min_tokens, logit_bias, repetition_penalty, frequency_penalty, presence_penalty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import PICKED_VALUES
from h2o_flexgen.kernels.operations import likeliest
from h2o_flexgen.kernels.pick_tokens import ScoreChanges, Upload, portions
from h2o_flexgen.sampling.completion import StepLogprobs, TokenLogprob
from h2o_flexgen.sampling.history import History, TokenCounts
from h2o_flexgen.sampling.params import SamplingParams

NOTHING_SEEN = TokenCounts()
NO_CHANGE = np.empty(0, dtype=np.int64), np.empty((4, 0), dtype=np.float32)


def logprobs_of(logits: Tensor, tokens: Tensor, counts: Sequence[int], upload: Upload = Tensor.to) -> list[StepLogprobs]:
    """The log-probabilities of each row's token and of as many of its likeliest as it asks for. logits (rows, vocab)"""
    vocab = logits.shape[-1]
    found: list[StepLogprobs] = []
    for places in portions(range(len(logits)), vocab, PICKED_VALUES):
        logprobs = logits[places[0] : places[-1] + 1].float().log_softmax(dim=-1)
        own = tokens[places[0] : places[-1] + 1]
        own = (own if own.device == logprobs.device else upload(own, logprobs.device))[:, None]
        top, ids = _likeliest(logprobs, max(min(counts[place], vocab) for place in places))
        parts = own, logprobs.gather(-1, own), ids, top
        read = torch.cat([part.double() for part in parts], dim=-1).tolist()  # together: every time is one wait for a device
        found += [_of_row(row, counts[place]) for row, place in zip(read, places)]
    return found


def _of_row(read: Sequence[float], count: int) -> StepLogprobs:
    """Token and log-probability, and then as many ids of the likeliest as values of them."""
    width = len(read) // 2 - 1
    ids, top = read[2 : 2 + width][:count], read[2 + width :][:count]
    return StepLogprobs(
        TokenLogprob(int(read[0]), read[1]), tuple(TokenLogprob(int(one), value) for one, value in zip(ids, top))
    )


def _likeliest(logprobs: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The largest of each row, as many as the row with the highest count asks for, and their ids."""
    return likeliest(logprobs, most, PICKED_VALUES) if most else (logprobs[:, :0], logprobs[:, :0].long())


def score_changes(params: Sequence[SamplingParams], histories: Sequence[History] | None, vocab: int) -> ScoreChanges | None:
    """What the rows ask to be done to scores; None if no row asks for a change."""
    if histories is None:
        if any(one.changes_scores or one.min_tokens for one in params):
            raise ValueError("penalties, logit_bias, allowed_token_ids and min_tokens need the tokens so far; none were given")
        return None
    if not any(_asks(one, history) for one, history in zip(params, histories)):
        return None
    each = [_changes_of(one, row, vocab) if _asks(one, row) else NO_CHANGE for one, row in zip(params, histories)]
    ids, values = np.concatenate([own for own, _ in each]), np.concatenate([own for _, own in each], axis=1)
    only = [one.allowed_token_ids is not None for one in params]
    return ScoreChanges([*accumulate((len(own) for own, _ in each), initial=0)], ids, values, only)


def _asks(params: SamplingParams, history: History) -> bool:
    return params.changes_scores or (params.min_tokens > 0 and history.num_generated < params.min_tokens)


def _changes_of(params: SamplingParams, history: History, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a row of which the scores are changed, and how, (4, tokens)."""
    added = dict(params.logit_bias or {})
    if history.num_generated < params.min_tokens:
        added |= {token: -math.inf for token in history.ends if 0 <= token < vocab}
    seen = history.counts if params.is_penalised else NOTHING_SEEN
    if params.allowed_token_ids is not None:
        ids, places, times = _of_allowed(params.allowed_token_ids, seen)
    else:
        others = [token for token in added if token not in seen.places]
        ids = np.concatenate((seen.ids, np.array(others, dtype=np.int64))) if others else seen.ids
        places = seen.places if not others else seen.places | {token: len(seen.ids) + at for at, token in enumerate(others)}
        times = np.concatenate((seen.times, np.full(len(others), np.nan, np.float32)))
    values = _penalties(params, times)
    for token, amount in added.items():
        if token in places:
            values[0, places[token]] = amount
    return ids, values


def _of_allowed(allowed: Sequence[int], seen: TokenCounts) -> tuple[np.ndarray, Mapping[int, int], np.ndarray]:
    places = {token: at for at, token in enumerate(dict.fromkeys(allowed))}
    times = [seen.times[seen.places[token]] if token in seen.places else np.nan for token in places]
    return np.array([*places], dtype=np.int64), places, np.array(times, dtype=np.float32)


def _penalties(params: SamplingParams, times: np.ndarray) -> np.ndarray:
    """What is done to the scores of tokens by the times that they were generated; NaN: they were not seen at all. Positive
    scores are divided by the penalty for repetition and negative ones multiplied: both become less likely if it is above 1."""
    values = np.zeros((4, len(times)), dtype=np.float32)
    is_seen, is_generated = times >= 0, times > 0
    values[1] = np.where(is_seen, np.float32(params.repetition_penalty), np.float32(1))
    values[2, is_generated] = np.float32(params.frequency_penalty) * times[is_generated]
    values[3, is_generated] = params.presence_penalty
    return values
