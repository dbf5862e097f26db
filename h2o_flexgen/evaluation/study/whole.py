"""One layer of a text that is read at once, with everything kept."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.kernels.more_keys import More
from h2o_flexgen.kernels.operations import prompt_attention
from h2o_flexgen.models.base import Rotation


class Whole(NamedTuple):
    """Queries and keys are rotated."""

    q: Tensor  # (heads, tokens, dim)
    k: Tensor  # (kv_heads, tokens, dim)
    sums: Tensor  # (kv_heads, tokens), fp32: the attention that each token got
    out: Tensor  # as models.base.Attend returns it
    sink_scores: Tensor | None  # (heads,)


def attend_whole(q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, sink_scores: Tensor | None = None) -> Whole:
    """Takes what a models.base.Attend is given, of one row."""
    tokens = q.shape[1]
    if rotation is not None:
        positions = torch.arange(tokens, device=q.device).unsqueeze(0)
        q, k = rotation(q, positions), rotation(k, positions)
    q, k, v = (each.transpose(1, 2).contiguous() for each in (q, k, v))
    nothing, every_query = torch.zeros(1, dtype=torch.int64, device=q.device), torch.ones(1, tokens, device=q.device)
    more = None if sink_scores is None else More.of_sink_scores(sink_scores, 1, tokens)
    out, sums = prompt_attention(q, k, v, nothing, every_query, more)
    assert sums is not None
    return Whole(q[0], k[0], sums[0], out, sink_scores)
