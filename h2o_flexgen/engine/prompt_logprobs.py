"""Log-probabilities of prompts, from the pass that reads them. In it every token sees all tokens before it unchanged, whatever
a policy keeps of them afterwards and in however few bits. Those of a shared prefix are computed once for all its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from h2o_flexgen.engine.chunked_logits import LogitsOf, side_by_side
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.rows import BatchRows, SharedOf
from h2o_flexgen.engine.stores.prefix_store import Prefix
from h2o_flexgen.sampling.completion import StepLogprobs
from h2o_flexgen.sampling.ranking import logprobs_of


def read_prompts(rows: BatchRows, hidden: Tensor, logits_of: LogitsOf, positions: int) -> None:
    """Gives rows that ask for them the log-probabilities of their prompts. `positions`: how many have their logits made at
    once."""
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
        prefix.logprobs = _logprobs([_Scored(prefix.hidden[:-1], prefix.ids[1:], count)], logits_of, positions)
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
