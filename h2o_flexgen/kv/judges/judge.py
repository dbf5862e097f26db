"""Judge: how much a token is worth to a KV head, as it is known when the token is written. A policy ranks by it, or weighs the
attention that the token gets with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Written(NamedTuple):
    """New tokens of each row, as a judge may look at them. Pads may stand behind them."""

    x: Tensor | None  # (rows, tokens, width): what the layer makes queries, keys and values of
    k: Tensor  # (rows, tokens, kv_heads, head_dim), before they are packed; after a pass of several tokens as they are kept
    v: Tensor  # alike
    counts: Sequence[int]  # tokens of each row that are no pads


class Held(NamedTuple):
    """Tokens that a pass of several tokens finds, oldest first; behind those of a row that has fewer lie others."""

    keys: Tensor  # (rows, kv_heads, held, head_dim), as they are kept, unpacked
    values: Tensor  # alike
    worth: Tensor  # (rows, kv_heads, held), fp32
    counts: Sequence[int]  # tokens that each row really has


class Judge(ABC):
    reads_input = False  # whether it looks at what the layer makes keys of

    @abstractmethod
    def of_heads(self, heads: Tensor) -> Judge:
        """The judge of some of the layer's KV heads, by their numbers."""

    @abstractmethod
    def newest(self, new: Written) -> Tensor:
        """What each row's only new token is worth, in decode. (rows, kv_heads), fp32"""

    @abstractmethod
    def of_all(self, new: Written, held: Held | None) -> Tensor:
        """What held tokens are worth after a pass of several tokens, and behind them the new ones. (rows, kv_heads, held +
        tokens), fp32"""


class OneByOne(Judge):
    """Says of each token by itself what it is worth, once and for all."""

    @abstractmethod
    def of_new(self, new: Written) -> Tensor:
        """What new tokens are worth. (rows, tokens, kv_heads), fp32"""

    def newest(self, new: Written) -> Tensor:
        return self.of_new(new)[:, 0].contiguous()

    def of_all(self, new: Written, held: Held | None) -> Tensor:
        own = self.of_new(new).transpose(1, 2)
        return own if held is None else torch.cat((held.worth, own), dim=-1)
