"""Judge: how much a token is worth to a KV head, estimated when the token is written. A policy ranks by this worth, or weighs
the attention that the token gets with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Written(NamedTuple):
    """New tokens of each row, as a judge sees them. Pads may follow them."""

    x: Tensor | None  # (rows, tokens, width): the input from which the layer makes queries, keys and values
    k: Tensor  # (rows, tokens, kv_heads, head_dim), before they are packed; after a pass of several tokens as they are kept
    v: Tensor  # alike
    counts: Sequence[int]  # tokens of each row, without pads


class Held(NamedTuple):
    """Tokens held before a pass of several tokens, oldest first. In a row that has fewer, the places after them are
    arbitrary."""

    keys: Tensor  # (rows, kv_heads, held, head_dim), as they are kept, unpacked
    values: Tensor  # alike
    worth: Tensor  # (rows, kv_heads, held), fp32
    counts: Sequence[int]  # tokens that each row has


class Judge(ABC):
    reads_input = False  # whether it needs the input from which the layer makes keys

    @abstractmethod
    def of_heads(self, heads: Tensor) -> Judge:
        """The judge of some of the layer's KV heads, by their numbers."""

    @abstractmethod
    def newest(self, new: Written) -> Tensor:
        """The worth of each row's only new token, in decode. (rows, kv_heads), fp32"""

    @abstractmethod
    def of_all(self, new: Written, held: Held | None) -> Tensor:
        """The worth of held tokens, and then of new tokens, after a pass of several tokens. (rows, kv_heads, held + tokens),
        fp32"""


class OneByOne(Judge):
    """Gives each token its worth independently of the others, once and for all."""

    @abstractmethod
    def of_new(self, new: Written) -> Tensor:
        """The worth of new tokens. (rows, tokens, kv_heads), fp32"""

    def newest(self, new: Written) -> Tensor:
        return self.of_new(new)[:, 0].contiguous()

    def of_all(self, new: Written, held: Held | None) -> Tensor:
        own = self.of_new(new).transpose(1, 2)
        return own if held is None else torch.cat((held.worth, own), dim=-1)
