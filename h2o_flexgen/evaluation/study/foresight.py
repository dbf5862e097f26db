"""The oracle: keeps the tokens that get most attention in the whole text, as only a reader who knows it all could."""

from __future__ import annotations

import torch
from torch import Tensor

NAME = "oracle"


def gone_with_foresight(sums: Tensor, slots: int, prompt_len: int) -> Tensor:
    """sums (kv_heads, tokens): the heaviest tokens are held from the start, all others leave as soon as any token may."""
    kv_heads, tokens = sums.shape
    gone = torch.arange(1, tokens + 1, device=sums.device).clamp(min=prompt_len).repeat(kv_heads, 1)
    return gone.scatter_(1, sums.topk(min(slots, tokens), dim=1).indices, tokens + 1)
