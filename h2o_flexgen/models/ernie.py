"""ERNIE 4.5: LLaMA in which neighbours are rotated together. Where it has experts, a correction is added to their shares of a
softmax, and changes which ones are chosen alone. Its first blocks have a single mlp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import (
    ATTENTION,
    DENSE_BLOCKS,
    MLP,
    OF_LLAMA,
    OF_MIXTURES,
    GgufArchitecture,
    biases,
    shared_expert,
    weights,
)
from h2o_flexgen.kernels.routing import SOFTMAX_OF_ALL, RouterRule, RouterScores
from h2o_flexgen.models import layout
from h2o_flexgen.models.base import Weights
from h2o_flexgen.models.config_values import BLOCKS, MOST_EXPERTS, Bounds, Config, Number, Whole
from h2o_flexgen.models.glm import CORRECTION, CORRECTION_IN_FILES, CorrectedMixture
from h2o_flexgen.models.layout import Parameters
from h2o_flexgen.models.llama import Decoder, Traits
from h2o_flexgen.models.mixture import SHARED, Mixture, MixtureOfExperts

STEP = "interleave_moe_layer_step"
LEAST_SUM = Number(0.0, 1e-6)  # of shares, below which it would be another one


class Ernie(Decoder):
    rotates_neighbours = True
    gguf = GgufArchitecture(
        "ernie4_5",
        {**OF_LLAMA, **biases(ATTENTION, MLP)},
        keys={"use_bias": lambda said: "blk.0.attn_q.bias" in said.tensors},
        is_interleaved=True,
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        has_bias = bool(config.use_bias)
        return Traits(has_bias, has_bias, has_bias)


class ErnieMoe(CorrectedMixture):
    rotates_neighbours = True
    bounds: ClassVar[Bounds] = {
        "moe_num_shared_experts": Whole(MOST_EXPERTS, may_be_zero=True),
        "moe_layer_interval": Whole(BLOCKS),
        "moe_norm_min": LEAST_SUM,
    }
    called: ClassVar[Mapping[str, str]] = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
    patterns: ClassVar[Mapping[str, str]] = {r"\.mlp\.(gate\.)?moe_statics\.e_score_correction_bias": f".{CORRECTION}"}
    gguf = GgufArchitecture(
        "ernie4_5-moe",
        {**OF_LLAMA, **OF_MIXTURES, **weights(shared_expert(SHARED)), **CORRECTION_IN_FILES},
        keys={
            "use_bias": lambda said: False,
            "num_experts": lambda said: said.experts,
            "moe_intermediate_size": lambda said: said.whole("expert_feed_forward_length"),
            "moe_num_shared_experts": lambda said: said.whole("expert_shared_count", 0),
            "moe_layer_interval": lambda said: said.whole(STEP, 1),
            "moe_layer_start_index": lambda said: said.whole(DENSE_BLOCKS, 0),
            "moe_layer_end_index": lambda said: said.blocks - 1,
        },
        heeds={DENSE_BLOCKS: None},
        has_experts=True,
        sums_to_one=True,
        is_interleaved=True,
        single_rows=(CORRECTION,),
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return replace(Ernie.traits_of(config), head_bias=bool(config.use_bias))

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        inner, shared = config.moe_intermediate_size, config.moe_num_shared_experts or 0
        return Mixture(config.num_experts, config.num_experts_per_tok, inner, sums_to_one=True, shared=inner * shared)

    @staticmethod
    def has_experts(config: Config, block: int) -> bool:
        first, last, every = config.moe_layer_start_index, config.moe_layer_end_index, config.moe_layer_interval
        return bool(first <= block <= last and (block + 1) % every == 0)

    def routing(self, width: int) -> Parameters:
        return layout.joined(MixtureOfExperts.routing(self, width), layout.wide(CORRECTION, 1, self._mixture.experts))

    def scored(self, hidden: Tensor, x: Tensor, weights: Weights) -> RouterScores:
        made = super().scored(hidden, x, weights)
        return made._replace(correction=None if made.correction is None else made.correction.flatten())

    @property
    def router_rule(self) -> RouterRule:
        return RouterRule(SOFTMAX_OF_ALL, sums_to_one=True)
