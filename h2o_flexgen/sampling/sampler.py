"""Sampling: one token per row from a batch of logits. Before one is picked, SamplingParams forbid tokens, add biases and
penalise. The likeliest tokens are ranked, a few rows at a time, with the log-probabilities of the model's own distribution.

The order is vLLM's, each step working on the result of the one before: allowed_token_ids, min_tokens, logit_bias,
repetition_penalty, frequency_penalty, presence_penalty, temperature, min_p, top_k, top_p. A row's token depends only on its own
logits, its params, the tokens before it, its place in the whole input and the step: the one random number it needs is a pure
function of (seed, row, step, number of the completion), and it is looked up in the row's own cumulative distribution. What has
come in a row so far, and how often, is counted as it comes (`History`).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import PICKED_VALUES
from h2o_flexgen.kernels.operations import likeliest, pick_tokens
from h2o_flexgen.kernels.pick_tokens import Draw, ScoreChanges, TokenMasks, Upload, portions
from h2o_flexgen.sampling.completion import StepLogprobs, TokenLogprob
from h2o_flexgen.sampling.params import SamplingParams

FIRST_ROOM = 64


class TokenCounts:
    """The tokens that a row has seen, each once, and how often each was generated."""

    def __init__(self, prompt_len: int = 0) -> None:
        self._prompt_len = prompt_len
        self._forget()

    def _forget(self) -> None:
        self._known = 0  # tokens of the row that are counted
        self.places: dict[int, int] = {}  # of each token among all
        self._ids: np.ndarray = np.zeros(FIRST_ROOM, dtype=np.int64)
        self._times: np.ndarray = np.zeros(FIRST_ROOM, dtype=np.float32)

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self.places)]

    @property
    def times(self) -> np.ndarray:
        return self._times[: len(self.places)]

    def follow(self, seen: Sequence[int]) -> TokenCounts:
        """Counts what has come since the last call. A row that has started again has fewer tokens."""
        if len(seen) < self._known:
            self._forget()
        for number in range(self._known, len(seen)):
            self._count(seen[number], number >= self._prompt_len)
        self._known = len(seen)
        return self

    def _count(self, token: int, is_generated: bool) -> None:
        place = self.places.setdefault(token, len(self.places))
        if place == len(self._ids):
            self._ids, self._times = (np.concatenate((old, np.zeros_like(old))) for old in (self._ids, self._times))
        self._ids[place] = token
        self._times[place] += is_generated


class Followers:
    """Knows which tokens have come in a row behind each run of so many of its tokens."""

    def __init__(self, run_length: int) -> None:
        self._length = run_length
        self._forget()

    def _forget(self) -> None:
        self._known = self._length  # tokens of the row that are counted
        self._behind: dict[tuple[int, ...], set[int]] = {}

    def of_last(self, seen: Sequence[int]) -> Collection[int]:
        """Those that have come behind the run with which the row ends now. A row that has started again has fewer tokens."""
        if len(seen) < self._known:
            self._forget()
        for place in range(self._known, len(seen)):
            self._behind.setdefault(tuple(seen[place - self._length : place]), set()).add(seen[place])
        self._known = max(self._known, len(seen))
        return self._behind.get(tuple(seen[len(seen) - self._length :]), ()) if len(seen) >= self._length else ()


@dataclass(frozen=True)
class History:
    """The tokens before the next one of a row, and those that would end it."""

    seen: Sequence[int]  # prompt and generated ids
    prompt_len: int
    ends: Collection[int] = ()  # end-of-text and stop tokens
    number: int = 0  # of the row among the completions of its prompt

    @property
    def num_generated(self) -> int:
        return len(self.seen) - self.prompt_len

    @cached_property
    def _counts(self) -> TokenCounts:
        return TokenCounts(self.prompt_len)

    @property
    def counts(self) -> TokenCounts:
        return self._counts.follow(self.seen)

    @cached_property
    def _followers(self) -> dict[int, Followers]:
        return {}

    def followers(self, run_length: int) -> Collection[int]:
        """The tokens that have come behind so many tokens as the row ends with now."""
        return self._followers.setdefault(run_length, Followers(run_length)).of_last(self.seen)


NOTHING_SEEN = TokenCounts()


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
            raise ValueError("penalties and what forbids or biases tokens need the tokens so far; none were given")
        return None
    if not any(one.changes_scores or one.min_tokens for one in distinct(params)):
        return None
    if not any(_asks(one, history) for one, history in zip(params, histories)):
        return None
    each = [_changes_of(one, row, vocab) if _asks(one, row) else NO_CHANGE for one, row in zip(params, histories)]
    begins = [*accumulate((len(own.ids) for own in each), initial=0)]
    added = np.zeros(begins[-1], dtype=np.float32)
    for begin, own in zip(begins, each):
        for place, amount in own.added.items():
            added[begin + place] = amount
    return ScoreChanges(
        begins,
        np.concatenate([own.ids for own in each]),
        added,
        np.concatenate([own.times for own in each]),
        np.array([(one.repetition_penalty, one.frequency_penalty, one.presence_penalty) for one in params], dtype=np.float32),
        [one.allowed_token_ids is not None for one in params],
    )


def distinct(params: Sequence[SamplingParams]) -> Collection[SamplingParams]:
    """Those that are not the same object: of many rows there are few, and rows of large batches cost time one by one."""
    return {id(one): one for one in params}.values()


def _asks(params: SamplingParams, history: History) -> bool:
    return params.changes_scores or (params.min_tokens > 0 and history.num_generated < params.min_tokens)


class _RowChanges(NamedTuple):
    """The tokens of a row of which the scores are changed."""

    ids: np.ndarray
    times: np.ndarray  # how often each was generated; NaN: it was not seen at all
    added: Mapping[int, float]  # to the scores, by the places of tokens among these


NO_CHANGE = _RowChanges(NOTHING_SEEN.ids, NOTHING_SEEN.times, {})


def _changes_of(params: SamplingParams, history: History, vocab: int) -> _RowChanges:
    added = dict(params.logit_bias or {})
    if history.num_generated < params.min_tokens:
        added |= {token: -math.inf for token in history.ends if 0 <= token < vocab}
    if params.no_repeat_ngram_size:
        added |= dict.fromkeys(history.followers(params.no_repeat_ngram_size - 1), -math.inf)
    seen = history.counts if params.is_penalised else NOTHING_SEEN
    if not added and params.allowed_token_ids is None:
        return _RowChanges(seen.ids, seen.times, {})
    tokens = dict.fromkeys((*seen.places, *added) if params.allowed_token_ids is None else params.allowed_token_ids)
    places = {token: place for place, token in enumerate(tokens)}
    times = [seen.times[seen.places[token]] if token in seen.places else math.nan for token in tokens]
    own = {places[token]: amount for token, amount in added.items() if token in places}
    return _RowChanges(np.array([*tokens], dtype=np.int64), np.array(times, dtype=np.float32), own)


# -- picking -----------------------------------------------------------------------------------------------------------


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
