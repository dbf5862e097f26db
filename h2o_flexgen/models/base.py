"""What the engine asks of an architecture, and what an architecture may ask of the engine.

A model is a list of layers (its ModelSpec) and one pure function per kind of layer over a dict of weights. It knows neither
where weights come from nor how many keys are kept: attention is done by the `attend` that it is handed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from h2o_flexgen.core.model_spec import ModelSpec

Rotate = Callable[[Tensor, Tensor], Tensor]  # (x (rows, tokens, heads, head_dim), positions (rows, tokens)) -> same shape as x


class Matrix(Protocol):
    """A matrix that knows how rows are multiplied with it: one that is packed, say."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x (..., inputs) -> (..., outputs)."""


Weights = Mapping[str, Tensor | Matrix]  # what is no plain tensor is for `ops.linear` alone


class Attend(Protocol):
    """Appends the new keys and values and attends: q (rows, tokens, heads, head_dim), k and v (rows, tokens, kv_heads,
    head_dim) -> (rows, tokens, heads * head_dim). Rotary models hand over q and k unrotated and say how to rotate them,
    because which positions they stand at is the cache's business. Scores are scaled by head_dim ** -0.5."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rotate: Rotate | None = None) -> Tensor: ...


class Model(Protocol):
    spec: ModelSpec

    def embed(self, tokens: Tensor, positions: Tensor, weights: Weights) -> Tensor:
        """tokens and positions (rows, tokens), positions from 0 -> hidden (rows, tokens, width). Tokens are rows of the table
        among the weights, which need not have them all."""

    def attention(self, hidden: Tensor, weights: Weights, attend: Attend) -> Tensor: ...

    def mlp(self, hidden: Tensor, weights: Weights) -> Tensor: ...

    def head(self, hidden: Tensor, weights: Weights) -> Tensor:
        """hidden (rows, width) of the last positions -> logits (rows, vocab), in the dtype of the model; of a part of the
        vocabulary, where the table among the weights is a part."""


def block(model: Model, hidden: Tensor, weights: Weights, attend: Attend) -> Tensor:
    """Attention and mlp as one layer of the schedule (sep_layer off): its weights are both their weights."""
    return model.mlp(model.attention(hidden, weights, attend), weights)


def embed_rows(model: Model, looked_up: Tensor, positions: Tensor, weights: Weights, table: str) -> Tensor:
    """The embedding of tokens whose rows of the table have been looked up already: looked_up (rows, tokens, width)."""
    found = looked_up.flatten(0, 1)
    places = torch.arange(len(found), device=found.device).view(looked_up.shape[:2])
    return model.embed(places, positions, {**weights, table: found})


def head(model: Model, hidden: Tensor, parts: Iterable[Weights]) -> Tensor:
    """The logits, where the head's weights come once for each part of the vocabulary."""
    logits = [model.head(hidden, weights) for weights in parts]
    return logits[0] if len(logits) == 1 else torch.cat(logits, dim=-1)
