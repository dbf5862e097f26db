"""Falcon: attention and an mlp without a gate stand side by side, behind one norm (7B) or each behind its own (from 40B on).
One matrix has the queries, the key and the value of a KV head, group by group, and in GGUF files part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import (
    BIAS_OF_LAST_NORM,
    FIRST_NORM,
    LAYER_EPS,
    UNGATED_MLP,
    GgufArchitecture,
    GgufModel,
    biases,
    weights,
)
from h2o_flexgen.core.model_spec import MOST_WIDTH, KVHeads
from h2o_flexgen.models.config_values import HEADS, POSITIONS, Bounds, Config, Number, Whole
from h2o_flexgen.models.llama import BEFORE, LAYER, ONE_BEFORE, NormPlaces, Traits
from h2o_flexgen.models.phi3 import QKV, FusedQkv

TWO_NORMS = NormPlaces(before_attention="ln_attn", before_mlp="input_layernorm")  # as GGUF files call that of the mlp


def _has_two_norms(said: GgufModel) -> bool:
    return "blk.0.attn_norm_2.weight" in said.tensors


class Falcon(FusedQkv):
    bounds: ClassVar[Bounds] = {
        "intermediate_size": Whole(MOST_WIDTH),
        "max_position_embeddings": Whole(POSITIONS),  # published configs leave it to transformers
        "num_kv_heads": Whole(HEADS),
        "layer_norm_epsilon": Number(0.0, 1.0),
    }
    called: ClassVar[Mapping[str, str]] = {"intermediate_size": "ffn_hidden_size"}
    patterns: ClassVar[Mapping[str, str]] = {
        r"^transformer\.word_embeddings\.": "model.embed_tokens.",
        r"^transformer\.ln_f\.": "model.norm.",
        r"^transformer\.h\.": "model.layers.",
        r"\.self_attention\.query_key_value\.": f".{QKV}.",
        r"\.self_attention\.dense\.": ".self_attn.o_proj.",
        r"\.ln_mlp\.": ".input_layernorm.",
        r"\.mlp\.dense_h_to_4h\.": ".mlp.up_proj.",
        r"\.mlp\.dense_4h_to_h\.": ".mlp.down_proj.",
    }
    gguf = GgufArchitecture(
        "falcon",
        {
            **weights({"attn_qkv": QKV, "attn_output": "self_attn.o_proj"}, UNGATED_MLP),
            **weights(FIRST_NORM, {"attn_norm_2": "ln_attn"}),
            **biases(FIRST_NORM, {"attn_norm_2": "ln_attn"}),
        },
        keys={
            "layer_norm_epsilon": lambda said: said.number(LAYER_EPS),
            "activation": lambda said: "gelu",
            "num_kv_heads": lambda said: said.whole("attention.head_count_kv", 1),
            "new_decoder_architecture": lambda said: True,
            "num_ln_in_parallel_attn": lambda said: 2 if _has_two_norms(said) else 1,
            "ffn_hidden_size": lambda said: said.whole("feed_forward_length"),
            "qkv_apart": lambda said: True,
            **dict.fromkeys(("alibi", "bias"), lambda said: False),
        },
        outside=BIAS_OF_LAST_NORM,
    )

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        if config.alibi:
            raise ValueError("alibi is set, and distances that are rounded to bfloat16 are not supported; give another model")
        self._are_apart = bool(getattr(config, "qkv_apart", False))  # of a GGUF file: transformers has no such key
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def traits_of(config: Config) -> Traits:
        is_parallel = config.new_decoder_architecture or config.parallel_attn
        norms = config.num_ln_in_parallel_attn or (2 if config.new_decoder_architecture else 1)
        places = BEFORE if not is_parallel else TWO_NORMS if norms == 2 else ONE_BEFORE
        bias = bool(config.bias)
        return Traits(bias, bias, bias, gated=False, norm=LAYER, norms=places, is_parallel=is_parallel)

    @staticmethod
    def activation_of(config: Config) -> str:
        name: str = config.activation
        return name

    @staticmethod
    def inner_of(config: Config) -> int:
        return int(config.ffn_hidden_size or 4 * config.hidden_size)

    @staticmethod
    def eps_of(config: Config) -> float:
        eps: float = config.layer_norm_epsilon
        return eps

    def usual_kv_heads(self, config: Config) -> KVHeads:
        heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        if not config.new_decoder_architecture:
            return KVHeads(1 if config.multi_query else heads, width)
        return KVHeads(config.num_kv_heads or heads, width)

    def parted(self, fused: Tensor) -> Sequence[Tensor]:
        if self._are_apart:
            return super().parted(fused)
        groups, width = self.spec.kv_heads, self.spec.head_dim
        each = fused.view(*fused.shape[:-1], groups, -1, width)
        parts = each.split((each.shape[-2] - 2, 1, 1), dim=-2)
        return [part.contiguous().flatten(-3) for part in parts]
