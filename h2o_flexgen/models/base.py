"""What the engine asks of an architecture, and what an architecture may ask of the engine.

A model is a list of layers (its ModelSpec) and one pure function per kind of layer over a dict of weights. It knows neither
where weights come from nor how many keys are kept: attention is done by the `attend` that it is handed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from h2o_flexgen.planning.model_spec import ModelSpec

Weights = Mapping[str, Tensor]
Rotate = Callable[[Tensor, Tensor], Tensor]  # (x (rows, tokens, heads, head_dim), positions (rows, tokens)) -> same shape as x


class Attend(Protocol):
    """Appends the new keys and values and attends: q (rows, tokens, heads, head_dim), k and v (rows, tokens, kv_heads,
    head_dim) -> (rows, tokens, heads * head_dim). Rotary models hand over q and k unrotated and say how to rotate them,
    because which positions they stand at is the cache's business. Scores are scaled by head_dim ** -0.5."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None = None) -> Tensor: ...


class Model(Protocol):
    spec: ModelSpec

    def embed(self, tokens: Tensor, positions: Tensor, weights: Weights) -> Tensor:
        """tokens and positions (rows, tokens), positions from 0 -> hidden (rows, tokens, width)."""

    def attention(self, hidden: Tensor, weights: Weights, attend: Attend) -> Tensor: ...

    def mlp(self, hidden: Tensor, weights: Weights) -> Tensor: ...

    def head(self, hidden: Tensor, weights: Weights) -> Tensor:
        """hidden (rows, width) of the last positions -> logits (rows, vocab), in the dtype of the model."""


def block(model: Model, hidden: Tensor, weights: Weights, attend: Attend) -> Tensor:
    """Attention and mlp as one layer of the schedule (sep_layer off): its weights are both their weights."""
    return model.mlp(model.attention(hidden, weights, attend), weights)
