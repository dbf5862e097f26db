"""A token is worth more the more unevenly its key and its value lie, channel by channel, in the ranges that the tokens of the
next part of the text span.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.kv.judges.together import JudgeOfRows

SHORTEST, LONGEST = 4, 128  # tokens of a part
TWENTIETH = 20  # the share of a text that a part is between these
UNMEASURED = torch.finfo(torch.float32).max  # the newest tokens have no next part to be measured by: they stay


class Lag(JudgeOfRows):
    def __init__(self, sinks: int) -> None:
        """`sinks`: the first tokens, which stay whatever their worth and belong to no part."""
        self._sinks = sinks

    def of_row(self, keys: Tensor, values: Tensor) -> Tensor:
        worth = torch.full(keys.shape[:2], UNMEASURED, dtype=torch.float32, device=keys.device)
        tokens = keys.shape[1] - self._sinks
        length = min(LONGEST, max(SHORTEST, tokens // TWENTIETH))
        parts = tokens // length
        if parts > 1:
            first, last = self._sinks, self._sinks + parts * length
            in_parts = (each[:, first:last].unflatten(1, (parts, length)) for each in (keys, values))
            worth[:, first : last - length] = sum(map(_unevenness, in_parts))
        return worth


def _unevenness(x: Tensor) -> Tensor:
    """How unevenly the tokens of x (kv_heads, parts, length, head_dim) lie, as shares of their part; those of the last part are
    left out. (kv_heads, tokens), fp32"""
    x = x.float()
    least, most = x[:, 1:].aminmax(dim=2, keepdim=True)
    span = most - least
    lies = torch.where(span == 0, 0.0, (x[:, :-1] - least) / span)  # a channel without a range says nothing
    return lies.std(dim=-1).softmax(dim=-1).flatten(1)
