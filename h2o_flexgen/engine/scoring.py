"""Scores: how likely a text is to a model, in one pass over it or token by token with what a KV policy keeps."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from h2o_flexgen.engine.head import LogitsOf, OfHead, side_by_side
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.rows import BatchRows, OnToken
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.prompts import Prompt, read_pair
from h2o_flexgen.text.tokenizer import Tokenizer

Pairs: TypeAlias = "Iterable[tuple[str, str] | tuple[Sequence[int], Sequence[int]]]"  # what stands before, what is scored
PREFILL, DECODE = "prefill", "decode"
WAYS = (PREFILL, DECODE)
SCORED = "scored"  # the reason why a row ends


@dataclass(frozen=True)
class Scored:
    """The log-probability of every token of a continuation, and the model's likeliest token in its place."""

    index: int  # index of the pair in the input
    logprobs: tuple[float, ...]
    greedy: tuple[int, ...]

    @property
    def logprob(self) -> float:
        """The log-probability of the whole continuation."""
        return sum(self.logprobs)


def way_of(plan: Plan, asked: str | None) -> str:
    """Chooses the way: in one pass every token attends to all before it unchanged, which no evicting or rounding cache does."""
    if asked is not None and asked not in WAYS:
        raise ValueError(f"by is {asked!r}; allowed are {', '.join(map(repr, WAYS))}, or None for the one that is right")
    is_exact = plan.policy.attends_all and plan.kv_codec == PLAIN
    if asked == PREFILL and not is_exact:
        recalls = f"kv_recall {plan.policy.recall:g}" if plan.policy.keeps_all else f"kv_policy {plan.kv_policy!r}"
        cache = f"kv_codec {plan.kv_codec!r}" if plan.policy.attends_all else recalls
        raise ValueError(f"{cache} cannot be scored by 'prefill', where every token sees the full cache; score by 'decode'")
    return asked or (PREFILL if is_exact else DECODE)


def read_pairs(pairs: Pairs, tokenizer: Tokenizer) -> tuple[list[Prompt], list[tuple[int, ...]]]:
    """Reads pairs: what stands before, and what is scored."""
    read = [read_pair(place, pair, tokenizer) for place, pair in enumerate(pairs)]
    if empty := [index for index, (_, after) in enumerate(read) if not after]:
        raise ValueError(f"continuation {empty[0]} is empty; there is nothing to score: leave the pair out")
    return [Prompt(None, before) for before, _ in read], [after for _, after in read]


def params_of(continuations: Sequence[Sequence[int]]) -> list[SamplingParams]:
    """Sampling parameters for given continuations, with the log-probability of each token."""
    return [SamplingParams(max_tokens=len(after), logprobs=1) for after in continuations]


class _Wanted(NamedTuple):
    """A token to be scored."""

    position: int  # index among the positions that get logits
    pair: int
    token: int


class Scorer:
    """Scores whole texts at the head of one pass: each of a text's last positions for the token that comes next. Rows are laid
    side by side, so that there are few large products instead of many small ones."""

    def __init__(self, rows: Sequence[RowState], tokenizer: Tokenizer, positions: int, on_token: OnToken | None = None) -> None:
        """`rows` have the continuations as forced tokens."""
        wanted, params = pairs_by_text(rows), SamplingParams(max_tokens=1)
        self.texts = [  # the rows to be run
            RowState(place, text, params, tokenizer, adapter=adapter) for place, (adapter, *text) in enumerate(wanted)
        ]
        self.scored: dict[int, Scored] = {}
        self._pairs = [*wanted.values()]  # for each text, the index and continuation of the pairs scored with it
        self._positions = positions  # that get their logits at once
        self._on_token = on_token

    @property
    def in_order(self) -> list[Scored]:
        return [self.scored[index] for index in range(len(self.scored))]

    def __call__(self, rows: BatchRows, hidden: Tensor, made: OfHead, step: int) -> int:
        lasts: list[Tensor] = []
        wanted: list[_Wanted] = []
        end = 0
        for row, own in rows.prompts(hidden):
            longest = max(len(after) for _, after in self._pairs[row.index])
            lasts.append(own[len(own) - longest :])
            end += longest
            for index, after in self._pairs[row.index]:
                wanted += [_Wanted(end - len(after) + place, index, token) for place, token in enumerate(after)]
        self._score(lasts, sorted(wanted), made.logits)
        for row in rows.alive:  # not earlier: if memory runs out above, the rows have to run again
            row.stop(SCORED)
        rows.drop_finished(step)
        return len(wanted)

    def _score(self, lasts: Sequence[Tensor], wanted: Sequence[_Wanted], logits_of: LogitsOf) -> None:
        """Scores in the order of positions, which is that of the tokens of every pair."""
        found: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
        start = 0
        for hidden in side_by_side(lasts, self._positions):
            first, end = (bisect_left(wanted, _Wanted(place, 0, 0)) for place in (start, start + len(hidden)))
            here = wanted[first:end]
            for one, logprob, likeliest in zip(here, *_scores(logits_of(hidden).float(), here, start)):
                found[one.pair].append((logprob, likeliest))
                if self._on_token is not None:
                    self._on_token(one.pair, one.token, None)
            start += len(hidden)
        for index, of_tokens in found.items():
            logprobs, greedy = zip(*of_tokens)
            self.scored[index] = Scored(index, tuple(logprobs), tuple(greedy))


def _scores(logits: Tensor, wanted: Sequence[_Wanted], start: int) -> tuple[list[float], list[int]]:
    """Scores of one call's logits (positions, vocab), from position `start` on; they are freed when it returns."""
    places = torch.tensor([one.position - start for one in wanted], device=logits.device)
    own = logits[places, torch.tensor([one.token for one in wanted], device=logits.device)]
    return (own - logits.logsumexp(-1)[places]).tolist(), logits.argmax(-1)[places].tolist()


def pairs_by_text(rows: Sequence[RowState]) -> dict[tuple[int, ...], list[tuple[int, Sequence[int]]]]:
    """The pairs scored with each text, which the number of its adapter comes before. The last token is not part of the text, as
    only its score is needed. So one text scores all one-token answers to a question."""
    pairs: defaultdict[tuple[int, ...], list[tuple[int, Sequence[int]]]] = defaultdict(list)
    for row in rows:
        text = (row.adapter, *row.prompt_ids, *row.forced[:-1])
        pairs[text].append((row.index, row.forced))
    return pairs


def scored_of(completion: Completion) -> Scored:
    """The scores of a completion with forced tokens, log-probabilities and the likeliest token of each step."""
    assert completion.logprobs is not None, completion.index
    logprobs = tuple(step.chosen.logprob for step in completion.logprobs)
    return Scored(completion.index, logprobs, tuple(step.top[0].token_id for step in completion.logprobs))


def decode_groups(rows: Sequence[RowState], plan: Plan) -> list[list[RowState]]:
    """Groups of rows to decode together, long ones first, with continuations of similar length. If the budget is a share of the
    text, it depends on the tokens a block generates; then all lengths are equal, so that no score depends on other rows."""
    if plan.policy.keeps_all or not plan.kv_options.is_share_of_text:
        order = sorted(rows, key=lambda row: (-row.max_tokens, -row.prompt_len))
        return [order[start : start + plan.block_size] for start in range(0, len(order), plan.block_size)]
    groups: defaultdict[int, list[RowState]] = defaultdict(list)
    for row in rows:
        groups[row.max_tokens].append(row)
    return [groups[length] for length in sorted(groups, reverse=True)]
