"""OLMo 1 to 3: the first is LLaMA with norms that have no weights. The others have norms behind attention and mlp, and all
heads of a query, and of a key, are normalised at once. In the third, layers with a window have a rotation of their own. OLMoE
is LLaMA with experts, where all heads are normalised at once, too, and then limited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import NoneType
from typing import ClassVar

from h2o_flexgen.checkpoints.stored_architecture import (
    ATTENTION,
    BEHIND_BOTH,
    CLIP,
    HEAD_NORMS,
    MLP,
    NEAR_THETA,
    OF_MIXTURES,
    GgufArchitecture,
    weights,
)
from h2o_flexgen.core.allowed_values import EOS
from h2o_flexgen.models.config_values import Config, kinds_in, windows_by_kind
from h2o_flexgen.models.llama import BEHIND, LAYER_BARE, Decoder, NearRotated, Traits
from h2o_flexgen.models.mixture import Mixture, MixtureOfExperts
from h2o_flexgen.models.whole_configs import DECODERS, LEFT, OFF, Usual, end_of_text

EPS = 1e-5  # of the first, which no config says


USUAL: Mapping[str, Usual] = {**DECODERS, "attention_bias": OFF, EOS: end_of_text(50279)}
CLIPPED = {"clip_qkv": Usual(None, (float, int, NoneType))}
NORMED = {"rms_norm_eps": Usual(1e-5, (float,))}


class Olmo(Decoder):
    usual: ClassVar[Mapping[str, Usual]] = {**USUAL, **CLIPPED}
    gguf = GgufArchitecture(
        "olmo",
        weights(ATTENTION, MLP),
        keys={"clip_qkv": lambda said: said.number(CLIP, 0.0) or None},
        heeds={CLIP: None},
        is_interleaved=True,
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(config.attention_bias, config.attention_bias, norm=LAYER_BARE, clip=config.clip_qkv)

    @staticmethod
    def eps_of(config: Config) -> float:
        return EPS


class Olmo2(Decoder):
    usual: ClassVar[Mapping[str, Usual]] = {**USUAL, **NORMED}
    gguf = GgufArchitecture("olmo2", weights(ATTENTION, MLP, BEHIND_BOTH, HEAD_NORMS), has_window=False)

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(config.attention_bias, config.attention_bias, norms=BEHIND, whole_norm=True)


class Olmo3(NearRotated):
    gguf = replace(
        Olmo2.gguf,
        has_window=True,
        keys={"layer_types": lambda said: kinds_in(said, 4)},
        heeds={NEAR_THETA: None},
        near_rope=lambda said: {
            "rope_type": "default",
            "rope_theta": said.number(NEAR_THETA, said.number("rope.freq_base", 10000.0)),
        },
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return replace(Olmo2.traits_of(config), windows=windows_by_kind(config))


class Olmoe(MixtureOfExperts):
    usual: ClassVar[Mapping[str, Usual]] = {
        **USUAL,
        **NORMED,
        **CLIPPED,
        "num_experts": Usual(64, (int,)),
        "num_experts_per_tok": Usual(8, (int,)),
        "norm_topk_prob": OFF,
        "num_local_experts": LEFT,
    }
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
