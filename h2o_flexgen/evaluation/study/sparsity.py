"""Sparsity: the share of negligible attention entries. The paper counts those below 1 % of their row's largest."""

from __future__ import annotations

from torch import Tensor

from h2o_flexgen.evaluation.study.attention import Attention

THRESHOLD = 0.01  # relative to the largest share of a query


def negligible_entries(attention: Attention) -> Tensor:
    """The number of negligible entries per head, among the keys that each query can see. (heads,)"""
    shares = attention.shares.flatten(0, 1)
    queries, keys = shares.shape[1:]
    behind = sum(keys - 1 - query for query in range(attention.first, attention.first + queries))  # zeros no query sees
    return (shares < THRESHOLD * shares.amax(-1, keepdim=True)).sum((1, 2)) - behind


def visible_entries(tokens: int) -> int:
    return tokens * (tokens + 1) // 2
