"""Captured attention: how much of what the full cache attends goes to tokens that somebody still holds at that time."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.evaluation.study.attention import Attention


def captured(attention: Attention, gone: Tensor, prompt_len: int) -> Tensor:
    """Summed over the queries behind the prompt, each of which gives 1 in all; of a group the mean. (kv_heads,)"""
    skipped = max(0, prompt_len - attention.first)
    shares = attention.shares[:, :, skipped:].mean(1)  # (kv_heads, queries, keys)
    queries, keys = shares.shape[1:]
    query = torch.arange(keys - queries, keys, device=shares.device)
    is_held = gone[:, None, :keys] > query[:, None]  # before the query comes; itself it sees always
    return (shares * is_held).sum((1, 2))
