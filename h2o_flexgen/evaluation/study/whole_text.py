"""The attention of a text that is read with everything kept: its probabilities, some queries at a time, and what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.calibration.text_reading import turned
from h2o_flexgen.formats.kernel_sizes import SCORED_BYTES
from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.operations import prompt_attention
from h2o_flexgen.kernels.prompt_attention import probabilities
from h2o_flexgen.models.new_tokens import NewTokens


class WholeText(NamedTuple):
    """One layer of a text that is read at once, with everything kept. Queries and keys are rotated."""

    q: Tensor  # (heads, tokens, dim)
    k: Tensor  # (kv_heads, tokens, dim)
    sums: Tensor  # (kv_heads, tokens), fp32: the attention that each token got
    out: Tensor  # as models.attention.Attend returns it
    sink_scores: Tensor | None  # (heads,)


def attend_whole(tokens: NewTokens) -> WholeText:
    """Takes the tokens of one row."""
    (q, k, v), sink_scores = turned(tokens), tokens.sink_scores
    nothing, every_query = torch.zeros(1, dtype=torch.int64, device=q.device), torch.ones(1, q.shape[2], device=q.device)
    more = None if sink_scores is None else More.of_sink_scores(sink_scores, 1, q.shape[2])
    out, sums = prompt_attention(q, k, v, nothing, every_query, more)
    assert sums is not None
    return WholeText(q[0], k[0], sums[0], out, sink_scores)


THRESHOLD = 0.01  # of negligible entries, relative to the largest share of a query: the paper's


class Attention(NamedTuple):
    """The attention of some neighbouring queries in one layer."""

    first: int  # the place of the first query in the text
    shares: Tensor  # (kv_heads, group, queries, keys up to the last of the queries), fp32; 0 for keys after a query


def attention_in_blocks(
    q: Tensor, k: Tensor, held_bytes: int = SCORED_BYTES, sink_scores: Tensor | None = None
) -> Iterator[Attention]:
    """q (heads, tokens, dim), k (kv_heads, tokens, dim), both rotated. At most `held_bytes` of shares are held at once."""
    heads, tokens, _ = q.shape
    queries = max(1, held_bytes // (4 * heads * tokens))
    for start in range(0, tokens, queries):
        yield attention_of(q, k, start, min(start + queries, tokens), sink_scores)


def attention_of(q: Tensor, k: Tensor, start: int, end: int, sink_scores: Tensor | None = None) -> Attention:
    """The attention of the queries from `start` on and before `end`; q and k as above."""
    heads, _, dim = q.shape
    part = q[:, start:end].reshape(1, len(k), heads // len(k), end - start, dim)
    shares = probabilities(part, k[:, :end].unsqueeze(0), None, sink_scores)
    return Attention(start, shares.view(len(k), heads // len(k), end - start, end))


def negligible_entries(attention: Attention) -> Tensor:
    """The number of negligible entries per head, among the keys that each query can see. (heads,)"""
    shares = attention.shares.flatten(0, 1)
    queries, keys = shares.shape[1:]
    behind = sum(keys - 1 - query for query in range(attention.first, attention.first + queries))  # zeros no query sees
    return (shares < THRESHOLD * shares.amax(-1, keepdim=True)).sum((1, 2)) - behind


def visible_entries(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def captured(attention: Attention, gone: Tensor, prompt_len: int) -> Tensor:
    """Attention captured from all queries after the prompt (each has 1 to give), averaged over a group's heads. (kv_heads,)"""
    skipped = max(0, prompt_len - attention.first)
    shares = attention.shares[:, :, skipped:].mean(1)  # (kv_heads, queries, keys)
    queries, keys = shares.shape[1:]
    query = torch.arange(keys - queries, keys, device=shares.device)
    is_held = gone[:, None, :keys] > query[:, None]  # before the query's own token comes, which it always sees
    return (shares * is_held).sum((1, 2))
