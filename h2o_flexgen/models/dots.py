"""dots.llm1: the attention of Qwen3 before a mixture as in DeepSeek-V3. The router chooses groups of experts first."""

from __future__ import annotations

from typing import ClassVar

from h2o_flexgen.checkpoints.stored_architecture import (
    BY_SIGMOID,
    DENSE_BLOCKS,
    GATING,
    HEAD_NORMS,
    MLP,
    OF_MIXTURES,
    WEIGHTS_SCALE,
    GgufArchitecture,
    shared_expert,
    weights,
)
from h2o_flexgen.models.config_values import Bounds, Config
from h2o_flexgen.models.deepseek import GROUP_COUNT, GROUPED, KEYS, DeepSeekV3
from h2o_flexgen.models.glm import CORRECTION_IN_FILES, CorrectedMixture
from h2o_flexgen.models.llama import Traits
from h2o_flexgen.models.mixture import SHARED, Mixture
from h2o_flexgen.models.qwen import Qwen3

OF_ITS_MIXTURE = ("n_routed_experts", "n_shared_experts", "first_k_dense_replace", "moe_intermediate_size")
OF_ITS_ROUTER = ("routed_scaling_factor", "n_group", "topk_group")


class Dots1(CorrectedMixture):
    bounds: ClassVar[Bounds] = GROUPED
    gguf = GgufArchitecture(
        "dots1",
        {**OF_MIXTURES, **weights(HEAD_NORMS, MLP, shared_expert(SHARED)), **CORRECTION_IN_FILES},
        keys={key: KEYS[key] for key in (*OF_ITS_MIXTURE, *OF_ITS_ROUTER)},
        heeds={GATING: (BY_SIGMOID,), DENSE_BLOCKS: None, WEIGHTS_SCALE: None, GROUP_COUNT: None},
        has_experts=True,
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Qwen3.traits_of(config)

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        return DeepSeekV3.mixture_of(config)

    @staticmethod
    def has_experts(config: Config, block: int) -> bool:
        return DeepSeekV3.has_experts(config, block)
