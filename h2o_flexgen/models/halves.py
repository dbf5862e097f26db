"""Attention layers in two halves: what makes queries, keys and values and has them attended, and what uses the outcome.

A layer is both, one behind the other. Where the host attends (`ModelSpec.cut_at_attention`), each half belongs to a layer of
its own, so that a whole pass over the other batches fits between them, and no weights are held any longer for it. The first
one then hands on hidden states with the outcome of attention behind them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.models.base import Given, Weights


class InHalves(ABC):
    """An architecture says what is before the attention of a layer and what is behind it."""

    spec: ModelSpec

    @abstractmethod
    def attended(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        """What `given.attend` makes of the hidden states' queries, keys and values."""

    @abstractmethod
    def with_attended(self, hidden: Tensor, out: Tensor, weights: Weights) -> Tensor:
        """The hidden states behind the layer, from those before it and what was attended."""

    def attention(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        return self.with_attended(hidden, self.attended(hidden, weights, given), weights)

    def before_attended(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        return torch.cat((hidden, self.attended(hidden, weights, given)), dim=-1)

    def behind_attended(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        width = self.spec.width
        return self.with_attended(hidden[..., :width], hidden[..., width:].contiguous(), weights)
