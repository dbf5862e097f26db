"""Ranking: the likeliest tokens of each row of a batch, a few rows at a time, and the log-probabilities of the model's own
distribution, before SamplingParams change it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import PICKED_VALUES
from h2o_flexgen.sampling.completion import StepLogprobs, TokenLogprob

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
