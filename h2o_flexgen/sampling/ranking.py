"""Ranking: the likeliest tokens of each row of a batch, a few rows at a time, and the log-probabilities of the model's own
distribution, before SamplingParams change it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from h2o_flexgen.sampling.output import StepLogprobs, TokenLogprob

Upload = Callable[[Tensor, torch.device], Tensor]  # a tensor of the host as one of the device
VALUES_AT_ONCE = 2**20  # per temporary in float64: 8 MiB, whatever the batch and the vocabulary


def portions(places: Sequence[int], vocab: int) -> Iterator[Sequence[int]]:
    """Splits the rows into portions small enough for small temporaries."""
    at_once = max(1, VALUES_AT_ONCE // vocab)
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


def logprobs_of(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[StepLogprobs]:
    """The log-probabilities of each row's token and of as many of its likeliest as it wants. logits (rows, vocab)"""
    vocab = logits.shape[-1]
    found: list[StepLogprobs] = []
    for places in portions(range(len(logits)), vocab):
        logprobs = logits[places[0] : places[-1] + 1].float().log_softmax(dim=-1)
        own = tokens[places[0] : places[-1] + 1]
        chosen = logprobs.gather(-1, own.to(logprobs.device)[:, None]).flatten().tolist()
        top = _likeliest(logprobs, [min(counts[place], vocab) for place in places])
        found += [StepLogprobs(TokenLogprob(*each), likeliest) for *each, likeliest in zip(own.tolist(), chosen, top)]
    return found


def _likeliest(logprobs: Tensor, counts: Sequence[int]) -> list[tuple[TokenLogprob, ...]]:
    if not any(counts):
        return [()] * len(counts)
    floor = kth_largest(logprobs, [max(counts)] * len(counts))
    top, ids = (part[:, : max(counts)].tolist() for part in ranked(logprobs, floor))
    return [tuple(map(TokenLogprob, ids[row][:count], top[row][:count])) for row, count in enumerate(counts)]
