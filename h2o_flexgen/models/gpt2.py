"""GPT-2 and GPT-J. The first has learned positions, and matrices that its checkpoints have transposed. In the second, attention
and mlp stand side by side behind one norm, and the first values of each head are rotated, neighbours together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import (
    BIAS_OF_LAST_NORM,
    LAYER_EPS,
    NORMS,
    UNGATED_MLP,
    GgufArchitecture,
    biases,
    weights,
)
from h2o_flexgen.core.allowed_values import EOS
from h2o_flexgen.core.model_spec import MOST_HEAD_DIM, MOST_WIDTH, KVHeads, share_of
from h2o_flexgen.kernels.operations import add_scaled
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.base import Given, Weights
from h2o_flexgen.models.config_values import Bounds, Config, Number, Whole
from h2o_flexgen.models.layout import Parameters
from h2o_flexgen.models.llama import LAYER, ONE_BEFORE, UNROTATED, AttentionFunctions, Decoder, Traits
from h2o_flexgen.models.phi3 import QKV, FusedQkv
from h2o_flexgen.models.rotary import DEFAULT, Rope, Rotary
from h2o_flexgen.models.whole_configs import COUNT, OFF, ON, TEXT, Usual, end_of_text

CALLED = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
OUTSIDE = {
    r"^(transformer\.)?wte\.": "model.embed_tokens.",
    r"^(transformer\.)?wpe\.": "model.embed_positions.",
    r"^(transformer\.)?ln_f\.": "model.norm.",
    r"^(transformer\.)?h\.": "model.layers.",
    r"\.ln_1\.": ".input_layernorm.",
}
POSITIONS = "embed_positions"
UNSUPPORTED = ("scale_attn_by_inverse_layer_idx", "add_cross_attention")


class Gpt(Decoder):
    """What both have in common."""

    bounds: ClassVar[Bounds] = {"intermediate_size": Whole(MOST_WIDTH), "layer_norm_epsilon": Number(0.0, 1.0)}
    called: ClassVar[Mapping[str, str]] = CALLED

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        if asked := next((key for key in UNSUPPORTED if getattr(config, key, False)), None):
            raise ValueError(f"{asked} is set, which no layer here does; give another model")
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def activation_of(config: Config) -> str:
        name: str = config.activation_function
        return name

    def usual_kv_heads(self, config: Config) -> KVHeads:
        return KVHeads(config.num_attention_heads, config.hidden_size // config.num_attention_heads)

    def ropes_of(self, config: Config) -> Sequence[Rope]:
        return [Rope(DEFAULT, 10000.0, 1.0, {})]  # whatever a config says

    @staticmethod
    def inner_of(config: Config) -> int:
        return int(config.n_inner or 4 * config.hidden_size)

    @staticmethod
    def eps_of(config: Config) -> float:
        eps: float = config.layer_norm_epsilon
        return eps


class Gpt2(FusedQkv, Gpt):
    usual: ClassVar[Mapping[str, Usual]] = {
        **dict.fromkeys(("scale_attn_weights", "tie_word_embeddings"), ON),
        **dict.fromkeys(UNSUPPORTED, OFF),
        "n_inner": Usual(None, COUNT),
        "activation_function": Usual("gelu_new", TEXT),
        "layer_norm_epsilon": Usual(1e-5, (float,)),
        EOS: end_of_text(50256),
    }
    rotates = False
    patterns: ClassVar[Mapping[str, str]] = {
        **OUTSIDE,
        r"\.ln_2\.": ".post_attention_layernorm.",
        r"\.attn\.c_attn\.": f".{QKV}.",
        r"\.attn\.c_proj\.": ".self_attn.o_proj.",
        r"\.mlp\.c_fc\.": ".mlp.up_proj.",
        r"\.mlp\.c_proj\.": ".mlp.down_proj.",
    }
    turned = (f"{QKV}.weight", ".self_attn.o_proj.weight", ".mlp.up_proj.weight", ".mlp.down_proj.weight")
    gguf = GgufArchitecture(
        "gpt2",
        {
            **weights({"attn_qkv": QKV, "attn_output": "self_attn.o_proj"}, UNGATED_MLP, NORMS),
            **biases({"attn_qkv": QKV, "attn_output": "self_attn.o_proj"}, UNGATED_MLP, NORMS),
        },
        keys={
            "layer_norm_epsilon": lambda said: said.number(LAYER_EPS),
            "activation_function": lambda said: "gelu_new",
            "n_inner": lambda said: said.whole("feed_forward_length"),
            "scale_attn_weights": lambda said: True,
        },
        outside={**BIAS_OF_LAST_NORM, "position_embd.weight": f"model.{POSITIONS}.weight"},
    )

    @staticmethod
    def traits_of(config: Config) -> Traits:
        scale = 1.0 if config.scale_attn_weights else sqrt(config.hidden_size // config.num_attention_heads)
        return Traits(True, True, True, gated=False, norm=LAYER, query_scale=scale)

    def rotary_of(self, rope: Rope, width: int) -> Rotary:
        return Rotary(torch.zeros(0))  # for which no layer asks

    def attends_by(self, config: Config, block: int) -> AttentionFunctions:
        return UNROTATED

    def beside_tokens(self, config: Config) -> Parameters:
        return layout.table(POSITIONS, config.max_position_embeddings, config.hidden_size)

    def embed(self, tokens: Tensor, weights: Weights, given: Given) -> Tensor:
        return add_scaled(super().embed(tokens, weights, given), tensor_ops.embedding(given.positions, weights, POSITIONS))


class GptJ(Gpt):
    rotates_neighbours = True
    bounds: ClassVar[Bounds] = {**Gpt.bounds, "rotary_dim": Whole(MOST_HEAD_DIM)}
    patterns: ClassVar[Mapping[str, str]] = {
        **OUTSIDE,
        r"\.attn\.out_proj\.": ".self_attn.o_proj.",
        r"\.attn\.(q|k|v)_proj\.": r".self_attn.\1_proj.",
        r"\.mlp\.fc_in\.": ".mlp.up_proj.",
        r"\.mlp\.fc_out\.": ".mlp.down_proj.",
    }

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(mlp_bias=True, gated=False, norm=LAYER, norms=ONE_BEFORE, is_parallel=True, head_bias=True)

    def ropes_of(self, config: Config) -> Sequence[Rope]:
        width = config.hidden_size // config.num_attention_heads
        return [replace(rope, share=share_of(config.rotary_dim or width, width)) for rope in super().ropes_of(config)]
