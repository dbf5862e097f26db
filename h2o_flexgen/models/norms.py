"""The norms of decoder blocks: what an architecture's norms do, where they stand in a block, and what checkpoints call them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Weights
from h2o_flexgen.models.layout import Parameters


@dataclass(frozen=True)
class NormKind:
    """What a norm does with its values, (x, weights, name, eps), and which tensors it has."""

    function: Callable[[Tensor, Weights, str, float], Tensor]
    weight: bool = True
    bias: bool = False
    is_wide: bool = False  # its weight has more bits than hidden states may have

    def parameters(self, name: str, *shape: int) -> Parameters:
        if self.is_wide:
            return layout.wide(f"{name}.weight", *shape)
        return layout.norm(name, *shape, weight=self.weight, bias=self.bias)


RMS = NormKind(tensor_ops.rms_norm)
RMS_FROM_ONE = NormKind(tensor_ops.rms_norm_from_one)  # a weight says what is added to one
RMS_WIDE = NormKind(tensor_ops.rms_norm, is_wide=True)  # in 16 bits nothing but the outcome is rounded
LAYER = NormKind(tensor_ops.layer_norm, bias=True)
LAYER_UNBIASED = NormKind(tensor_ops.layer_norm)
LAYER_BARE = NormKind(tensor_ops.layer_norm, weight=False)


@dataclass(frozen=True)
class NormPlaces:
    """The names of the norms of a block, by where they stand; None: there is none."""

    before_attention: str | None = "input_layernorm"
    behind_attention: str | None = None  # of what attention adds to the hidden states
    before_mlp: str | None = "post_attention_layernorm"
    behind_mlp: str | None = None


BEFORE = NormPlaces()
BEHIND = NormPlaces(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
ONE_BEFORE = NormPlaces(before_mlp=None)  # where the mlp stands beside attention
