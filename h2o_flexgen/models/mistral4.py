"""Mistral Small 4: DeepSeek-V3 with a router that shares by a softmax, and queries that are longer the more text stands before
them."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import BY_SOFTMAX, GATING, LOG_MULTIPLIER, TEMPERATURE, GgufModel
from h2o_flexgen.kernels.routing import RouterScores
from h2o_flexgen.models.base import Weights
from h2o_flexgen.models.config_values import Bounds, Config, Flag
from h2o_flexgen.models.deepseek import BEST_OF_GROUP, IN_GGUF, DeepSeek, stretch
from h2o_flexgen.models.latent import Latents
from h2o_flexgen.models.mixture import ExpertGroups, Mixture
from h2o_flexgen.models.rotary import QUERY_SHARE, Rope, Rotary


def _more_of_rope(said: GgufModel) -> dict[str, float]:
    return {**stretch(said), QUERY_SHARE: said.number(TEMPERATURE, 0.0)}


class Mistral4(DeepSeek):
    bounds: ClassVar[Bounds] = {**DeepSeek.bounds, "rope_interleave": Flag()}
    gguf = replace(
        IN_GGUF,
        name="mistral4",
        more_of_rope=_more_of_rope,
        heeds={**IN_GGUF.heeds, GATING: (0, BY_SOFTMAX), **dict.fromkeys((TEMPERATURE, LOG_MULTIPLIER))},
    )

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        super().__init__(config, dtype, sep_layer, name)
        (rope,), own = self.ropes_of(config), self._latents
        if own.of_key % 2 or own.of_query % 2:
            raise ValueError(f"keys have {own.of_key} values and queries {own.of_query}, no pairs; give another model")
        self._lengths = rope.of_queries(Rotary(torch.zeros(own.of_key // 2)))  # by which no pair is turned

    # -- what it reads of a config ---------------------------------------------------------------------------------------

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        inner, groups = config.moe_intermediate_size, ExpertGroups.of(config, config.n_routed_experts, BEST_OF_GROUP)
        sizes = config.n_routed_experts, config.num_experts_per_tok, inner
        shared, factor = inner * (config.n_shared_experts or 0), float(config.routed_scaling_factor)
        return Mixture(*sizes, bool(config.norm_topk_prob), shared=shared, groups=groups, factor=factor)

    def ropes_of(self, config: Config) -> list[Rope]:
        """Its configs say which share of a query is rotated: it is the part that is rotated as a whole."""
        own, ropes = Latents.of(config), super().ropes_of(config)
        if any(rope.share != 1.0 and int(own.of_query * rope.share) != own.rotated for rope in ropes):
            raise ValueError(
                f"partial_rotary_factor is {ropes[0].share:g}, but {own.rotated} of {own.of_query} values are rotated; "
                "download the model again"
            )
        return [replace(rope, share=1.0) for rope in ropes]

    # -- the functions of layers -------------------------------------------------------------------------------------------

    def scored(self, hidden: Tensor, x: Tensor, weights: Weights) -> RouterScores:
        """Groups rank by shares, where there are some: with a correction, though it is none, shares come first."""
        made = super().scored(hidden, x, weights)
        if self._mixture.groups.count == 1:
            return made
        return made._replace(correction=made.scores.new_zeros(self._mixture.experts, dtype=torch.float32))
