"""GLM-4.5: a mixture with a router that scores each expert by itself. A correction changes which experts are chosen, but not
their weights. Its first blocks have a single mlp."""

from __future__ import annotations

from torch import Tensor

from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Weights
from h2o_flexgen.models.layout import Config, Parameters
from h2o_flexgen.models.llama import GatedMlp, Traits
from h2o_flexgen.models.mixture import ROUTER, Mixture, MixtureOfExperts

CORRECTION = f"{ROUTER}.e_score_correction_bias"
SHARED = GatedMlp.of("mlp.shared_experts")
LEAST_SUM = 1e-20  # prevents a division by zero


class GlmMoe(MixtureOfExperts):
    rotates_parts = True

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        super().__init__(config, dtype, sep_layer, name)
        self._factor = float(config.routed_scaling_factor)

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(qkv_bias=config.attention_bias, head_norm=config.use_qk_norm)

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        inner, chosen = config.moe_intermediate_size, config.num_experts_per_tok
        return Mixture(config.n_routed_experts, chosen, inner, bool(config.norm_topk_prob), inner * config.n_shared_experts)

    @staticmethod
    def has_experts(config: Config, block: int) -> bool:
        return block >= int(config.first_k_dense_replace)

    def routing(self, width: int) -> Parameters:
        mixture = self._mixture
        return layout.joined(
            layout.norm("post_attention_layernorm", width, bias=False),
            layout.router(ROUTER, mixture.experts, width),
            layout.wide(CORRECTION, mixture.experts),
            SHARED.parameters(width, mixture.shared),
        )

    def chosen(self, x: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        correction = tensor_ops.plain(weights, CORRECTION)
        assert correction is not None
        scores = tensor_ops.sigmoid(tensor_ops.wide_linear(x, weights, ROUTER))  # in 16 bits it would choose others
        experts = (scores + correction).topk(self._mixture.chosen, dim=-1).indices
        shares = scores.gather(-1, experts)
        if self._mixture.sums_to_one:
            shares /= shares.sum(dim=-1, keepdim=True) + LEAST_SUM
        return shares.mul_(self._factor), experts

    def through_shared(self, x: Tensor, weights: Weights) -> Tensor:
        return self.gated(x, weights, SHARED).float()
