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
from functools import partial

import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import PICKED_VALUES
from h2o_flexgen.kernels.operations import pick_tokens
from h2o_flexgen.kernels.pick_tokens import Draw, TokenMasks, Upload, portions
from h2o_flexgen.sampling.completion import StepLogprobs
from h2o_flexgen.sampling.logits import History, distinct, logprobs_of, score_changes
from h2o_flexgen.sampling.params import SamplingParams


def resolve_seed(seed: int | None) -> int:
    """Chooses a fresh seed if none is given. It is called once per `generate`, so that one number repeats the whole call."""
    checked = SamplingParams(seed=seed).seed
    return secrets.randbits(32) if checked is None else checked


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
        masks: TokenMasks | None = None,  # of rows that are held to something
        refuse: Callable[[Sequence[int]], TokenMasks | None] | None = None,  # gets tokens; the masks with which all pick again
    ) -> Picked:
        """Reads back what was picked, and log-probabilities where they are asked for: whatever is forbidden, and however scores
        are changed, these are the model's own."""
        steps = [steps] * len(rows) if isinstance(steps, int) else steps
        changes = score_changes(params, histories, logits.shape[-1])
        draws = None if all(one.is_greedy for one in distinct(params)) else self._draws(params, rows, steps, histories)
        pick = partial(pick_tokens, logits, draws, changes, upload, PICKED_VALUES)
        found, best = pick(masks)
        if refuse is not None and (further := refuse(read_back(found[0]).tolist())) is not None:
            found, best = pick(further)
        picked = found[0]
        tokens = _with_given(picked, given, upload)
        found = found if tokens is picked else torch.stack((tokens, found[1]))
        read = read_back(found)  # the only time that the caller waits
        _refuse_broken(logits, best, read[1].tolist(), rows, steps, params)
        return Picked(read[0], tokens, _logprobs(logits, tokens, params, upload))

    def _draws(
        self,
        params: Sequence[SamplingParams],
        rows: Sequence[int],
        steps: Sequence[int],
        histories: Sequence[History] | None,
    ) -> list[Draw]:
        numbers = [0] * len(rows) if histories is None else [history.number for history in histories]
        return [
            Draw(
                self.seed if one.seed is None else one.seed,
                *(row, step, number, one.temperature),
                *(one.top_p if one.top_p < 1 else math.inf, one.min_p, one.top_k),
            )
            for one, row, step, number in zip(params, rows, steps, numbers)
        ]


def _with_given(tokens: Tensor, given: Sequence[int | None] | None, upload: Upload) -> Tensor:
    """The tokens with those that are given in their places."""
    if given is None or given.count(None) == len(given):
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


def _refuse_broken(
    logits: Tensor,
    best: Tensor,
    is_finite: Sequence[int],
    rows: Sequence[int],
    steps: Sequence[int],
    params: Sequence[SamplingParams],
) -> None:
    """Refuses a row if its best score is not finite; a NaN anywhere is a row's best. The logits tell whether the checkpoint
    or the params are to blame."""
    if 0 not in is_finite:
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
        f"{best[place].item()}); ease {' or '.join(params[place].forbidding)}",
    )


def _logprobs(
    logits: Tensor, tokens: Tensor, params: Sequence[SamplingParams], upload: Upload
) -> tuple[StepLogprobs | None, ...]:
    found: list[StepLogprobs | None] = [None] * len(params)
    if all(one.logprobs is None for one in distinct(params)):
        return tuple(found)
    asking = [place for place, one in enumerate(params) if one.logprobs is not None]
    for places in portions(asking, logits.shape[-1], PICKED_VALUES):
        counts, own = [params[place].logprobs or 0 for place in places], upload(torch.tensor(places), logits.device)
        for place, step in zip(places, logprobs_of(logits[own], tokens[own], counts, upload)):
            found[place] = step
    return tuple(found)
