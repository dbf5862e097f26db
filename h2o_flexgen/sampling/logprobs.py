"""Log-probabilities of the model's own distribution, before SamplingParams change it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from h2o_flexgen.sampling.output import StepLogprobs, TokenLogprob
from h2o_flexgen.sampling.ranking import kth_largest, portions, ranked


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
