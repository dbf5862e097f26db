"""Captured attention: the share of the full cache's attention that goes to tokens which a policy still holds at that time."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.evaluation.study.attention import Attention


def captured(attention: Attention, gone: Tensor, prompt_len: int) -> Tensor:
    """Attention captured from all queries behind the prompt (each has 1 to give), averaged over a group's heads. (kv_heads,)"""
    skipped = max(0, prompt_len - attention.first)
    shares = attention.shares[:, :, skipped:].mean(1)  # (kv_heads, queries, keys)
    queries, keys = shares.shape[1:]
    query = torch.arange(keys - queries, keys, device=shares.device)
    is_held = gone[:, None, :keys] > query[:, None]  # before the query's own token comes, which it always sees
    return (shares * is_held).sum((1, 2))
