"""OLMoE: LLaMA with experts; all heads of a query, and of a key, are normalised at once, and then limited."""

from __future__ import annotations

from h2o_flexgen.checkpoints.stored_architecture import CLIP, HEAD_NORMS, OF_MIXTURES, GgufArchitecture, weights
from h2o_flexgen.models.config_values import Config
from h2o_flexgen.models.llama import Traits
from h2o_flexgen.models.mixture import Mixture, MixtureOfExperts


class Olmoe(MixtureOfExperts):
    gguf = GgufArchitecture(
        "olmoe",
        {**OF_MIXTURES, **weights(HEAD_NORMS)},
        keys={
            "num_experts": lambda said: said.experts,
            "intermediate_size": lambda said: said.expert_width,
            "clip_qkv": lambda said: said.number(CLIP, 0.0) or None,
        },
        heeds={CLIP: None},
        has_experts=True,
        sums_to_one=False,
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(config.attention_bias, config.attention_bias, whole_norm=True, clip=config.clip_qkv)

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        sums_to_one = bool(config.norm_topk_prob)
        return Mixture(config.num_experts, config.num_experts_per_tok, config.intermediate_size, sums_to_one)
