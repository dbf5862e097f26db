"""Sampling: one token per row from a batch of logits.

Filters act in the order of transformers, each on what the last one left: repetition penalty, temperature, top_k, top_p, min_p.
A row's token depends on its own logits, its params, its place in the whole input and the step, and on nothing else: the one
random number it needs is a pure function of (seed, row, step), and it is looked up in the row's own cumulative distribution.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.runtime.output import StepLogprobs, TokenLogprob
from h2o_flexgen.runtime.sampling_params import SEED_LIMIT, SamplingParams

VALUES_AT_ONCE = 2**20  # per temporary in float64: 8 MiB, whatever the batch and the vocabulary
FLOOR_SLACK = 1e-6  # a floor only saves work: it may let through more than the exact filter behind it, never less


def resolve_seed(seed: int | None) -> int:
    """A fresh seed where none is given: to be called once per `generate`, so that one number repeats the whole call."""
    if seed is not None and not 0 <= seed < SEED_LIMIT:
        raise ValueError(f"seed is {seed}; allowed is 0 to 2**64 - 1, or None")
    return secrets.randbits(32) if seed is None else seed


def uniform(seed: int, row: int, step: int) -> float:
    """The random number in [0, 1) of this row at this step: a pure function of the three, independent of any other draw."""
    bits = np.random.Philox(key=seed + (row << 64), counter=step).random_raw()
    return (int(bits) >> 11) * 2.0**-53


@dataclass(frozen=True)
class Picked:
    tokens: Tensor  # (rows,) int64, in host memory
    logprobs: tuple[StepLogprobs | None, ...]  # None for rows that did not ask


class Sampler:
    """Picks tokens for one `generate` call. Rows whose params have no seed share the call's, and differ by their row."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = resolve_seed(seed)

    def sample(
        self,
        logits: Tensor,  # (rows, vocab), any dtype, on any device
        params: Sequence[SamplingParams],
        rows: Sequence[int],  # each row's place in the whole input: its identity
        steps: Sequence[int] | int,
        seen: Sequence[Sequence[int]] | None = None,  # prompt and generated ids; read only for rows with a repetition penalty
        given: Sequence[int | None] | None = None,  # tokens that take the place of picked ones; logprobs are theirs
    ) -> Picked:
        steps = [steps] * len(rows) if isinstance(steps, int) else steps
        scores = _penalised(logits, params, seen)
        best, likeliest = scores.max(dim=-1)
        _refuse_broken(best, rows, steps)
        tokens = likeliest.cpu()
        for filtered in (False, True):
            for places in _portions(params, _draws(filtered), logits.shape[-1]):
                chosen = [params[place] for place in places]
                uniforms = [self._uniform(params[place], rows[place], steps[place]) for place in places]
                distances, column = _distances(scores[places], best[places], chosen), _column(uniforms, logits.device)
                drawn = _draw_filtered(distances, chosen, column) if filtered else _draw_unfiltered(distances, column)
                tokens[places] = drawn.cpu()
        for place, token in enumerate(given or ()):
            if token is not None:
                tokens[place] = token
        return Picked(tokens, _logprobs(logits, tokens, params))

    def _uniform(self, params: SamplingParams, row: int, step: int) -> float:
        return uniform(self.seed if params.seed is None else params.seed, row, step)


def _draws(filtered: bool) -> Callable[[SamplingParams], bool]:
    return lambda params: not params.is_greedy and params.is_filtered == filtered


def _portions(params: Sequence[SamplingParams], belongs: Callable[[SamplingParams], bool], vocab: int) -> Iterator[list[int]]:
    """The places of the rows that belong, few enough at a time that temporaries stay small."""
    places = [place for place, one in enumerate(params) if belongs(one)]
    at_once = max(1, VALUES_AT_ONCE // vocab)
    return (places[start : start + at_once] for start in range(0, len(places), at_once))


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]  # (rows, 1)


def _penalised(logits: Tensor, params: Sequence[SamplingParams], seen: Sequence[Sequence[int]] | None) -> Tensor:
    """Positive scores of seen tokens divided by the penalty, negative ones multiplied: both less likely if it is above 1."""
    places = [place for place, one in enumerate(params) if one.repetition_penalty != 1]
    if not places:
        return logits
    if seen is None:
        raise ValueError("repetition_penalty needs the token ids seen so far; none were given")
    scores = logits.to(torch.float32, copy=True)
    for place in places:
        ids = torch.tensor(seen[place], dtype=torch.int64, device=scores.device)
        penalty, before = params[place].repetition_penalty, scores[place, ids]
        scores[place, ids] = torch.where(before < 0, before * penalty, before / penalty)
    return scores


