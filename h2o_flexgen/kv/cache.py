"""KVCache: the slots of one (layer, batch): append, attend, and drop rows that are finished.

The slots are an image (2, rows, kv_heads, slots, head_dim), wherever it happens to lie while it is computed with. What all
layers of a batch have in common at a step (positions, counts, mask) is worked out once, in a Pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as functional
from torch import Tensor

from h2o_flexgen.models.base import Rotate


@dataclass(frozen=True)
class Pass:
    """One batch's way through all layers at one step."""

    is_prefill: bool
    positions: Tensor  # (rows, tokens), from 0
    counts: Tensor  # (rows,) slots that each row holds before
    capacity: int  # slots of the images

    @cached_property
    def row_index(self) -> Tensor:
        return torch.arange(self.counts.shape[0], device=self.counts.device)

    @cached_property
    def mask(self) -> Tensor:
        """0 where a row has a key, its newest one included, -inf on the slots behind. (rows, 1, 1, slots), fp32"""
        slots = torch.arange(self.capacity, device=self.counts.device)
        empty = slots > self.counts.unsqueeze(1)
        return torch.zeros(empty.shape, device=empty.device).masked_fill_(empty, -torch.inf)[:, None, None]


class KVCache:
    def __init__(self, image: Tensor) -> None:
        self.image = image  # (2, rows, kv_heads, slots, head_dim); more rows than are alive once some are finished

    def attend(self, now: Pass, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None = None) -> Tensor:
        """Appends the new keys and values and attends them and all that is held. Shapes as models.base.Attend says."""
        if rotate is not None:
            q, k = rotate(q, now.positions), rotate(k, now.positions)
        return self._prefill(q, k, v) if now.is_prefill else self._decode(now, q, k, v)

    def keep_rows(self, index: Sequence[int], slots: int) -> None:
        """Row `dst` becomes what row `index[dst]` is: finished rows are filled up by living ones from behind."""
        for dst, src in enumerate(index):
            if dst != src:
                self.image[:, dst, :, :slots] = self.image[:, src, :, :slots]

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, tokens, heads, head_dim = q.shape
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (rows, heads, tokens, head_dim)
        image = self.image[:, :rows]
        image[0, :, :, :tokens] = k
        image[1, :, :, :tokens] = v
        image[:, :, :, tokens:] = 0  # masked, but 0 * NaN of an earlier user would still be NaN
        if heads != k.shape[1]:  # torch's own grouping takes an n x n path on many devices and versions; this never does
            k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        # pads stand behind the text, so causal attention keeps them from every token that counts
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1)
        return out.transpose(1, 2).reshape(rows, tokens, heads * head_dim)

    def _decode(self, now: Pass, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, _, heads, head_dim = q.shape
        keys, values = self.image[0, :rows], self.image[1, :rows]  # (rows, kv_heads, slots, head_dim)
        kv_heads = keys.shape[1]
        keys[now.row_index, :, now.counts] = k[:, 0]
        values[now.row_index, :, now.counts] = v[:, 0]
        q = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)  # the query heads of a group stand where queries stand
        # over all slots, empty ones masked: a slice of the slots is not contiguous, and bf16 products of it are 4 times slower
        scores = torch.matmul(q, keys.transpose(2, 3)).float().mul_(head_dim**-0.5).add_(now.mask)
        shares = torch.softmax(scores, dim=-1).to(values.dtype)  # (rows, kv_heads, group, slots)
        return torch.matmul(shares, values).reshape(rows, 1, heads * head_dim)
