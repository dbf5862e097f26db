"""Hunyuan: LLaMA with norms of each head behind the rotation of queries and keys; and with experts beside a shared mlp.

A cache holds keys that are rotated and no more. So a key is divided by its length before its rotation, which changes no length.
What the weight of its norm would be multiplied with is left to queries, which meet both weights behind their rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import (
    ATTENTION,
    HEAD_NORMS,
    OF_LLAMA,
    OF_MIXTURES,
    GgufArchitecture,
    biases,
    shared_expert,
    weights,
)
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.model_spec import MOST_WIDTH
from h2o_flexgen.kernels.operations import rms_norm
from h2o_flexgen.models import tensor_ops
from h2o_flexgen.models.base import Weights
from h2o_flexgen.models.config_values import MOST_EXPERTS, Bounds, Config, Whole
from h2o_flexgen.models.llama import Decoder, Traits, head_width
from h2o_flexgen.models.mixture import SHARED, Mixture, MixtureOfExperts
from h2o_flexgen.models.new_tokens import NewTokens
from h2o_flexgen.models.rotary import Rope, Rotary

NORMS_OF_HEADS = {
    r"\.self_attn\.query_layernorm\.": ".self_attn.q_norm.",
    r"\.self_attn\.key_layernorm\.": ".self_attn.k_norm.",
}


class Hunyuan(Decoder):
    patterns: ClassVar[Mapping[str, str]] = NORMS_OF_HEADS
    gguf: ClassVar[GgufArchitecture | None] = GgufArchitecture(
        "hunyuan-dense", {**OF_LLAMA, **weights(HEAD_NORMS), **biases(ATTENTION)}
    )

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        if getattr(config, "use_cla", False):
            raise ValueError("use_cla is set: layers that attend the keys of others are not supported; give another model")
        super().__init__(config, dtype, sep_layer, name)
        (rope,) = self.ropes_of(config)
        stretch = super().rotary_of(rope, self._rotated).stretch
        # norms take the length away again, and add this to the square of what is left
        self._eps_of_heads = self._eps / stretch**2

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(config.attention_bias, config.attention_bias, head_norm=True)

    def ropes_of(self, config: Config) -> list[Rope]:
        return [Rope.of(config, partly=False).with_alpha(head_width(config))]

    def rotary_of(self, rope: Rope, width: int) -> Rotary:
        """How long a rotation makes a head changes nothing but what its norm adds beside it."""
        return Rotary(super().rotary_of(rope, width).frequencies)

    def queries_and_keys_normed(self, q: Tensor, k: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        return q, tensor_ops.bare_rms_norm(k, self._eps_of_heads)

    def new_tokens(self, rotary: Rotary | None, hidden: Tensor, weights: Weights) -> NewTokens:
        of_queries, of_keys = (tensor_ops.needed(weights, f"self_attn.{part}_norm.weight") for part in "qk")
        both = tensor_ops.multiplied(of_queries, of_keys)
        made = super().new_tokens(rotary, hidden, weights)
        return replace(made, query_norm=partial(rms_norm, weight=both, eps=self._eps_of_heads))


class HunyuanMoe(MixtureOfExperts, Hunyuan):
    routes_wide = True
    bounds: ClassVar[Bounds] = {
        "moe_intermediate_size": Whole(MOST_WIDTH, of_each=True),
        "moe_topk": Whole(MOST_EXPERTS, of_each=True),
    }
    patterns: ClassVar[Mapping[str, str]] = {
        **NORMS_OF_HEADS,
        r"\.mlp\.gate\.wg\.": ".mlp.gate.",
        r"\.mlp\.shared_mlp\.": f".{SHARED}.",
    }
    gguf: ClassVar[GgufArchitecture | None] = GgufArchitecture(
        "hunyuan-moe",
        {**OF_MIXTURES, **weights(HEAD_NORMS, shared_expert(SHARED)), **biases(ATTENTION)},
        keys={
            "num_experts": lambda said: said.experts,
            "moe_topk": lambda said: said.whole("expert_used_count"),
            "intermediate_size": lambda said: said.expert_width,
        },
        has_experts=True,
        sums_to_one=True,
        has_divisors=True,
    )

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        experts, chosen, inner = config.num_experts, _same("moe_topk", config.moe_topk), config.intermediate_size
        if chosen > experts:
            raise ValueError(f"moe_topk is {chosen}, but there are {experts} experts; download the model again")
        return Mixture(experts, chosen, inner, sums_to_one=True, shared=inner)


def _same(key: str, value: Any) -> int:
    """The number for all layers, of one for each of them."""
    found = {*value} if isinstance(value, list) else {value}
    if len(found) != 1 or not isinstance(one := found.pop(), int):
        raise ValueError(f"{key} is {shown(value)}: layers that differ in it are not supported; give another model")
    return one
