"""Judge: how much a token is worth to a KV head, as it is known when the token is written. A policy ranks by it, or weighs the
attention that the token gets with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.kernels.operations import rotate
from h2o_flexgen.kernels.rotate import Turn


@dataclass(frozen=True, eq=False)
class Written:
    """New tokens of each row, as a judge may look at them. Pads may stand behind them."""

    x: Tensor | None  # (rows, tokens, width): what the layer makes queries, keys and values of
    k: Tensor  # (rows, tokens, kv_heads, head_dim)
    v: Tensor  # alike, before they are packed
    turn: Turn | None  # by which keys are still to be rotated, if they are kept rotated

    @cached_property
    def keys(self) -> Tensor:
        """Keys as they are kept, before they are packed."""
        return self.k if self.turn is None else rotate(self.k, self.turn)


class Held(NamedTuple):
    """Tokens that a pass of several tokens finds, oldest first; behind those of a row that has fewer lie others."""

    keys: Tensor  # (rows, kv_heads, held, head_dim), as they are kept, unpacked
    values: Tensor  # alike
    worth: Tensor  # (rows, kv_heads, held), fp32
    exist: Tensor  # (rows, 1, held)


class Judge(ABC):
    @abstractmethod
    def of_new(self, new: Written) -> Tensor:
        """What new tokens are worth by themselves. (rows, tokens, kv_heads), fp32"""

    @abstractmethod
    def of_heads(self, heads: Tensor) -> Judge:
        """The judge of some of the layer's KV heads, by their numbers."""

    def newest(self, new: Written) -> Tensor:
        """What each row's only new token is worth, in decode. (rows, kv_heads), fp32"""
        return self.of_new(new)[:, 0].contiguous()

    def of_all(self, new: Written, held: Held | None) -> Tensor:
        """What held tokens are worth after a pass of several tokens, and behind them the new ones. (rows, kv_heads, held +
        tokens), fp32"""
        own = self.of_new(new).transpose(1, 2)
        return own if held is None else torch.cat((held.worth, own), dim=-1)
