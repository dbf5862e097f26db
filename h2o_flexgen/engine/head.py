"""The head of the model: what happens to a batch after the last layer. Generation picks tokens from the last logits, and
prompts get their log-probabilities. Logits of many positions are made some positions at a time.

The engine gives the hidden states and what the head makes of them; the AtHead given to `Engine.run` chooses of which.

Embeddings and scores of labels are made here, too: the states of a prompt become one vector, in the pass that reads it. In
that pass every token sees all tokens before it unchanged, whatever a policy keeps of them afterwards and in however few bits.
Each row is pooled by itself, in products of sizes that depend on it alone, so that no vector depends on the rows beside it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from h2o_flexgen.core.prefix_groups import tokens_of
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.rows import BatchRows, OnLogits, OnToken, SharedOf
from h2o_flexgen.engine.stores.prefix_store import Prefix
from h2o_flexgen.sampling.completion import StepLogprobs
from h2o_flexgen.sampling.pooling import CLS, MEAN, ClassifyParams, PoolingParams
from h2o_flexgen.sampling.sampler import NoTokenLeft, Sampler, logprobs_of

LogitsOf = Callable[[Tensor], Tensor]  # hidden (positions, width) -> (positions, vocab), in the dtype of the model


def side_by_side(pieces: Sequence[Tensor], positions: int) -> Iterator[Tensor]:
    """Joins states (tokens, width) into pieces of this many positions, and copies at most one piece at a time."""
    held: list[Tensor] = []
    room = positions
    for piece in pieces:
        while len(piece):
            held.append(piece[:room])
            room -= len(held[-1])
            piece = piece[len(held[-1]) :]
            if room == 0:
                yield torch.cat(held)
                held, room = [], positions
    if held:
        yield torch.cat(held)


def read_prompts(rows: BatchRows, hidden: Tensor, logits_of: LogitsOf, positions: int) -> None:
    """Gives rows that ask for them the log-probabilities of their prompts, from the pass that reads these. In it every token
    sees all tokens before it unchanged, whatever a policy keeps of them afterwards and in however few bits. Those of a shared
    prefix are computed once for all its rows. `positions`: how many have their logits made at once."""
    rows.note_prefixes(hidden)
    asking = [_Asking.of(row, own, rows.prefix_of(row)) for row, own in rows.prompts(hidden) if row.wants_prompt_logprobs]
    found = _logprobs([each for one in asking for each in one.scored], logits_of, positions)
    for one in asking:
        shared = () if one.shared is None else _of_prefix(*one.shared, one.count, logits_of, positions)
        one.row.prompt_logprobs = (None, *shared, *found[: one.positions])
        del found[: one.positions]


@dataclass(frozen=True)
class _Scored:
    """Hidden states (tokens, width), the token that follows each of them, and how many of the likeliest tokens are asked for
    beside it."""

    hidden: Tensor
    tokens: Sequence[int]
    count: int


@dataclass(frozen=True)
class _Asking:
    """A row that asks for the log-probabilities of its prompt, and the states of the prompt that it does not share."""

    row: RowState
    shared: SharedOf | None
    scored: Sequence[_Scored]
    count: int

    @classmethod
    def of(cls, row: RowState, own: Tensor, shared: SharedOf | None) -> _Asking:
        count, ids = row.params.prompt_logprobs or 0, row.prompt_ids[-len(own) :]
        scored = [_Scored(own[:-1], ids[1:], count)]
        if shared is not None and shared.prefix.hidden is not None:
            scored.insert(0, _Scored(shared.prefix.hidden[shared.tokens - 1 : shared.tokens], ids[:1], count))
        return cls(row, shared, scored, count)

    @property
    def positions(self) -> int:
        return sum(len(each.tokens) for each in self.scored)


def _of_prefix(prefix: Prefix, tokens: int, count: int, logits_of: LogitsOf, positions: int) -> Sequence[StepLogprobs]:
    """The log-probabilities of the first tokens of a prefix. They are computed again only if a row asks for more of the
    likeliest tokens than all rows before."""
    assert prefix.hidden is not None
    if count > prefix.likeliest:
        prefix.logprobs = _logprobs([_Scored(prefix.hidden[:-1], tokens_of(prefix.ids[1:]), count)], logits_of, positions)
        prefix.likeliest = count
    return [replace(one, top=one.top[:count]) for one in prefix.logprobs[: tokens - 1]]


def _logprobs(each: Sequence[_Scored], logits_of: LogitsOf, positions: int) -> list[StepLogprobs]:
    tokens = [token for one in each for token in one.tokens]
    counts = [one.count for one in each for _ in one.tokens]
    found: list[StepLogprobs] = []
    for piece in side_by_side([one.hidden for one in each], positions):
        here = slice(len(found), len(found) + len(piece))
        found += logprobs_of(logits_of(piece), torch.tensor(tokens[here]), counts[here])
    return found


class OfHead(NamedTuple):
    """What the head of the model makes of hidden states. Its logits are of tokens, or of labels."""

    logits: LogitsOf
    states: StatesOf


class AtHead(Protocol):
    def __call__(self, rows: BatchRows, hidden: Tensor, made: OfHead, step: int) -> int:
        """Uses hidden (rows, tokens, width), drops finished rows, and returns the number of tokens picked or scored."""


@dataclass(frozen=True)
class Picker:
    """Generates: picks a token for every row, except where the token is given."""

    sampler: Sampler
    on_token: OnToken | None = None
    on_logits: OnLogits | None = None
    prompt_positions: int = 0  # of which logits are made at once if a prompt's log-probabilities are asked for

    def __call__(self, rows: BatchRows, hidden: Tensor, made: OfHead, step: int) -> int:
        if self.prompt_positions and rows.prompt_tokens:
            read_prompts(rows, hidden, made.logits, self.prompt_positions)
            pool_prompts(rows, hidden, made.states, made.logits)
        last = rows.last_hidden(hidden)
        growing = rows.growing()
        if not growing:
            rows.drop_finished(step)
            return 0
        last = last if len(growing) == len(last) else rows.at(growing, last)
        tried = rows.tried_hidden(hidden)
        logits = made.logits(last if tried is None else torch.cat((last, tried)))
        return rows.advance(logits, self.sampler, step, self.on_token, self.on_logits)


StatesOf = Callable[[Tensor], Tensor]  # hidden (positions, width) -> the same behind the last norm of the model
ScoresOf = Callable[[Tensor], Tensor]  # hidden (positions, width) -> (positions, labels)
STATES_AT_ONCE = 256  # tokens of a row that pass the norm together
SHORTEST = 1e-12  # as torch normalises: a vector that is shorter is divided by this


def pool_prompts(rows: BatchRows, hidden: Tensor, states_of: StatesOf, scores_of: ScoresOf) -> None:
    """Gives rows that ask for it the vector of their prompts, or the scores of labels. What they share with others is kept with
    its states."""
    for row, own in rows.prompts(hidden):
        asked = row.pooling
        if asked is None or row.embedding is not None:
            continue
        states = _states(rows, row, own)
        if isinstance(asked, ClassifyParams):
            assert asked.labels is not None, "they are known when a row is made"
            one = _state_at(states, asked.labels.last_place(row.prompt_ids))
            row.embedding = _checked(row, "classification", scores_of(one)[0])
        else:
            row.embedding = _checked(row, "embedding", _pooled(asked, states, states_of))


def _state_at(states: Sequence[Tensor], place: int) -> Tensor:
    """The state of one token, (1, width)."""
    for each in states:
        if place < len(each):
            return each[place : place + 1]
        place -= len(each)
    raise AssertionError("there is a state for each token of a prompt")


def _states(rows: BatchRows, row: RowState, own: Tensor) -> Sequence[Tensor]:
    """The states of all tokens of a prompt."""
    shared = rows.prefix_of(row)
    if shared is None:
        return [own]
    assert shared.prefix.hidden is not None, "states of prefixes are kept where a row may ask for those of its prompt"
    return [shared.prefix.hidden[: shared.tokens], own]


def _pooled(asked: PoolingParams, states: Sequence[Tensor], states_of: StatesOf) -> Tensor:
    """One vector of states (tokens, width). They are added in fp64."""
    if asked.pooling == MEAN:
        pieces = [piece for each in states for piece in each.split(STATES_AT_ONCE)]
        sums = [states_of(piece).double().sum(dim=0) for piece in pieces]
        vector = torch.stack(sums).sum(dim=0) / sum(map(len, states))
    else:
        one = states[0][:1] if asked.pooling == CLS else states[-1][-1:]
        vector = states_of(one)[0].double()
    return vector / vector.norm().clamp_min(SHORTEST) if asked.normalize else vector


def _checked(row: RowState, what: str, vector: Tensor) -> array[float]:
    values = vector.float().cpu()
    if not bool(values.isfinite().all()):
        broken = NoTokenLeft(
            0,
            row.index,
            f"the {what} of prompt {row.index} is not finite; "
            "the checkpoint is broken or overflows its dtype: try bfloat16 or float32",
        )
        broken.row = row.row
        raise broken
    return array("f", values.tolist())
