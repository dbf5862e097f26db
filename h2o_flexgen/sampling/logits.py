"""What is done with logits before a token is picked, and beside it: SamplingParams forbid tokens, add biases and penalise, and
the likeliest tokens are ranked, a few rows at a time, with the log-probabilities of the model's own distribution.

The order is vLLM's: allowed_token_ids, min_tokens, logit_bias, repetition_penalty, frequency_penalty, presence_penalty.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import PICKED_VALUES
from h2o_flexgen.sampling.completion import StepLogprobs, TokenLogprob
from h2o_flexgen.sampling.params import SamplingParams

Upload = Callable[[Tensor, torch.device], Tensor]  # a tensor of the host as one of the device


def portions(places: Sequence[int], vocab: int) -> Iterator[Sequence[int]]:
    """Splits the rows into portions small enough for small temporaries."""
    at_once = max(1, PICKED_VALUES // vocab)
    return (places[start : start + at_once] for start in range(0, len(places), at_once))


def kth_largest(values: Tensor, counts: Sequence[int], upload: Upload = Tensor.to) -> Tensor:
    """Each row's k-th largest value, minus infinity where k is 0. (rows, 1)"""
    if not any(counts):
        return torch.full_like(values[:, :1], -math.inf)
    top = torch.nn.functional.pad(values.topk(max(counts), dim=-1).values, (1, 0), value=-math.inf)
    return top.gather(-1, upload(torch.tensor(counts), values.device)[:, None])


def ranked(values: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """At least the values not below their row's floor, and their places: largest first, equal ones in order of place."""
    width = int((values >= floor).sum(dim=-1).max())
    places = values.topk(width, dim=-1).indices.sort(dim=-1).values  # topk leaves the order of equal values open
    top, order = values.gather(-1, places).sort(dim=-1, descending=True, stable=True)
    return top, places.gather(-1, order)


def logprobs_of(logits: Tensor, tokens: Tensor, counts: Sequence[int], upload: Upload = Tensor.to) -> list[StepLogprobs]:
    """The log-probabilities of each row's token and of as many of its likeliest as it asks for. logits (rows, vocab)"""
    vocab = logits.shape[-1]
    found: list[StepLogprobs] = []
    for places in portions(range(len(logits)), vocab):
        logprobs = logits[places[0] : places[-1] + 1].float().log_softmax(dim=-1)
        own = tokens[places[0] : places[-1] + 1]
        own = (own if own.device == logprobs.device else upload(own, logprobs.device))[:, None]
        top, ids = _likeliest(logprobs, [min(counts[place], vocab) for place in places], upload)
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


def _likeliest(logprobs: Tensor, counts: Sequence[int], upload: Upload) -> tuple[Tensor, Tensor]:
    """The largest of each row, as many as the row with the highest count asks for, and their ids."""
    most = max(counts)
    if not most:
        return logprobs[:, :0], logprobs[:, :0].long()
    top, ids = ranked(logprobs, kth_largest(logprobs, [most] * len(counts), upload))
    return top[:, :most], ids[:, :most]


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
