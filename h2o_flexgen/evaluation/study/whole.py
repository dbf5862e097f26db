"""One layer of a text that is read at once, with everything kept."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.operations import prompt_attention
from h2o_flexgen.models.new_tokens import NewTokens


class WholeText(NamedTuple):
    """Queries and keys are rotated."""

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


def turned(tokens: NewTokens) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (1, heads, tokens, dim), rotated to their positions in the text."""
    q, k = tokens.q, tokens.k
    if tokens.rotation is not None:
        positions = torch.arange(q.shape[1], device=q.device).unsqueeze(0)
        q, k = tokens.rotation(q, positions), tokens.rotation(k, positions)
    q, k, v = (each.transpose(1, 2).contiguous() for each in (q, k, tokens.v))
    return q, k, v
