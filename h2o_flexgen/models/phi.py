"""Phi-1 to Phi-2: attention and an mlp without a gate stand side by side behind one norm. A part of each head is rotated. All
products have biases, the one that makes logits too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from h2o_flexgen.checkpoints.stored_architecture import (
    ATTENTION,
    BIAS_OF_HEAD,
    BIAS_OF_LAST_NORM,
    FIRST_NORM,
    LAYER_EPS,
    UNGATED_MLP,
    GgufArchitecture,
    biases,
    weights,
)
from h2o_flexgen.models.config_values import Config, refuse_other_heads
from h2o_flexgen.models.llama import LAYER, ONE_BEFORE, Decoder, Traits


class Phi(Decoder):
    rotates_parts = True
    patterns: ClassVar[Mapping[str, str]] = {
        r"\.self_attn\.dense\.": ".self_attn.o_proj.",
        r"\.self_attn\.(q|k)_layernorm\.": r".self_attn.\1_norm.",
        r"\.mlp\.fc1\.": ".mlp.up_proj.",
        r"\.mlp\.fc2\.": ".mlp.down_proj.",
        r"\bfinal_layernorm\.": "norm.",
    }
    gguf = GgufArchitecture(
        "phi2",
        {**weights(ATTENTION, UNGATED_MLP, FIRST_NORM), **biases(ATTENTION, UNGATED_MLP, FIRST_NORM)},
        keys={
            "layer_norm_eps": lambda said: said.number(LAYER_EPS),
            "hidden_act": lambda said: "gelu_new",
            "qk_layernorm": lambda said: False,
        },
        rotates_parts=True,
        outside={**BIAS_OF_LAST_NORM, **BIAS_OF_HEAD},
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        if config.qk_layernorm:
            refuse_other_heads(config)
        return Traits(
            True,
            True,
            True,
            gated=False,
            norm=LAYER,
            norms=ONE_BEFORE,
            is_parallel=True,
            head_norm=bool(config.qk_layernorm),
            head_bias=True,
        )

    @staticmethod
    def eps_of(config: Config) -> float:
        eps: float = config.layer_norm_eps
        return eps
