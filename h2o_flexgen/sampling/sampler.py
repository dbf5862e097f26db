"""Sampling: one token per row from a batch of logits.

The order is vLLM's, each step working on the result of the one before: those of `logits`, temperature, min_p, top_k,
top_p. A row's token depends only on its own logits, its params, the tokens before it, its place in the whole input and the
step: the one random number it needs is a pure function of (seed, row, step, number of the completion), and it is looked up in
the row's own cumulative distribution.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.sampling.completion import StepLogprobs
from h2o_flexgen.sampling.logits import History, Upload, adjusted, kth_largest, logprobs_of, portions, ranked
from h2o_flexgen.sampling.params import SamplingParams

FLOOR_SLACK = 1e-6  # a floor only saves work: it may pass more tokens than the exact filter after it, never fewer


def resolve_seed(seed: int | None) -> int:
    """Chooses a fresh seed if none is given. It is called once per `generate`, so that one number repeats the whole call."""
    checked = SamplingParams(seed=seed).seed
    return secrets.randbits(32) if checked is None else checked


def uniform(seed: int, row: int, step: int, number: int = 0) -> float:
    """The random number in [0, 1) of this row at this step: a pure function of these, independent of any other draw. `number`
    tells the completions of one prompt apart."""
    bits = np.random.Philox(key=seed + (row << 64), counter=step + (number << 64)).random_raw()
    return (int(bits) >> 11) * 2.0**-53


@dataclass(frozen=True)
class Picked:
    tokens: Tensor  # (rows,) int64, in host memory
    where_picked: Tensor  # the same in the memory of the logits
    logprobs: tuple[StepLogprobs | None, ...]  # None for rows that did not ask


class Sampler:
    """Picks tokens for one `generate` call. Rows without a seed of their own share the call's, and differ by their row."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = resolve_seed(seed)

    def sample(
        self,
        logits: Tensor,  # (rows, vocab), any dtype, on any device
        params: Sequence[SamplingParams],
        rows: Sequence[int],  # each row's place in the whole input: its identity
        steps: Sequence[int] | int,
        histories: Sequence[History] | None = None,  # not needed if no params depend on earlier tokens
        given: Sequence[int | None] | None = None,  # tokens that replace picked ones; logprobs are theirs
        upload: Upload = Tensor.to,
        read_back: Callable[[Tensor], Tensor] = Tensor.cpu,
    ) -> Picked:
        """Reads back once: what was picked, how many tokens a filter leaves, and log-probabilities."""
        steps = [steps] * len(rows) if isinstance(steps, int) else steps
        numbers = [0] * len(rows) if histories is None else [history.number for history in histories]
        scores = adjusted(logits, params, histories, upload)
        best, tokens = scores.max(dim=-1)
        is_finite = torch.isfinite(best)
        for is_filtered, draw in ((False, _draw_unfiltered), (True, _draw_filtered)):
            asking = [place for place, one in enumerate(params) if not one.is_greedy and one.is_filtered == is_filtered]
            for places in portions(asking, logits.shape[-1]):
                chosen = [params[place] for place in places]
                seeds = [self.seed if one.seed is None else one.seed for one in chosen]
                uniforms = [uniform(seed, rows[at], steps[at], numbers[at]) for seed, at in zip(seeds, places)]
                own = upload(torch.tensor(places), logits.device)
                columns = _Columns.of(chosen, uniforms, logits.device, upload)
                distances = (scores[own].double() - best[own].double()[:, None]) / columns.heat
                distances.masked_fill_(~is_finite[own][:, None], 0.0)  # any token: these rows are refused below
                tokens[own] = draw(distances, chosen, columns, upload)
        tokens = _with_given(tokens, given, upload)
        read = read_back(torch.stack((tokens, is_finite.long())))  # the only time that the caller waits
        _refuse_broken(logits, best, read[1].tolist(), rows, steps)
        return Picked(read[0], tokens, _logprobs(logits, tokens, params, upload))


class _Columns(NamedTuple):
    """What draws need of each row, (rows, 1) each, in float64."""

    uniforms: Tensor
    heat: Tensor
    nucleus: Tensor
    least: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], uniforms: Sequence[float], device: torch.device, upload: Upload) -> _Columns:
        lines = (
            uniforms,
            [one.temperature for one in params],
            [one.top_p if one.top_p < 1 else math.inf for one in params],
            [one.min_p for one in params],
        )
        return cls(*upload(torch.tensor(lines, dtype=torch.float64), device).unsqueeze(-1))


