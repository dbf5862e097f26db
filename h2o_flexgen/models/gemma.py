"""Gemma 2 and 3: LLaMA with norms before and behind attention and mlp, all of which count from one, and an embedding that is
scaled. Scores and logits of the second have caps; in the third heads are normalised, and layers with a window have a rotation
of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from h2o_flexgen.core.model_spec import MOST_WIDTH, LayerSpec
from h2o_flexgen.kernels.operations import add_scaled
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Given, Weights
from h2o_flexgen.models.config_values import SOFTCAP, Bounds, Config, Whole
from h2o_flexgen.models.layout import Origin
from h2o_flexgen.models.llama import FULL, MLP, SLIDING, Decoder, Traits, attention_parameters, head_width, windows_by_kind
from h2o_flexgen.models.rotary import Rope, Rotary

BEHIND_ATTENTION, BEFORE_MLP, BEHIND_MLP = (
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class Gemma(Decoder):
    """What both have in common."""

    bounds: ClassVar[Bounds] = {
        "query_pre_attn_scalar": Whole(MOST_WIDTH),
        "final_logit_softcapping": SOFTCAP,
        "attn_logit_softcapping": SOFTCAP,
    }

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        if getattr(config, "use_bidirectional_attention", False):
            raise ValueError("use_bidirectional_attention is set, but tokens are made one after the other; take another model")
        self._slides = [kind == SLIDING for kind in config.layer_types]
        super().__init__(config, dtype, sep_layer, name)
        near, *_ = self.ropes_of(config)
        self._rotary_near = near.rotary(self.spec.head_dim)
        rounded = torch.tensor(self._traits.embedding_scale, dtype=getattr(torch, dtype))  # as the model was trained with
        self._embedding_scale = float(rounded)

    # -- what it says otherwise --------------------------------------------------------------------------------------------

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(
            config.attention_bias,
            config.attention_bias,
            windows=windows_by_kind(config),
            embedding_scale=config.hidden_size**0.5,
            query_scale=math.sqrt(head_width(config) / config.query_pre_attn_scalar),
            logit_cap=getattr(config, "final_logit_softcapping", None),
        )

    @staticmethod
    def activation_of(config: Config) -> str:
        name: str = config.hidden_activation
        return name

    def rotary_of(self, config: Config) -> Rotary:
        *_, everything = self.ropes_of(config)
        return everything.rotary(self.spec.head_dim)

    def normed(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        return tensor_ops.rms_norm_from_one(x, weights, name, self._eps)

    # -- the functions of layers -------------------------------------------------------------------------------------------

    def near_attention(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        """The attention of a layer with a window."""
        return self.with_attended(hidden, self.attended_by(self._rotary_near, hidden, weights, given), weights)

    def before_near_attended(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        """The first half of it, as `InHalves` has halves."""
        return torch.cat((hidden, self.attended_by(self._rotary_near, hidden, weights, given)), dim=-1)

    def with_attended(self, hidden: Tensor, out: Tensor, weights: Weights) -> Tensor:
        return add_scaled(self.normed(tensor_ops.linear(out, weights, "self_attn.o_proj"), weights, BEHIND_ATTENTION), hidden)

    def mlp(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        out = self.gated(self.normed(hidden, weights, BEFORE_MLP), weights, MLP)
        return add_scaled(self.normed(out, weights, BEHIND_MLP), hidden)

    # -- its layers --------------------------------------------------------------------------------------------------------

    def attention_layer(
        self, width: int, q_width: int, kv_width: int, head_dim: int, origin: Origin, window: int | None
    ) -> LayerSpec:
        before, behind = attention_parameters(width, q_width, kv_width, head_dim, self._traits)
        own = layout.attention(
            before, layout.joined(behind, layout.norm(BEHIND_ATTENTION, width, bias=False)), width, origin, window
        )
        if origin.block is None or not self._slides[origin.block]:
            return own
        whole, first_half = Gemma.near_attention.__name__, Gemma.before_near_attended.__name__
        return replace(own, functions=(whole,), halves=(whole, first_half, *own.halves[2:]))

    def mlp_layer(self, width: int, inner: int, origin: Origin) -> LayerSpec:
        norms = (layout.norm(name, width, bias=False) for name in (BEFORE_MLP, BEHIND_MLP))
        return layout.mlp(Decoder.mlp, layout.joined(*norms, MLP.parameters(width, inner)), width, inner, origin)


class Gemma2(Gemma):
    @staticmethod
    def traits_of(config: Config) -> Traits:
        return replace(Gemma.traits_of(config), attention_cap=config.attn_logit_softcapping)


class Gemma3(Gemma):
    @staticmethod
    def traits_of(config: Config) -> Traits:
        return replace(Gemma.traits_of(config), head_norm=True)  # it has a word for a cap of scores, and no use

    def ropes_of(self, config: Config) -> Sequence[Rope]:
        """The rotations of layers with a window, and of those that see everything."""
        return [Rope.of(config, kind, partly=self.rotates_parts) for kind in (SLIDING, FULL)]
