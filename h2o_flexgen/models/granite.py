"""Granite 3, with experts and without: LLaMA with factors of embeddings, scores, residuals and logits in its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import ClassVar

from h2o_flexgen.checkpoints.stored_architecture import OF_LLAMA, OF_MIXTURES, GgufArchitecture, Said
from h2o_flexgen.core.allowed_values import EOS
from h2o_flexgen.core.hints import shown
from h2o_flexgen.models.config_values import Bounds, Config, Number
from h2o_flexgen.models.llama import Decoder, Traits, head_width
from h2o_flexgen.models.mixture import Mixture, MixtureOfExperts
from h2o_flexgen.models.whole_configs import DECODERS, OFF, ONE, Usual, end_of_text

EMBEDDING, ATTENTION, RESIDUAL = "embedding_multiplier", "attention_multiplier", "residual_multiplier"
LOGITS = "logits_scaling"  # by which they are divided
BOUNDS: Bounds = dict.fromkeys((EMBEDDING, ATTENTION, RESIDUAL, LOGITS), Number(1e-6, 1e6))
KEYS: Mapping[str, Said] = {
    EMBEDDING: lambda said: said.number("embedding_scale", 0.0) or 1.0,
    ATTENTION: lambda said: said.number("attention.scale"),
    RESIDUAL: lambda said: said.number("residual_scale", 0.0) or 1.0,
    LOGITS: lambda said: said.number("logit_scale"),
}
IN_GGUF = GgufArchitecture(
    "granite",
    OF_LLAMA,
    KEYS,
    heeds={
        **dict.fromkeys(("embedding_scale", "attention.scale", "residual_scale", "logit_scale")),
        "rope.scaling.finetuned": (True,),  # of these models False says that nothing is rotated
    },
    is_interleaved=True,
)


def multiplied(config: Config, mlp_bias: bool = False) -> Traits:
    for key in BOUNDS:
        if getattr(config, key) is None:
            raise ValueError(f"{key} is {shown(None)}, which is no number; download the model again")
    return Traits(
        config.attention_bias,
        config.attention_bias,
        mlp_bias,
        embedding_scale=config.embedding_multiplier,
        query_scale=config.attention_multiplier * sqrt(head_width(config)),
        residual_scale=config.residual_multiplier,
        logit_scale=1.0 / config.logits_scaling,
    )


USUAL: Mapping[str, Usual] = {**DECODERS, **dict.fromkeys(BOUNDS, ONE), "attention_bias": OFF, EOS: end_of_text(2)}


class Granite(Decoder):
    usual: ClassVar[Mapping[str, Usual]] = {**USUAL, "mlp_bias": OFF}
    bounds: ClassVar[Bounds] = BOUNDS
    gguf = IN_GGUF

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return multiplied(config, config.mlp_bias)


class GraniteMoe(MixtureOfExperts):
    usual: ClassVar[Mapping[str, Usual]] = {
        **USUAL,
        "num_local_experts": Usual(8, (int,)),
        "num_experts_per_tok": Usual(2, (int,)),
    }
    bounds: ClassVar[Bounds] = BOUNDS
    patterns: ClassVar[Mapping[str, str]] = {
        r"\.block_sparse_moe\.router(\.layer)?\.": ".mlp.gate.",
        r"\.block_sparse_moe\.input_linear\.weight": ".mlp.experts.gate_up_proj",
        r"\.block_sparse_moe\.output_linear\.weight": ".mlp.experts.down_proj",
        r"\.block_sparse_moe\.experts\.": ".mlp.experts.",
    }
    gguf: ClassVar[GgufArchitecture | None] = replace(
        IN_GGUF,
        name="granitemoe",
        tensors=OF_MIXTURES,
        keys={**KEYS, "num_local_experts": lambda said: said.experts, "intermediate_size": lambda said: said.expert_width},
        has_experts=True,
        sums_to_one=True,
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return multiplied(config)

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        chosen, inner = config.num_experts_per_tok, config.intermediate_size
        return Mixture(config.num_local_experts, chosen, inner, sums_to_one=True, of_chosen=True)
