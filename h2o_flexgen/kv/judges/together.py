"""Together: compares the tokens of a row with each other, after every pass of several tokens. Decode steps only add tokens that
are not judged yet: comparing would need all keys of all layers at every step. These tokens are evicted first once nothing
protects them, or else a long answer would evict all tokens that were judged (docs/log/eviction.md).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

import torch
from torch import Tensor

from h2o_flexgen.kv.judges.judge import Held, Judge, Written

UNJUDGED = torch.finfo(torch.float32).min  # below all judged tokens, but above minus infinity, the rank of empty places
Self = TypeVar("Self", bound="JudgeOfRows")


class JudgeOfRows(Judge):
    @abstractmethod
    def of_row(self, keys: Tensor, values: Tensor) -> Tensor:
        """The worth of each token of a row, (kv_heads, tokens) in fp32. keys, values: (kv_heads, tokens, head_dim), oldest
        first."""

    def of_heads(self: Self, heads: Tensor) -> Self:
        return self

    def newest(self, new: Written) -> Tensor:
        rows, _, heads, _ = new.k.shape
        return new.k.new_full((rows, heads), UNJUDGED, dtype=torch.float32)

    def of_all(self, new: Written, held: Held | None) -> Tensor:
        """Judges row by row, so that a row does not depend on others, and the working memory is that of one row."""
        rows, tokens, heads, _ = new.k.shape
        first = 0 if held is None else held.keys.shape[2]
        worth = new.k.new_zeros((rows, heads, first + tokens), dtype=torch.float32)
        for row, count in enumerate(new.counts):
            keys, values = (each[row, :count].transpose(0, 1) for each in (new.k, new.v))
            before = 0 if held is None else held.counts[row]
            if held is not None:
                keys = torch.cat((held.keys[row, :, :before], keys), dim=1)
                values = torch.cat((held.values[row, :, :before], values), dim=1)
            judged = self.of_row(keys, values)
            worth[row, :, :before] = judged[:, :before]
            worth[row, :, first : first + count] = judged[:, before:]
        return worth
