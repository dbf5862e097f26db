"""Qwen2 and Qwen3, with experts and without: LLaMA with biases of queries, keys and values, or with normalised heads. Layers
may have a window. Where there are experts, some blocks may have a single mlp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import (
    ATTENTION,
    HEAD_NORMS,
    OF_LLAMA,
    OF_MIXTURES,
    QKV,
    GgufArchitecture,
    Said,
    biases,
    shared_expert,
    weights,
)
from h2o_flexgen.core.model_spec import MOST_WIDTH
from h2o_flexgen.kernels.operations import add_weighted, route
from h2o_flexgen.kernels.routing import SIGMOID_OF_EACH, Chosen, RouterRule, RouterScores
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Weights
from h2o_flexgen.models.config_values import BLOCKS, Bounds, Config, Whole, same_windows, windows_by_kind
from h2o_flexgen.models.layout import Parameters
from h2o_flexgen.models.llama import Decoder, MlpNames, Traits
from h2o_flexgen.models.mixture import Mixture, MixtureOfExperts
from h2o_flexgen.models.whole_configs import (
    COUNT,
    FLAG,
    OFF,
    ON,
    OWN_SWITCH,
    QWEN2,
    QWEN3,
    SEVERAL,
    Usual,
)

SHARED, SHARED_GATE = "mlp.shared_expert", "mlp.shared_expert_gate"
KEYS_OF_EXPERTS: Mapping[str, Said] = {
    "num_experts": lambda said: said.experts,
    "moe_intermediate_size": lambda said: said.expert_width,
    "decoder_sparse_step": lambda said: 1,
    "mlp_only_layers": lambda said: [],
}


USUAL_EXPERTS: Mapping[str, Usual] = {
    "decoder_sparse_step": Usual(1, (int,)),
    "mlp_only_layers": Usual(None, SEVERAL),
    "norm_topk_prob": OFF,
}


class Qwen2(Decoder):
    gguf = GgufArchitecture("qwen2", {**OF_LLAMA, **biases(QKV)})
    usual = QWEN2

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(qkv_bias=True, windows=windows_by_kind(config))


class Qwen3(Decoder):
    gguf = GgufArchitecture("qwen3", {**OF_LLAMA, **weights(HEAD_NORMS), **biases(ATTENTION)})
    usual = QWEN3

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(config.attention_bias, config.attention_bias, head_norm=True, windows=windows_by_kind(config))


class QwenMoe(MixtureOfExperts):
    """What both have in common."""

    bounds: ClassVar[Bounds] = {
        "decoder_sparse_step": Whole(BLOCKS),
        "shared_expert_intermediate_size": Whole(MOST_WIDTH),
    }

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        return Mixture(
            config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, bool(config.norm_topk_prob)
        )

    @staticmethod
    def has_experts(config: Config, block: int) -> bool:
        if block in (getattr(config, "mlp_only_layers", None) or ()):
            return False
        return (block + 1) % (getattr(config, "decoder_sparse_step", None) or 1) == 0


class Qwen2Moe(QwenMoe):
    usual: ClassVar[Mapping[str, Usual]] = {
        **QWEN2,
        **USUAL_EXPERTS,
        "num_key_value_heads": Usual(16, COUNT),
        OWN_SWITCH: Usual(False, FLAG, only=(False,)),
        "qkv_bias": ON,
        "num_experts": Usual(60, (int,)),
        "num_experts_per_tok": Usual(4, (int,)),
        "moe_intermediate_size": Usual(1408, (int,)),
        "shared_expert_intermediate_size": Usual(5632, (int,)),
    }
    gguf: ClassVar[GgufArchitecture | None] = GgufArchitecture(
        "qwen2moe",
        {
            **OF_MIXTURES,
            **weights(shared_expert(SHARED), {"ffn_gate_inp_shexp": SHARED_GATE}),
            **biases(QKV),
        },
        keys={**KEYS_OF_EXPERTS, "shared_expert_intermediate_size": lambda said: said.shared_expert_width},
        has_experts=True,
        sums_to_one=False,
        single_rows=(f"{SHARED_GATE}.weight",),
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(qkv_bias=getattr(config, "qkv_bias", True), windows=windows_by_kind(config))

    @staticmethod
    def mixture_of(config: Config) -> Mixture:
        return replace(QwenMoe.mixture_of(config), shared=config.shared_expert_intermediate_size, shared_name=SHARED)

    def routing(self, width: int) -> Parameters:
        return layout.joined(super().routing(width), layout.router(SHARED_GATE, 1, width))

    def add_shared(self, x: Tensor, weights: Weights, total: Tensor) -> None:
        """Weighs the mlp by the sigmoid of its gate, which is a router to a single expert."""
        made = self.gated(x, weights, MlpNames.of(SHARED)).flatten(0, -2)
        gate, tokens = tensor_ops.linear(x, weights, SHARED_GATE).flatten(0, -2), torch.arange(len(made), device=made.device)
        shares = made.new_empty(len(made), 1, dtype=torch.float32)
        route(RouterScores(gate), RouterRule(SIGMOID_OF_EACH), Chosen(shares, torch.empty_like(shares, dtype=torch.int32)))
        add_weighted(total, made, shares.flatten(), tokens, [len(made)])


class Qwen3Moe(QwenMoe):
    usual: ClassVar[Mapping[str, Usual]] = {
        **QWEN3,
        **USUAL_EXPERTS,
        "num_key_value_heads": Usual(4, (int,)),
        "head_dim": Usual(None, COUNT),
        "num_experts": Usual(128, (int,)),
        "num_experts_per_tok": Usual(8, (int,)),
        "moe_intermediate_size": Usual(768, (int,)),
    }
    called: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}  # in files that transformers writes
    gguf = GgufArchitecture(
        "qwen3moe",
        {**OF_MIXTURES, **weights(HEAD_NORMS), **biases(ATTENTION)},
        keys=KEYS_OF_EXPERTS,
        has_experts=True,
        sums_to_one=True,
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(config.attention_bias, config.attention_bias, head_norm=True, windows=same_windows(config))
