"""What GGUF files say of a model beside its tensors, made of its config: all that this engine and llama.cpp ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import gguf

from h2o_flexgen.checkpoints.gguf_config import SCALING, YARN
from h2o_flexgen.checkpoints.stored_architecture import (
    BY_SIGMOID,
    DENSE_BLOCKS,
    EXPERT_COUNT,
    GATING,
    KV_HEADS,
    LOGIT_CAP,
    NEAR_THETA,
    NEAR_VALUES,
    NEAR_WIDTH,
    NORMED,
    PATTERN,
    RMS_EPS,
    ROTATED,
    WEIGHTS_SCALE,
    WINDOW,
)
from h2o_flexgen.models.config_values import SLIDING
from h2o_flexgen.models.deepseek import RANK, WIDTHS
from h2o_flexgen.models.qwen_next import FULL, INTERVAL

NO_VOCABULARY = "none"
WIDTH, VALUE_WIDTH = "attention.key_length", "attention.value_length"
OF_EXPERTS = "expert_feed_forward_length"
Said: TypeAlias = Mapping[str, bool | int | float | str | list[bool] | list[int]]  # by keys behind the name of the architecture
Values: TypeAlias = Mapping[str, Any]  # of a config


def add_metadata(writer: gguf.GGUFWriter, config: Values) -> None:
    own = OF_FAMILIES.get(config["model_type"])
    said = {**_sizes(config), **_rope(config), **_experts(config), **(own(config) if own else {})}
    writer.add_tokenizer_model(NO_VOCABULARY)
    for name, value in said.items():
        key = f"{writer.arch}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value) if isinstance(value, str) else writer.add_float32(key, value)


def _sizes(config: Values) -> Said:
    heads, width = config["num_attention_heads"], config["hidden_size"]
    head_width, inner = config.get("head_dim") or width // heads, config.get("intermediate_size")
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": width,
        **({} if inner is None else {"feed_forward_length": inner}),
        "attention.head_count": heads,
        KV_HEADS: config.get("num_key_value_heads") or heads,
        WIDTH: head_width,
        VALUE_WIDTH: head_width,
        ROTATED: head_width,
        RMS_EPS: float(config["rms_norm_eps"]),
        "vocab_size": config["vocab_size"],
    }


def _rope(config: Values) -> Said:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    base = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if rope.get("rope_type") != YARN:
        return {"rope.freq_base": base}
    return {
        "rope.freq_base": base,
        f"{SCALING}.type": YARN,
        f"{SCALING}.factor": float(rope["factor"]),
        f"{SCALING}.original_context_length": rope["original_max_position_embeddings"],
        f"{SCALING}.yarn_beta_fast": float(rope["beta_fast"]),
        f"{SCALING}.yarn_beta_slow": float(rope["beta_slow"]),
    }


def _experts(config: Values) -> Said:
    counts = (config.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    chosen = config.get("num_experts_per_tok") or config.get("top_k_experts")
    found = {EXPERT_COUNT: next(filter(None, counts), 0), "expert_used_count": chosen}
    found[OF_EXPERTS] = config.get("moe_intermediate_size")
    found["expert_shared_feed_forward_length"] = config.get("shared_expert_intermediate_size")
    return {key: value for key, value in found.items() if value}


# -- of families -------------------------------------------------------------------------------------------------------


def _gpt_oss(config: Values) -> Said:
    return {WINDOW: config["sliding_window"], OF_EXPERTS: config["intermediate_size"]}


def _gemma4(config: Values) -> Said:
    """Layers with a window have KV heads of their own. Embeddings of each layer and shared keys are said to be none."""
    slides = [kind == SLIDING for kind in config["layer_types"]]
    near, far = config["num_key_value_heads"], config["num_global_key_value_heads"]
    return {
        KV_HEADS: [near if one else far for one in slides],
        **dict.fromkeys((WIDTH, VALUE_WIDTH, ROTATED), config["global_head_dim"]),
        **dict.fromkeys((NEAR_WIDTH, NEAR_VALUES, f"{ROTATED}_swa"), config["head_dim"]),
        WINDOW: config["sliding_window"],
        PATTERN: slides,
        NEAR_THETA: float(config["rope_parameters"]["sliding_attention"]["rope_theta"]),
        LOGIT_CAP: float(config["final_logit_softcapping"]),
        **dict.fromkeys(("embedding_length_per_layer_input", "attention.shared_kv_layers"), 0),
    }


def _delta_rule(config: Values) -> Said:
    """The rotation is one of positions in images as well: their three parts share the pairs of values."""
    heads, width = config["linear_num_value_heads"], config["linear_value_head_dim"]
    rotated = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])
    return {
        ROTATED: rotated,
        "rope.dimension_sections": [*((rotated // 2 + rest) // 3 for rest in (2, 1, 0)), 0],
        INTERVAL: config["layer_types"].index(FULL) + 1,
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * width,
    }


def _latents(config: Values) -> Said:
    """Blocks keep one key of a token, of which the values are a part."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        KV_HEADS: 1,
        WIDTH: rank + rotated,
        VALUE_WIDTH: rank,
        ROTATED: rotated,
        RANK: rank,
        "attention.q_lora_rank": config["q_lora_rank"],
        WIDTHS: config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        DENSE_BLOCKS: config["mlp_layer_types"].count("dense"),
        "expert_shared_count": config["n_shared_experts"],
        WEIGHTS_SCALE: float(config["routed_scaling_factor"]),
        NORMED: config["norm_topk_prob"],
        GATING: BY_SIGMOID,
    }


OF_FAMILIES = {
    "gpt_oss": _gpt_oss,
    "gemma4_text": _gemma4,
    "qwen3_5_moe_text": _delta_rule,
    "glm4_moe_lite": _latents,
}
