"""How SamplingParams change logits before a token is picked, greedily or not: they forbid tokens, add biases and penalise.

The order is vLLM's: allowed_token_ids, min_tokens, logit_bias, repetition_penalty, frequency_penalty, presence_penalty.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.sampling.ranking import Upload


class History(NamedTuple):
    """The tokens before the next one of a row, and those that would end it."""

    seen: Sequence[int]  # prompt and generated ids
    prompt_len: int
    ends: Collection[int] = ()  # end-of-text and stop tokens
    number: int = 0  # of the row among the completions of its prompt

    @property
    def num_generated(self) -> int:
        return len(self.seen) - self.prompt_len


def adjusted(
    logits: Tensor, params: Sequence[SamplingParams], histories: Sequence[History] | None, upload: Upload = Tensor.to
) -> Tensor:
    """The adjusted scores (rows, vocab), in fp32, or the logits themselves if no row asks for a change."""
    if histories is None:
        if any(one.changes_scores or one.min_tokens for one in params):
            raise ValueError("penalties, logit_bias, allowed_token_ids and min_tokens need the tokens so far; none were given")
        return logits
    asking = [place for place, (one, history) in enumerate(zip(params, histories)) if _asks(one, history)]
    if not asking:
        return logits
    scores = logits.to(torch.float32, copy=True)
    for place in asking:
        _restrict(scores[place], params[place], histories[place], upload)
        if params[place].is_penalised:
            _penalise(scores[place], params[place], histories[place], upload)
    return scores


def _asks(params: SamplingParams, history: History) -> bool:
    return params.changes_scores or history.num_generated < params.min_tokens


def _restrict(scores: Tensor, params: SamplingParams, history: History, upload: Upload) -> None:
    """Applies everything but penalties to one row (vocab,), in place."""
    if params.allowed_token_ids is not None:
        allowed = _ids(params.allowed_token_ids, scores, upload)
        kept = scores[allowed]
        scores.fill_(-math.inf)
        scores[allowed] = kept
    if history.num_generated < params.min_tokens:
        scores[_ids([token for token in history.ends if 0 <= token < len(scores)], scores, upload)] = -math.inf
    if params.logit_bias:
        biases = upload(torch.tensor([*params.logit_bias.values()], dtype=scores.dtype), scores.device)
        scores[_ids([*params.logit_bias], scores, upload)] += biases


def _penalise(scores: Tensor, params: SamplingParams, history: History, upload: Upload) -> None:
    """Penalises one row (vocab,), in place. For repetition, positive scores are divided and negative ones multiplied: both
    become less likely with a penalty above 1."""
    if params.repetition_penalty != 1:
        seen, penalty = _ids(history.seen, scores, upload), params.repetition_penalty
        before = scores[seen]
        scores[seen] = torch.where(before < 0, before * penalty, before / penalty)
    if params.frequency_penalty or params.presence_penalty:
        times = Counter(history.seen[history.prompt_len :])
        generated, counts = (_ids([*each], scores, upload) for each in (times, times.values()))
        scores[generated] -= params.frequency_penalty * counts
        scores[generated] -= params.presence_penalty


def _ids(tokens: Sequence[int], scores: Tensor, upload: Upload) -> Tensor:
    return upload(torch.tensor(tokens, dtype=torch.int64), scores.device)