def _refuse_broken(best: Tensor, rows: Sequence[int], steps: Sequence[int]) -> None:
    """A NaN anywhere in a row is its maximum, so one value per row tells."""
    broken = (~torch.isfinite(best)).nonzero().flatten().tolist()
    if broken:
        place = broken[0]
        raise ValueError(
            f"logits of prompt {rows[place]} at step {steps[place]} have the maximum {best[place].item()}; "
            "the checkpoint is broken or overflows its dtype: try bfloat16 or float32"
        )


def _distances(scores: Tensor, best: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """How far each token is below its row's best, over the temperature: at most 0, so that exp cannot overflow."""
    heat = _column([one.temperature for one in params], scores.device)
    return (scores.double() - best.double()[:, None]) / heat  # (rows, vocab)


def _draw_unfiltered(distances: Tensor, uniforms: Tensor) -> Tensor:
    """Looked up in order of token ids: nothing has to be sorted."""
    return _invert(distances.exp(), uniforms).flatten()


def _draw_filtered(distances: Tensor, params: Sequence[SamplingParams], uniforms: Tensor) -> Tensor:
    device, vocab = distances.device, distances.shape[-1]
    nucleus = _column([one.top_p if one.top_p < 1 else math.inf for one in params], device)
    least = _column([one.min_p for one in params], device)
    kth = _kth_largest(distances, [min(one.top_k, vocab) for one in params])
    total = distances.exp().masked_fill_(distances < kth, 0).sum(dim=-1, keepdim=True)
    # all tokens lighter than total * (1 - top_p) / vocab together weigh less than the nucleus leaves out
    floor = torch.maximum(kth, torch.maximum(least.log(), ((1 - nucleus).clamp_(min=0) * total / vocab).log()))
    ranked, ids = _ranked(distances, floor - FLOOR_SLACK)
    weights = ranked.exp().masked_fill_(ranked < kth, 0)  # the first is 1
    heavier = torch.nn.functional.pad(weights.cumsum(dim=-1)[:, :-1], (1, 0))  # all that stand before
    weights.masked_fill_((heavier >= nucleus * total) | (weights < least), 0)
    return ids.gather(-1, _invert(weights, uniforms)).flatten()


def _kth_largest(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Each row's k-th largest value, minus infinity where k is 0. (rows, 1)"""
    if not any(counts):
        return torch.full_like(values[:, :1], -math.inf)
    top = torch.nn.functional.pad(values.topk(max(counts), dim=-1).values, (1, 0), value=-math.inf)
    return top.gather(-1, torch.tensor(counts, device=values.device)[:, None])


def _ranked(values: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """At least the values not below their row's floor and their places: largest first, equal ones by place."""
    width = int((values >= floor).sum(dim=-1).max())
    places = values.topk(width, dim=-1).indices.sort(dim=-1).values  # topk leaves the order of equal values open
    top, order = values.gather(-1, places).sort(dim=-1, descending=True, stable=True)
    return top, places.gather(-1, order)


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first place whose cumulative weight exceeds this share of the whole: one of weight 0 is never it. (rows, 1)"""
    reached = weights.cumsum(dim=-1)
    return torch.searchsorted(reached, uniforms * reached[:, -1:], right=True)


def _logprobs(logits: Tensor, tokens: Tensor, params: Sequence[SamplingParams]) -> tuple[StepLogprobs | None, ...]:
    """Of the model's own distribution: before penalty, temperature and filters."""
    found: list[StepLogprobs | None] = [None] * len(params)
    for places in _portions(params, lambda one: one.logprobs is not None, logits.shape[-1]):
        logprobs = logits[places].float().log_softmax(dim=-1)
        chosen = logprobs.gather(-1, tokens[places].to(logprobs.device)[:, None]).flatten().tolist()
        counts = [min(params[place].logprobs or 0, logits.shape[-1]) for place in places]
        for place, own, top in zip(places, chosen, _likeliest(logprobs, counts)):
            found[place] = StepLogprobs(TokenLogprob(int(tokens[place]), own), top)
    return tuple(found)


def _likeliest(logprobs: Tensor, counts: Sequence[int]) -> list[tuple[TokenLogprob, ...]]:
    if not any(counts):
        return [()] * len(counts)
    floor = _kth_largest(logprobs, [max(counts)] * len(counts))
    top, ids = (part[:, : max(counts)].tolist() for part in _ranked(logprobs, floor))
    return [tuple(map(TokenLogprob, ids[row][:count], top[row][:count])) for row, count in enumerate(counts)]
