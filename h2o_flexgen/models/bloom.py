"""BLOOM and MPT: ALiBi, layer norms and mlps without gates. BLOOM has biases and a norm behind its embedding. One matrix has
queries, keys and values: of BLOOM head by head, and in GGUF files part by part; of MPT part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any, ClassVar

from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import (
    BIAS_OF_LAST_NORM,
    CLIP,
    LAYER_EPS,
    NORMS,
    UNGATED_MLP,
    GgufArchitecture,
    biases,
    weights,
)
from h2o_flexgen.core.model_spec import MOST_WIDTH
from h2o_flexgen.models import layout, tensor_ops
from h2o_flexgen.models.alibi import FALL, MOST_POSITIONS, Alibi
from h2o_flexgen.models.base import Given, Weights
from h2o_flexgen.models.config_values import Bounds, Config, Number, Whole, refuse_other_heads
from h2o_flexgen.models.layout import Parameters
from h2o_flexgen.models.llama import Traits
from h2o_flexgen.models.norms import LAYER, LAYER_UNBIASED
from h2o_flexgen.models.phi3 import QKV

FIRST_NORM, POSITIONS = "embed_layernorm", 2048  # where a config does not say how long texts are
LENGTHS = "seq_length", "max_seq_len", "max_position_embeddings"
FALL_IN_FILES, USUAL_ATTENTION = "attention.max_alibi_bias", "multihead_attention"
IN_FILES = {"attn_qkv": QKV, "attn_output": "self_attn.o_proj"}


class BloomOrMpt(Alibi):
    """What both have in common."""

    bounds: ClassVar[Bounds] = {
        "intermediate_size": Whole(MOST_WIDTH),
        **dict.fromkeys(LENGTHS, Whole(MOST_POSITIONS)),
        "layer_norm_epsilon": Number(0.0, 1.0),
    }

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        refuse_other_heads(config)
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def inner_of(config: Config) -> int:
        return 4 * int(config.hidden_size)

    @staticmethod
    def eps_of(config: Config) -> float:
        eps: float = config.layer_norm_epsilon
        return eps

    def positions_of(self, config: Config) -> int:
        return next((own for key in LENGTHS if (own := getattr(config, key, None))), POSITIONS)


class Bloom(BloomOrMpt):
    called: ClassVar[Mapping[str, str]] = {
        "hidden_size": "n_embed",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    patterns: ClassVar[Mapping[str, str]] = {
        r"^(transformer\.)?word_embeddings\.": "model.embed_tokens.",
        r"^(transformer\.)?word_embeddings_layernorm\.": f"model.{FIRST_NORM}.",
        r"^(transformer\.)?ln_f\.": "model.norm.",
        r"^(transformer\.)?h\.": "model.layers.",
        r"\.self_attention\.query_key_value\.": f".{QKV}.",
        r"\.self_attention\.dense\.": ".self_attn.o_proj.",
        r"\.mlp\.dense_h_to_4h\.": ".mlp.up_proj.",
        r"\.mlp\.dense_4h_to_h\.": ".mlp.down_proj.",
    }
    gguf = GgufArchitecture(
        "bloom",
        {**weights(IN_FILES, UNGATED_MLP, NORMS), **biases(IN_FILES, UNGATED_MLP, NORMS)},
        keys={
            "layer_norm_epsilon": lambda said: said.number(LAYER_EPS),
            "apply_residual_connection_post_layernorm": lambda said: False,
            "qkv_apart": lambda said: True,
        },
        outside={
            **BIAS_OF_LAST_NORM,
            **{f"token_embd_norm.{part}": f"model.{FIRST_NORM}.{part}" for part in ("weight", "bias")},
        },
    )

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        if config.apply_residual_connection_post_layernorm:
            raise ValueError("apply_residual_connection_post_layernorm is set, which no layer here does; give another model")
        self._are_apart = bool(getattr(config, "qkv_apart", False))  # of a GGUF file: transformers has no such key
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def traits_of(config: Config) -> Traits:
        return Traits(True, True, True, gated=False, norm=LAYER, query_scale=Alibi.query_scale_of(config))

    @staticmethod
    def activation_of(config: Config) -> str:
        return "gelu_new"

    def beside_tokens(self, config: Config) -> Parameters:
        return layout.norm(FIRST_NORM, config.hidden_size)

    def embed(self, tokens: Tensor, weights: Weights, given: Given) -> Tensor:
        return tensor_ops.layer_norm(super().embed(tokens, weights, given), weights, FIRST_NORM, self._eps)

    def parted(self, fused: Tensor) -> Sequence[Tensor]:
        if self._are_apart:
            return super().parted(fused)
        each = fused.view(*fused.shape[:-1], self.spec.heads, 3, -1)
        return [part.contiguous().flatten(-2) for part in each.unbind(-2)]


class Mpt(BloomOrMpt):
    called: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    }
    patterns: ClassVar[Mapping[str, str]] = {
        r"^(transformer\.)?wte\.": "model.embed_tokens.",
        r"^(transformer\.)?norm_f\.": "model.norm.",
        r"^(transformer\.)?blocks\.": "model.layers.",
        r"\.norm_1\.": ".input_layernorm.",
        r"\.norm_2\.": ".post_attention_layernorm.",
        r"\.attn\.Wqkv\.": f".{QKV}.",
        r"\.attn\.out_proj\.": ".self_attn.o_proj.",
        r"\.ffn\.": ".mlp.",
    }
    gguf = GgufArchitecture(
        "mpt",
        weights(IN_FILES, UNGATED_MLP, NORMS),
        keys={
            "layer_norm_epsilon": lambda said: said.number(LAYER_EPS),
            "attn_config": lambda said: {
                "alibi": said.number(FALL_IN_FILES, 0.0) > 0,
                "alibi_bias_max": said.number(FALL_IN_FILES, FALL),
                "clip_qkv": said.number(CLIP, 0.0) or None,
            },
        },
        heeds=dict.fromkeys((FALL_IN_FILES, CLIP)),
    )

    def __init__(self, config: Config, dtype: str, sep_layer: bool, name: str) -> None:
        if unlike := [what for what, is_asked in _unlike(config).items() if is_asked]:
            raise ValueError(f"the model has {', '.join(unlike)}, which no MPT has here; give another model")
        super().__init__(config, dtype, sep_layer, name)

    @staticmethod
    def traits_of(config: Config) -> Traits:
        scale, clip = _said(config, "softmax_scale", None), _said(config, "clip_qkv", None)
        own = 1.0 if scale is None else scale * sqrt(Alibi.width_of_head(config))
        return Traits(gated=False, norm=LAYER_UNBIASED, clip=clip or None, query_scale=own * Alibi.query_scale_of(config))

    @staticmethod
    def activation_of(config: Config) -> str:
        return "gelu"


def _unlike(config: Config) -> dict[str, bool]:
    """What a config may ask for, and transformers leaves out."""
    return {
        "learned positions": not _said(config, "alibi", True),
        "slopes that end elsewhere": _said(config, "alibi_bias_max", FALL) != FALL,
        "norms of queries and keys": bool(_said(config, "qk_ln", False)),
        "prefixes that see themselves": bool(_said(config, "prefix_lm", False)),
        "keys that heads share": _said(config, "attn_type", USUAL_ATTENTION) != USUAL_ATTENTION,
        "scaled logits": getattr(config, "logit_scale", None) is not None,
        "biases": not getattr(config, "no_bias", True),
        "mlps of another width": getattr(config, "expansion_ratio", 4) != 4,
    }


def _said(config: Config, key: str, otherwise: Any) -> Any:
    """What the part of a config for attention says."""
    part = getattr(config, "attn_config", None) or {}
    found = part.get(key) if isinstance(part, Mapping) else getattr(part, key, None)
    return otherwise if found is None else found