def _with_given(tokens: Tensor, given: Sequence[int | None] | None, upload: Upload) -> Tensor:
    """The tokens with those that are given in their places."""
    if given is None or all(token is None for token in given):
        return tokens
    known = upload(torch.tensor([-1 if token is None else token for token in given]), tokens.device)
    return torch.where(known < 0, tokens, known)


class NoTokenLeft(ValueError):
    """No token of a row can be picked, for what is said."""

    def __init__(self, place: int, number: int, reason: str) -> None:
        super().__init__(reason)
        self.place = place  # among the rows that were sampled together
        self.number = number  # of its prompt in the whole input
        self.row: int | None = None  # its place among all rows, set when it gets a seat


def _refuse_broken(logits: Tensor, best: Tensor, is_finite: Sequence[int], rows: Sequence[int], steps: Sequence[int]) -> None:
    """Refuses a row if its best score is not finite; a NaN anywhere is a row's best. The logits tell whether the checkpoint
    or the params are to blame."""
    if all(is_finite):
        return
    place = is_finite.index(0)
    of_model = logits[place].max().item()
    if not math.isfinite(of_model):
        raise NoTokenLeft(
            place,
            rows[place],
            f"logits of prompt {rows[place]} at step {steps[place]} have the maximum {of_model}; "
            "the checkpoint is broken or overflows its dtype: try bfloat16 or float32",
        )
    raise NoTokenLeft(
        place,
        rows[place],
        f"the sampling params of prompt {rows[place]} leave no token to pick at step {steps[place]} (the highest score is "
        f"{best[place].item()}); ease allowed_token_ids, min_tokens or repetition_penalty",
    )


def _draw_unfiltered(distances: Tensor, params: Sequence[SamplingParams], columns: _Columns, upload: Upload) -> Tensor:
    """Looks tokens up in order of their ids, so that nothing has to be sorted. `distances`: how far each token is below its
    row's best, divided by the temperature: at most 0, so that exp cannot overflow."""
    return _invert(distances.exp(), columns.uniforms).flatten()


def _draw_filtered(distances: Tensor, params: Sequence[SamplingParams], columns: _Columns, upload: Upload) -> Tensor:
    vocab, nucleus, least = distances.shape[-1], columns.nucleus, columns.least
    kth = kth_largest(distances, [min(one.top_k, vocab) for one in params], upload)
    weights = distances.exp()
    total = weights.masked_fill_((distances < kth) | (weights < least), 0).sum(dim=-1, keepdim=True)
    # all tokens lighter than total * (1 - top_p) / vocab together weigh less than the nucleus leaves out
    floor = torch.maximum(kth, torch.maximum(least.log(), ((1 - nucleus).clamp_(min=0) * total / vocab).log()))
    top, ids = ranked(distances, floor - FLOOR_SLACK)
    weights = top.exp()  # the first is 1
    weights.masked_fill_((top < kth) | (weights < least), 0)
    heavier = torch.nn.functional.pad(weights.cumsum(dim=-1)[:, :-1], (1, 0))  # the weight of all tokens before
    weights.masked_fill_(heavier >= nucleus * total, 0)
    return ids.gather(-1, _invert(weights, columns.uniforms)).flatten()


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first place where the cumulative weight exceeds this share of the total; it never has weight 0. (rows, 1)"""
    reached = weights.cumsum(dim=-1)
    return torch.searchsorted(reached, uniforms * reached[:, -1:], right=True)


def _logprobs(
    logits: Tensor, tokens: Tensor, params: Sequence[SamplingParams], upload: Upload
) -> tuple[StepLogprobs | None, ...]:
    found: list[StepLogprobs | None] = [None] * len(params)
    for places in portions([place for place, one in enumerate(params) if one.logprobs is not None], logits.shape[-1]):
        counts, own = [params[place].logprobs or 0 for place in places], upload(torch.tensor(places), logits.device)
        for place, step in zip(places, logprobs_of(logits[own], tokens[own], counts, upload)):
            found[place] = step
    return tuple(found)
