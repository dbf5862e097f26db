"""GLM-4: LLaMA with norms before and behind attention and mlp, and neighbours in a part of each head that are rotated together.
GLM-4.5: a mixture with a router that scores each expert by itself. A correction changes which experts are chosen, but not
their weights. Its first blocks have a single mlp."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import (
    ATTENTION,
    BEHIND_ATTENTION,
    BY_SIGMOID,
    DENSE_BLOCKS,
    EXPERTS,
    FIRST_NORM,
    GATING,
    HEAD_NORMS,
    MLP,
    NORMS_BY_PLACE,
    QKV,
    ROUTER,
    WEIGHTS_SCALE,
    GgufArchitecture,
    biases,
    shared_expert,
    weights,
)
from h2o_flexgen.kernels.routing import SIGMOID_OF_EACH, RouterRule, RouterScores
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Weights
from h2o_flexgen.models.config_values import MOST_EXPERTS, Bounds, Config, Number, Whole
from h2o_flexgen.models.layout import Parameters
from h2o_flexgen.models.llama import NormPlaces, Traits
from h2o_flexgen.models.mixture import SHARED, Mixture, MixtureOfExperts
from h2o_flexgen.models.phi3 import INTO_MLP, OUT_OF_MLP, FusedMlp

CORRECTION = "mlp.gate.e_score_correction_bias"
CORRECTION_IN_FILES = {"exp_probs_b.bias": CORRECTION}
LEAST_SUM = 1e-20  # prevents a division by zero


class CorrectedMixture(MixtureOfExperts):
    """A mixture with such a router."""

    routes_wide = True

    def routing(self, width: int) -> Parameters:
        return layout.joined(super().routing(width), layout.wide(CORRECTION, self._mixture.experts))

    def scored(self, hidden: Tensor, x: Tensor, weights: Weights) -> RouterScores:
        return super().scored(hidden, x, weights)._replace(correction=tensor_ops.plain(weights, CORRECTION))

    @property
    def router_rule(self) -> RouterRule:
        return self.chosen_by(SIGMOID_OF_EACH, LEAST_SUM)


class GlmMoe(CorrectedMixture):
    bounds: ClassVar[Bounds] = {"n_shared_experts": Whole(MOST_EXPERTS), "first_k_dense_replace": Number(0.0, 1e6)}
    gguf = GgufArchitecture(
        "glm4moe",
        {
            **weights(ATTENTION, HEAD_NORMS, MLP, EXPERTS, ROUTER, shared_expert(SHARED), NORMS_BY_PLACE),
            **biases(QKV),
            **CORRECTION_IN_FILES,
        },
        keys={
            "n_routed_experts": lambda said: said.experts,
            "n_shared_experts": lambda said: said.whole("expert_shared_count"),
            "first_k_dense_replace": lambda said: said.whole(DENSE_BLOCKS, 0),
            "moe_intermediate_size": lambda said: said.expert_width,
            "routed_scaling_factor": lambda said: said.number(WEIGHTS_SCALE, 0.0) or 1.0,
            "use_qk_norm": lambda said: "blk.0.attn_q_norm.weight" in said.tensors,
            "num_nextn_predict_layers": lambda said: 0,
        },
        heeds={GATING: (0, BY_SIGMOID), DENSE_BLOCKS: None, WEIGHTS_SCALE: None, "rope.dimension_sections": ()},
        has_experts=True,
        rotates_parts=True,
    )
    rotates_parts = True

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(qkv_bias=config.attention_bias, head_norm=config.use_qk_norm)

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        inner, factor = config.moe_intermediate_size, float(config.routed_scaling_factor)
        sizes = config.n_routed_experts, config.num_experts_per_tok, inner, bool(config.norm_topk_prob)
        return Mixture(*sizes, inner * config.n_shared_experts, factor=factor)

    @staticmethod
    def has_experts(config: Config, block: int) -> bool:
        return block >= int(config.first_k_dense_replace)


class Glm4(FusedMlp):
    gguf = GgufArchitecture(
        "glm4",
        {
            **weights(ATTENTION, FIRST_NORM, {"ffn_up": INTO_MLP, "ffn_down": OUT_OF_MLP}),
            **weights({"post_attention_norm": "post_self_attn_layernorm", "ffn_norm": BEHIND_ATTENTION}),
            **weights({"post_ffw_norm": "post_mlp_layernorm"}),
            **biases(QKV),
        },
        heeds={"rope.dimension_sections": ()},
        rotates_parts=True,
    )
    rotates_parts = rotates_neighbours = True

    @staticmethod
    def traits_of(config: Config) -> Traits:
        behind = {"behind_attention": "post_self_attn_layernorm", "behind_mlp": "post_mlp_layernorm"}
        return Traits(qkv_bias=config.attention_bias, norms=NormPlaces(**behind))
