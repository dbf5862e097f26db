"""Gemma 4 with experts beside the mlp of each layer, or with mlps alone; and GGUF files of both. The router looks at hidden
states that are normalised by themselves, and each expert's share has a factor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from h2o_flexgen.checkpoints.gguf_config import ROPE_DIVISORS, divisors_in
from h2o_flexgen.checkpoints.stored_architecture import (
    ATTENTION,
    BEHIND_BOTH,
    FIRST_NORM,
    HEAD_NORMS,
    LOGIT_CAP,
    MLP,
    NEAR_THETA,
    ONE,
    GgufArchitecture,
    GgufModel,
    weights,
)
from h2o_flexgen.kernels.operations import add_scaled, rms_norm
from h2o_flexgen.kernels.routing import RouterScores
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Given, Weights
from h2o_flexgen.models.config_values import MOST_EXPERTS, Bounds, Config, Whole
from h2o_flexgen.models.gemma import ACTIVATION, AROUND
from h2o_flexgen.models.gemma4 import SCALAR, Gemma4Dense
from h2o_flexgen.models.layout import Parameters
from h2o_flexgen.models.mixture import Mixture, MixtureOfExperts, Routed
from h2o_flexgen.models.windows import FULL, SLIDING, kinds_in

BEFORE_MLP, EXPERTS_NORM = AROUND.before_mlp or "", "pre_feedforward_layernorm_2"
BEHIND_MLP, BEHIND_EXPERTS = "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"
ROUTER, ROUTER_SCALE, FACTORS = "router.proj", "router.scale", "router.per_expert_scale"
EVERY = 6  # each last one of so many has no window, where a file does not say
LARGE = 1e20  # what is divided by as much is 0


def _ropes(said: GgufModel) -> dict[str, dict[str, object]]:
    """A file has a divisor for each pair of values: 1 for those that are rotated, and one so large that the others are not."""
    count, table = said.whole("attention.key_length") // 2, said.tensors.get(ROPE_DIVISORS)
    divisors = [1.0] * count if table is None else divisors_in(table, count)
    rotated = divisors.count(1.0)
    if any(divisor < LARGE for divisor in divisors[rotated:]):
        raise said.refusal("rope.freq_base", f"and {ROPE_DIVISORS} that are not 1 and then above {LARGE:g}; give another model")
    share, theta = rotated / max(count, 1), said.number("rope.freq_base")
    far = {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": theta}
    return {FULL: far, SLIDING: {"rope_type": "default", "rope_theta": said.number(NEAR_THETA, 10000.0)}}


def _takes_values_from_keys(said: GgufModel) -> bool:
    far = [block for block, slides in enumerate(said.sliding_blocks(EVERY)) if not slides]
    return bool(far) and f"blk.{far[0]}.attn_v.weight" not in said.tensors


IN_GGUF = GgufArchitecture(
    "gemma4",
    {
        **weights(ATTENTION, MLP, FIRST_NORM, BEHIND_BOTH, HEAD_NORMS, {"ffn_norm": BEFORE_MLP}),
        **weights({"pre_ffw_norm_2": EXPERTS_NORM, "post_ffw_norm_1": BEHIND_MLP, "post_ffw_norm_2": BEHIND_EXPERTS}),
        **weights({f"ffn_{part}_exps": f"mlp.experts.{ONE}.{part}_proj" for part in ("gate_up", "down")}),
        **weights({"ffn_gate_inp": ROUTER}),
        "ffn_gate_inp.scale": ROUTER_SCALE,
        "ffn_down_exps.scale": FACTORS,
        "layer_output_scale.weight": SCALAR,
    },
    keys={
        "hidden_activation": lambda said: ACTIVATION,
        "final_logit_softcapping": lambda said: said.number(LOGIT_CAP, 0.0) or None,
        "layer_types": lambda said: kinds_in(said, EVERY),
        "rope_parameters": _ropes,
        "attention_k_eq_v": _takes_values_from_keys,
        "enable_moe_block": lambda said: said.experts > 0,
        "num_experts": lambda said: said.experts or None,
        "top_k_experts": lambda said: said.whole("expert_used_count", 0) or None,
        "moe_intermediate_size": lambda said: said.whole("expert_feed_forward_length", 0) or None,
    },
    heeds={
        **dict.fromkeys((LOGIT_CAP, NEAR_THETA)),
        **dict.fromkeys(("embedding_length_per_layer_input", "attention.shared_kv_layers"), (0,)),
        "rope.scaling.factor": (0, 1),
    },
    has_experts=None,
    sums_to_one=True,
    has_divisors=True,
    near_rope=lambda said: {},
    near_heads=True,
)


class Gemma4(MixtureOfExperts, Gemma4Dense):
    bounds: ClassVar[Bounds] = {**Gemma4Dense.bounds, "top_k_experts": Whole(MOST_EXPERTS)}
    patterns: ClassVar[Mapping[str, str]] = {r"(?<!\.mlp)\.experts\.": ".mlp.experts."}
    gguf: ClassVar[GgufArchitecture | None] = IN_GGUF

    @staticmethod
    def has_experts(config: Config, block: int) -> bool:
        return bool(config.enable_moe_block)

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        if not config.enable_moe_block:
            return Mixture(1, 1, 1, sums_to_one=True)  # which no layer has
        sizes = config.num_experts, config.top_k_experts, config.moe_intermediate_size
        if None in sizes or sizes[1] > sizes[0]:
            told = "num_experts, top_k_experts and moe_intermediate_size are {}, {} and {}".format(*sizes)
            raise ValueError(f"{told}, but layers have experts; download the model again")
        return Mixture(*sizes, sums_to_one=True, router=ROUTER, behind=config.intermediate_size)

    # -- its layers ------------------------------------------------------------------------------------------------------

    @property
    def norm_of_experts(self) -> str:
        return EXPERTS_NORM

    def routing(self, width: int) -> Parameters:
        own = {ROUTER_SCALE: layout.Parameter((width,))}
        return layout.joined(super().routing(width), own, layout.wide(FACTORS, self._mixture.experts))

    def behind_experts(self, width: int) -> Parameters:
        norms = self.norm_parameters(width, BEFORE_MLP, BEHIND_MLP, BEHIND_EXPERTS, AROUND.behind_mlp)
        return layout.joined(norms, self.mlp_parameters(width, self._mixture.behind))

    # -- the functions of layers -------------------------------------------------------------------------------------------

    def scored(self, hidden: Tensor, x: Tensor, weights: Weights) -> RouterScores:
        normed = rms_norm(hidden, tensor_ops.needed(weights, ROUTER_SCALE), self._eps)
        scores = tensor_ops.linear(add_scaled(normed, scale=self.spec.width**-0.5), weights, ROUTER)
        return RouterScores(scores, factors=tensor_ops.needed(weights, FACTORS))

    def with_total(self, joined: Tensor, weights: Weights, given: Given) -> Tensor:
        """What the experts made, with what the mlp beside them makes."""
        state = Routed.of(joined, self.spec.width, self._mixture.chosen)
        wide = self.gated(self.normed(state.hidden, weights, BEFORE_MLP), weights, self._mlp)
        beside = self.normed(state.total.to(joined.dtype, copy=True), weights, BEHIND_EXPERTS)
        both = self.normed(add_scaled(self.normed(wide, weights, BEHIND_MLP), beside), weights, AROUND.behind_mlp)
        return self.scaled(self.added(both, state.hidden), weights)
