"""Gemma 4: Gemma with whole weights of norms, and values that are normalised, too. Layers without a window have KV heads of
their own, and may take their values from their keys. What a layer makes is multiplied by a number of its own.

Where there are experts, they stand beside the mlp of each layer. The router looks at hidden states that are normalised by
themselves, and each expert's share has a factor. GGUF files of both kinds have one name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import ClassVar, cast

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
from h2o_flexgen.core.model_spec import MOST_HEAD_DIM, KVHeads, LayerSpec
from h2o_flexgen.kernels.operations import add_scaled, rms_norm
from h2o_flexgen.kernels.routing import RouterScores
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Given, Weights
from h2o_flexgen.models.config_values import (
    FULL,
    HEADS,
    MOST_EXPERTS,
    SLIDING,
    SOFTCAP,
    Bounds,
    Config,
    Whole,
    kinds_in,
    windows_by_kind,
)
from h2o_flexgen.models.gemma import ACTIVATION, AROUND, Gemma
from h2o_flexgen.models.layout import Origin, Parameters
from h2o_flexgen.models.llama import RMS_WIDE, NearRotated, Traits
from h2o_flexgen.models.mixture import Mixture, MixtureOfExperts, Routed
from h2o_flexgen.models.whole_configs import Usual

VALUES, SCALAR = "self_attn.v_proj", "layer_scalar"
UNSUPPORTED = {
    "hidden_size_per_layer_input": "embeddings of each layer",
    "num_kv_shared_layers": "layers that attend the keys of others",
}
OF_FAR = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}  # of layers without a window


class Gemma4Dense(NearRotated, Gemma):
    usual: ClassVar[Mapping[str, Usual]] = {}  # it reads more than the class above
    bounds: ClassVar[Bounds] = {
        "global_head_dim": Whole(MOST_HEAD_DIM),
        "num_global_key_value_heads": Whole(HEADS),
        "final_logit_softcapping": SOFTCAP,
    }
    gguf: ClassVar[GgufArchitecture | None] = None

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        config = _of_both_kinds(config)
        for key, what in UNSUPPORTED.items():
            if getattr(config, key, None):
                raise ValueError(f"{key} is {getattr(config, key)}: {what} are not supported; take a larger Gemma 4")
        self._kinds, self._has_own_values = config.layer_types, not config.attention_k_eq_v
        super().__init__(config, dtype, sep_layer, name)

    # -- what it reads of a config ---------------------------------------------------------------------------------------

    @staticmethod
    def traits_of(config: Config) -> Traits:
        bias, width = config.attention_bias, config.hidden_size
        traits = Traits(bias, bias, norm=RMS_WIDE, norms=AROUND, head_norm=True, embedding_scale=width**0.5)
        return replace(traits, windows=windows_by_kind(config), logit_cap=config.final_logit_softcapping)

    @staticmethod
    def activation_of(config: Config) -> str:
        name: str = config.hidden_activation
        return name

    def kv_heads_of(self, config: Config, block: int) -> KVHeads:
        if config.layer_types[block] == SLIDING:
            return self.usual_kv_heads(config)
        return KVHeads(config.num_global_key_value_heads, config.global_head_dim)

    def rotated_widths(self, config: Config) -> Sequence[int]:
        return config.global_head_dim, config.head_dim

    # -- its layers ------------------------------------------------------------------------------------------------------

    def attention_layer(
        self, width: int, q_width: int, kv_width: int, head_dim: int, origin: Origin, window: int | None
    ) -> LayerSpec:
        made = super().attention_layer(width, q_width, kv_width, head_dim, origin, window)
        if self._has_own_values or self._kinds[origin.block or 0] == SLIDING:
            return made
        return made.without(f"{VALUES}.weight", f"{VALUES}.bias")

    def mlp_parameters(self, width: int, inner: int) -> Parameters:
        return layout.joined(super().mlp_parameters(width, inner), layout.wide(SCALAR, 1))

    # -- the functions of layers -------------------------------------------------------------------------------------------

    def width_of_heads(self, weights: Weights) -> int:
        return tensor_ops.needed(weights, "self_attn.q_norm.weight").numel()

    def projected(self, x: Tensor, weights: Weights) -> Sequence[Tensor]:
        if f"{VALUES}.weight" in weights:
            return super().projected(x, weights)
        q, k = tensor_ops.linears(x, weights, "self_attn.q_proj", "self_attn.k_proj")
        return q, k, k

    def asked(self, hidden: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Every attention scales scores. Those of this one are not scaled, so that its queries are longer by as much."""
        x, q, k, v = super().asked(hidden, weights)
        return x, add_scaled(q, scale=sqrt(q.shape[-1])), k, tensor_ops.bare_rms_norm(v, self._eps)

    def mlp(self, hidden: Tensor, weights: Weights, given: Given) -> Tensor:
        return self.scaled(super().mlp(hidden, weights, given), weights)

    def scaled(self, hidden: Tensor, weights: Weights) -> Tensor:
        return add_scaled(hidden, by=tensor_ops.needed(weights, SCALAR))


def _of_both_kinds(config: Config) -> Config:
    """A config with the KV heads of layers of both kinds. That of transformers has a config for each layer, and is not to be
    asked for what differs."""
    layers = getattr(config, "per_layer_config", None)
    if layers is None:
        return config
    unlike, found = {*(config.per_layer_attributes or ())} - {*OF_FAR}, dict[str, dict[str, int]]()
    for kind, layer in zip(config.layer_types, layers, strict=True):
        heads = {key: getattr(layer, key) for key in OF_FAR}
        unlike |= set() if found.setdefault(kind, heads) == heads else {*OF_FAR}
    if unlike:
        what = ", ".join(sorted(unlike))
        raise ValueError(f"per_layer_config has layers that differ in {what} beside their windows; give another model")
    near, far = found.get(SLIDING) or found[FULL], found.get(FULL) or found[SLIDING]
    return cast("Config", _WithHeads(config, {**near, **{OF_FAR[key]: value for key, value in far.items()}}))


class _WithHeads:
    """A config with other values for some of its keys."""

    def __init__(self, config: Config, heads: Mapping[str, int]) -> None:
        self._config, self._heads = config, heads

    def __getattr__(self, key: str) -> object:
        return self._heads[key] if key in self._heads else getattr(self._config, key)


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
