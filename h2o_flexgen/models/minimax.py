"""MiniMax-M2: a mixture with a router that scores each expert by itself, as in GLM-4.5. All heads of a query, and of a key, are
normalised at once, and a part of each head is rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from h2o_flexgen.checkpoints.stored_architecture import BY_SIGMOID, GATING, HEAD_NORMS, OF_MIXTURES, GgufArchitecture, weights
from h2o_flexgen.models.config_values import Config
from h2o_flexgen.models.glm import CORRECTION, CORRECTION_IN_FILES, CorrectedMixture
from h2o_flexgen.models.llama import Traits
from h2o_flexgen.models.mistral import PATTERNS_OF_MIXTRAL
from h2o_flexgen.models.mixture import Mixture


class MiniMaxM2(CorrectedMixture):
    patterns: ClassVar[Mapping[str, str]] = {
        **PATTERNS_OF_MIXTRAL,
        r"\.(mlp|block_sparse_moe)\.e_score_correction_bias": f".{CORRECTION}",
    }
    gguf = GgufArchitecture(
        "minimax-m2",
        {**OF_MIXTURES, **weights(HEAD_NORMS), **CORRECTION_IN_FILES},
        keys={"num_local_experts": lambda said: said.experts, "intermediate_size": lambda said: said.expert_width},
        heeds={GATING: (0, BY_SIGMOID)},
        has_experts=True,
        sums_to_one=True,
        rotates_parts=True,
    )
    rotates_parts = True

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(whole_norm=True)

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        return Mixture(config.num_local_experts, config.num_experts_per_tok, config.intermediate_size, sums_to_one=True)
