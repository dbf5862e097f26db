"""Models of two kinds in any size, for what is measured of layers. They are made without transformers: its import would take
longer than all that is measured with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from h2o_flexgen.models import create_model
from h2o_flexgen.models.base import Model
from h2o_flexgen.models.config_values import Config

HEAD_DIM, VOCAB, POSITIONS = 64, 512, 2048
COMMON = {"vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "tie_word_embeddings": True}


def small_opt(dtype: str, width: int, blocks: int = 1) -> Model:
    """Layer norms, biases, and ReLU."""
    own = {"word_embed_proj_dim": width, "ffn_dim": 4 * width, "activation_function": "relu", "do_layer_norm_before": True}
    parts = {"layer_norm_elementwise_affine": True, "enable_bias": True}
    sizes = {"hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": max(1, width // HEAD_DIM)}
    return create_model(_config(model_type="opt", **own, **parts, **sizes), dtype)


def small_llama(dtype: str, width: int, heads: int | None = None, blocks: int = 1) -> Model:
    """RMS norms, rotations, and a gated SiLU. Its heads may be more than its width has room for."""
    number = heads or max(1, width // HEAD_DIM)
    own = {"intermediate_size": 11 * width // 4, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    parts = {"attention_bias": False, "mlp_bias": False, "num_key_value_heads": number, "head_dim": HEAD_DIM}
    sizes = {"hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": number}
    return create_model(_config(model_type="llama", **own, **parts, **sizes), dtype)


def _config(**values: object) -> Config:
    return cast("Config", SimpleNamespace(**COMMON, **values))
