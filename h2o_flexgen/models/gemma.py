"""Gemma 2 and 3: LLaMA with norms before and behind attention and mlp, all of which count from one, and an embedding that is
scaled. Scores and logits of the second have caps; in the third heads are normalised, and layers with a window have a rotation
of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from h2o_flexgen.core.model_spec import MOST_WIDTH
from h2o_flexgen.models.config_values import SOFTCAP, Bounds, Config, Whole
from h2o_flexgen.models.llama import NEAR, USUAL, AttentionFunctions, Decoder, Traits, head_width
from h2o_flexgen.models.norms import RMS_FROM_ONE, NormPlaces
from h2o_flexgen.models.rotary import Rope
from h2o_flexgen.models.windows import FULL, SLIDING, windows_by_kind

AROUND = NormPlaces(
    behind_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    behind_mlp="post_feedforward_layernorm",
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
        super().__init__(config, dtype, sep_layer, name)
        rounded = torch.tensor(self._traits.embedding_scale, dtype=getattr(torch, dtype))  # as the model was trained with
        self._embedding_scale = float(rounded)

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(
            config.attention_bias,
            config.attention_bias,
            norm=RMS_FROM_ONE,
            norms=AROUND,
            windows=windows_by_kind(config),
            embedding_scale=config.hidden_size**0.5,
            query_scale=math.sqrt(head_width(config) / config.query_pre_attn_scalar),
            logit_cap=getattr(config, "final_logit_softcapping", None),
        )

    @staticmethod
    def activation_of(config: Config) -> str:
        name: str = config.hidden_activation
        return name


class Gemma2(Gemma):
    @staticmethod
    def traits_of(config: Config) -> Traits:
        return replace(Gemma.traits_of(config), attention_cap=config.attn_logit_softcapping)


class Gemma3(Gemma):
    @staticmethod
    def traits_of(config: Config) -> Traits:
        return replace(Gemma.traits_of(config), head_norm=True)  # it has a word for a cap of scores, and no use

    def ropes_of(self, config: Config) -> Sequence[Rope]:
        return [Rope.of(config, kind, partly=self.rotates_parts) for kind in (FULL, SLIDING)]

    def attends_by(self, config: Config, block: int) -> AttentionFunctions:
        return NEAR if config.layer_types[block] == SLIDING else USUAL
