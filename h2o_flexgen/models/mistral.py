"""Mistral and Mixtral: LLaMA where all layers have a window, or none; the second with experts. Some layers of
Ministral 8B have a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from h2o_flexgen.checkpoints.stored_architecture import OF_LLAMA, OF_MIXTURES
from h2o_flexgen.models.config_values import Config
from h2o_flexgen.models.llama import Decoder, Llama, Traits
from h2o_flexgen.models.mixture import Mixture, MixtureOfExperts
from h2o_flexgen.models.windows import same_windows, windows_by_kind

PATTERNS_OF_MIXTRAL: Mapping[str, str] = {
    r"\.block_sparse_moe\.gate\.": ".mlp.gate.",
    r"\.block_sparse_moe\.experts\.(\d+)\.w1\.": r".mlp.experts.\1.gate_proj.",
    r"\.block_sparse_moe\.experts\.(\d+)\.w2\.": r".mlp.experts.\1.down_proj.",
    r"\.block_sparse_moe\.experts\.(\d+)\.w3\.": r".mlp.experts.\1.up_proj.",
    r"\.block_sparse_moe\.experts\.": ".mlp.experts.",
}


class Mistral(Decoder):
    gguf = replace(Llama.gguf, tensors=OF_LLAMA, has_window=True)

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(windows=same_windows(config))


class Ministral(Decoder):
    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(windows=windows_by_kind(config))


class Mixtral(MixtureOfExperts):
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
