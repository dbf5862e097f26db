"""Sparsity: how much of the attention is as good as nothing. The paper counts what is below 1 % of its row's largest."""

from __future__ import annotations

from torch import Tensor

from h2o_flexgen.evaluation.study.attention import Attention

THRESHOLD = 0.01  # of the largest share of a query


def negligible_entries(attention: Attention) -> Tensor:
    """How many a head has, among the keys that each query can see. (heads,)"""
    shares = attention.shares.flatten(0, 1)
    queries, keys = shares.shape[1:]
    behind = sum(keys - 1 - query for query in range(attention.first, attention.first + queries))  # nobody sees them: 0
    return (shares < THRESHOLD * shares.amax(-1, keepdim=True)).sum((1, 2)) - behind


def visible_entries(tokens: int) -> int:
    return tokens * (tokens + 1) // 2
