"""Mistral and Mixtral: LLaMA where all layers have a window, or none; the second with experts. Some layers of
Ministral 8B have a window. Queries of Ministral 3 are longer the more text stands before them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import LOG_MULTIPLIER, OF_LLAMA, OF_MIXTURES, TEMPERATURE
from h2o_flexgen.models.base import Weights
from h2o_flexgen.models.config_values import Config, same_windows, windows_by_kind
from h2o_flexgen.models.llama import Decoder, Llama, Traits
from h2o_flexgen.models.mixture import Mixture, MixtureOfExperts
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.models.rotary import QUERY_SHARE, Rotary
from h2o_flexgen.models.whole_configs import COUNT, LEFT, MISTRAL, NUMBERS, Usual

PATTERNS_OF_MIXTRAL: Mapping[str, str] = {
    r"\.block_sparse_moe\.gate\.": ".mlp.gate.",
    r"\.block_sparse_moe\.experts\.(\d+)\.w1\.": r".mlp.experts.\1.gate_proj.",
    r"\.block_sparse_moe\.experts\.(\d+)\.w2\.": r".mlp.experts.\1.down_proj.",
    r"\.block_sparse_moe\.experts\.(\d+)\.w3\.": r".mlp.experts.\1.up_proj.",
    r"\.block_sparse_moe\.experts\.": ".mlp.experts.",
}


class Mistral(Decoder):
    gguf = replace(Llama.gguf, tensors=OF_LLAMA, has_window=True)
    usual = MISTRAL

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(windows=same_windows(config))


class Ministral(Decoder):
    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(windows=windows_by_kind(config))


class Ministral3(Decoder):
    gguf = replace(
        Llama.gguf,
        name="mistral3",
        tensors=OF_LLAMA,
        heeds=dict.fromkeys((TEMPERATURE, LOG_MULTIPLIER)),
        more_of_rope=lambda said: {
            "mscale": 1.0,
            "mscale_all_dim": said.number(LOG_MULTIPLIER, 0.0),
            QUERY_SHARE: said.number(TEMPERATURE, 0.0),
        },
    )

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        super().__init__(config, dtype, sep_layer, name)
        (rope,) = self.ropes_of(config)
        self._longer = rope.of_queries(self._rotary)

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(windows=same_windows(config))

    def new_tokens(self, rotary: Rotary | None, hidden: Tensor, weights: Weights) -> NewTokens:
        return replace(super().new_tokens(rotary, hidden, weights), query_rotation=self._longer)


class Mixtral(MixtureOfExperts):
    usual: ClassVar[Mapping[str, Usual]] = {
        **MISTRAL,
        "rms_norm_eps": Usual(1e-5, (float,)),
        "rope_theta": Usual(1e6, NUMBERS),
        "sliding_window": Usual(None, COUNT),
        "num_local_experts": Usual(8, (int,)),
        "num_experts_per_tok": Usual(2, (int,)),
        "num_experts": LEFT,
    }
    patterns: ClassVar[Mapping[str, str]] = PATTERNS_OF_MIXTRAL
    gguf = replace(
        Llama.gguf,
        tensors=OF_MIXTURES,
        keys={"num_local_experts": lambda said: said.experts, "intermediate_size": lambda said: said.expert_width},
        has_experts=True,
        sums_to_one=True,
        has_window=None,
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Mistral.traits_of(config)

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        return Mixture(config.num_local_experts, config.num_experts_per_tok, config.intermediate_size, sums_to_one=True)
