"""Tiny seeded models of every supported kind, and checkpoint folders of them, for all tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.mistral4 import Mistral4Config, Mistral4ForCausalLM

from h2o_flexgen.models import tensor_names

AutoModelForCausalLM.register(
    Mistral4Config, Mistral4ForCausalLM, exist_ok=True
)  # it is there as a part of a model of several parts alone

VOCAB, POSITIONS, BLOCKS = 113, 128, 3
SCALAR = ".layer_scalar"
COUNT_FROM_ONE = "gemma", "gemma2", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"  # the weights of norms
OF_STATES = ".linear_attn.norm.weight"  # but not this one

_OPT = {"hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 80, "word_embed_proj_dim": 32}
_LLAMA = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 56}
_NEOX = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96, "rotary_pct": 0.5}
_EXPERTS = {**_LLAMA, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LLAMA3_ROPE = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_YARN = {"original_max_position_embeddings": 32, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False}
_GPT_OSS = {
    **_LLAMA,
    "head_dim": 16,
    "intermediate_size": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "swiglu_limit": 0.5,  # some of what tiny models have goes beyond it
    "swiglu_alpha": 1.3,
    "rope_theta": 700.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, **_YARN},
}
_GLM = {
    **_LLAMA,
    "head_dim": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "rope_theta": 500.0,
    "num_nextn_predict_layers": 0,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 400.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.1, 1.9],
    "long_factor": [2.0, 7.0],
}
_GEMMA = {
    **_LLAMA,
    "head_dim": 12,
    "query_pre_attn_scalar": 12,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
    },
    "tie_word_embeddings": True,
}
_GEMMA2 = {
    **_GEMMA,
    "query_pre_attn_scalar": 2,  # scores are large, so that their cap is felt
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 60.0},
}
_GEMMA4 = {
    **_GEMMA,
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
    },
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
}
_OF_GEMMA4 = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}
_GRANITE = {
    **_LLAMA,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.6,
    "rope_theta": 300.0,
}

_ERNIE = {"moe_intermediate_size": 24, "moe_num_experts": 6, "moe_k": 2}
_FALCON = {"hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 56}
_GPT = {"n_embd": 32, "n_head": 4}
_ALPHA = {"rope_type": "dynamic", "rope_theta": 300.0, "alpha": 5.0, "factor": 1.0}
_LLAMA4 = {
    **_LLAMA,
    "head_dim": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 56,
    "num_local_experts": 6,
    "num_experts_per_tok": 1,
    "no_rope_layer_interval": 2,
    "attn_scale": 0.6,
    "floor_scale": 9,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
}
_MPT = {"d_model": 32, "n_heads": 4, "max_seq_len": POSITIONS}
_MINIMAX = {
    "head_dim": 16,
    "intermediate_size": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "rope_theta": 400.0,
    "rotary_dim": 8,
}
_OLMO3_ROPE = {
    "full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 300.0, **_YARN, "truncate": True},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 300.0,
    **_YARN,
    "truncate": True,
    "original_max_position_embeddings": 9,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "llama_4_scaling_beta": 0.6,
}
_DEEPSEEK: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 56,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.4,
    "first_k_dense_replace": 1,
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 300.0, **_YARN, "truncate": True},
}
_GROUPS = {"q_lora_rank": 24, "n_group": 4, "topk_group": 2}
_STRETCHED = {**_DEEPSEEK["rope_parameters"], "mscale": 0.7, "mscale_all_dim": 0.7}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 300.0}
_DELTA: dict[str, Any] = {
    **_LLAMA,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,  # with fewer values transformers itself is far from what float64 gives
    "linear_value_head_dim": 16,
    "tie_word_embeddings": True,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
}
_KIMI: dict[str, Any] = {
    **{key: _DEEPSEEK[key] for key in _DEEPSEEK.keys() - {"n_routed_experts", "first_k_dense_replace", "rope_parameters"}},
    "num_local_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "linear_num_heads": 2,
    "linear_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_OF_DELTA = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
_LFM2: dict[str, Any] = {
    **_LLAMA,
    "block_multiple_of": 8,
    "layer_types": ["conv", "full_attention", "conv"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_FALCON_H1: dict[str, Any] = {
    **_MAMBA,
    "mamba_d_ssm": 48,
    "projectors_bias": True,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.8,
    "mlp_multipliers": [0.7, 1.4],
    "ssm_multipliers": [0.9, 1.2, 0.6, 1.3, 0.8],
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "key_multiplier": 1.7,
    "ssm_in_multiplier": 1.6,
    "ssm_out_multiplier": 0.7,
}
_NEMOTRON_H: dict[str, Any] = {
    **_LLAMA,
    "head_dim": 12,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 12,
    "chunk_size": 8,
    "time_step_min": 1e-9,  # to which transformers holds the steps of prompts, but not those behind them
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.4,
}
_GRANITE_H: dict[str, Any] = {
    **_GRANITE,
    **_MAMBA,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 40,
    "intermediate_size": 24,
    "num_experts_per_tok": 2,
}
_SLIDING = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

# kind -> the model_type of transformers and what its config says
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("opt", _OPT),
    "opt-350m": ("opt", {**_OPT, "word_embed_proj_dim": 24, "do_layer_norm_before": False}),
    "opt-untied": ("opt", {**_OPT, "tie_word_embeddings": False, "_remove_final_layer_norm": True}),
    "opt-bare": (
        "opt",
        {**_OPT, "enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    ),
    "llama-mha": ("llama", {**_LLAMA, "num_key_value_heads": 4}),
    "llama-gqa": ("llama", {**_LLAMA, "head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {**_LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
    "llama31": (
        "llama",
        {**_LLAMA, "num_key_value_heads": 1, "rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **_LLAMA3_ROPE}},
    ),
    "llama-dynamic": ("llama", {**_LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama-yarn": (
        "llama",
        {**_LLAMA, "rope_theta": 700.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, **_YARN}},
    ),
    "mistral": ("mistral", {**_LLAMA, "sliding_window": 64, "rope_theta": 300.0}),
    "mistral-near": ("mistral", {**_LLAMA, "sliding_window": 6, "rope_theta": 300.0}),
    "qwen2-near": ("qwen2", {**_LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2": ("qwen2", {**_LLAMA, "tie_word_embeddings": True, "rope_theta": 1000.0}),
    "qwen2-wordy": ("qwen2", {**_LLAMA, "vocab_size": 1100, "tie_word_embeddings": True}),  # the table outweighs the layers
    "qwen3": ("qwen3", {**_LLAMA, "head_dim": 16}),
    "phi": ("phi", {**_LLAMA, "num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "phi-gqa": ("phi", {**_LLAMA, "qk_layernorm": True, "hidden_act": "gelu", "tie_word_embeddings": True}),
    "phi3": ("phi3", {**_LLAMA, "original_max_position_embeddings": 64, "rope_parameters": _LONGROPE}),
    "phi3-near": ("phi3", {**_LLAMA, "sliding_window": 6, "rope_theta": 300.0}),
    "gemma": ("gemma", {**_LLAMA, "head_dim": 12, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", _GEMMA),
    "gemma3-capped": ("gemma3_text", {**_GEMMA, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 20}),
    "gemma2": ("gemma2", _GEMMA2),
    "gemma4": (
        "gemma4_text",
        {**_GEMMA4, **_OF_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4-dense": ("gemma4_text", {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 2}),
    "gemma4-unified": ("gemma4_unified_text", {**_GEMMA4, "sliding_window": 9, "attention_bias": True}),
    "mixtral": ("mixtral", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}),
    "olmoe": ("olmoe", {**_LLAMA, "intermediate_size": 24, "num_experts": 9, "num_experts_per_tok": 3, "clip_qkv": 1.5}),
    "qwen2-moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}),
    "qwen3-moe": ("qwen3_moe", {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "qwen3-moe-near": (
        "qwen3_moe",
        {**_EXPERTS, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},  # all layers have it
    ),
    "gpt-oss": ("gpt_oss", {**_GPT_OSS, "sliding_window": 5}),
    "gpt-oss-far": ("gpt_oss", {**_GPT_OSS, "layer_types": ["full_attention"] * BLOCKS}),
    "glm4-moe": ("glm4_moe", {**_GLM, "n_shared_experts": 2, "routed_scaling_factor": 1.7, "use_qk_norm": True}),
    "glm4-moe-air": ("glm4_moe", {**_GLM, "attention_bias": True, "norm_topk_prob": False, "partial_rotary_factor": 0.25}),
    "granite": ("granite", {**_GRANITE, "tie_word_embeddings": True}),
    "granite-moe": ("granitemoe", {**_GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}),
    "starcoder2": ("starcoder2", {**_LLAMA, "rope_theta": 300.0}),
    "starcoder2-near": (
        "starcoder2",
        {**_LLAMA, "sliding_window": 6, "use_bias": False, "hidden_act": "gelu", "tie_word_embeddings": True},
    ),
    "stablelm": ("stablelm", {**_LLAMA, "use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm-parallel": ("stablelm", {**_LLAMA, "use_parallel_residual": True}),
    "ernie": ("ernie4_5", {**_LLAMA, "head_dim": 16, "use_bias": True, "rope_theta": 300.0}),
    "ernie-moe": ("ernie4_5_moe", {**_LLAMA, **_ERNIE, "moe_num_shared_experts": 2, "rope_theta": 300.0}),
    "ernie-moe-biased": (
        "ernie4_5_moe",
        {
            **_LLAMA,
            **_ERNIE,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 2,
            "use_bias": True,
        },
    ),
    "falcon-grouped": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon": ("falcon", {**_FALCON, "rope_theta": 300.0, "tie_word_embeddings": True}),
    "falcon-sequential": ("falcon", {**_FALCON, "multi_query": False, "parallel_attn": False, "activation": "gelu_new"}),
    "gpt2": ("gpt2", {**_GPT, "n_inner": 72, "tie_word_embeddings": True}),
    "gpt2-untied": ("gpt2", {**_GPT, "scale_attn_weights": False, "activation_function": "gelu"}),
    "gptj": ("gptj", {**_GPT, "rotary_dim": 4}),
    "bloom": ("bloom", {"hidden_size": 32, "n_head": 4, "tie_word_embeddings": True}),
    "bloom-between": ("bloom", {"hidden_size": 48, "n_head": 6}),  # no power of two
    "mpt": ("mpt", {**_MPT, "tie_word_embeddings": True}),
    "mpt-clipped": ("mpt", {**_MPT, "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.5}}),
    "hunyuan": ("hunyuan_v1_dense", {**_LLAMA, "head_dim": 16, "rope_parameters": _ALPHA}),
    "hunyuan-moe": (
        "hunyuan_v1_moe",
        {**_LLAMA, "head_dim": 16, "intermediate_size": 24, "num_experts": 6, "moe_topk": 2, "attention_bias": True},
    ),
    "llama4": ("llama4_text", {**_LLAMA4, "interleave_moe_layer_step": 2}),
    "llama4-near": ("llama4_text", {**_LLAMA4, "use_qk_norm": False, "attention_chunk_size": 48, "num_experts_per_tok": 2}),
    "minimax": ("minimax_m2", {**_LLAMA, **_MINIMAX}),
    "smollm3": ("smollm3", {**_LLAMA, "no_rope_layers": [1, 0, 1], "rope_theta": 300.0, "mlp_bias": True}),
    "olmo": ("olmo", {**_LLAMA, "clip_qkv": 1.5, "rope_theta": 300.0}),
    "olmo2": ("olmo2", {**_LLAMA, "rope_theta": 300.0}),
    "olmo3": ("olmo3", {**_LLAMA, **_SLIDING, "rope_parameters": _OLMO3_ROPE}),
    "ministral": ("ministral", {**_LLAMA, **_SLIDING, "head_dim": 12, "rope_theta": 300.0}),
    "ministral3": ("ministral3", {**_LLAMA, "head_dim": 12, "rope_parameters": _MINISTRAL3_ROPE}),
    "exaone4": ("exaone4", {**_LLAMA, **_SLIDING, "rope_theta": 300.0}),
    "exaone4-full": ("exaone4", {**_LLAMA, "sliding_window": None, "layer_types": ["full_attention"] * BLOCKS}),
    "cohere": ("cohere", {**_LLAMA, "use_qk_norm": True, "logit_scale": 1.7, "tie_word_embeddings": True}),
    "cohere-plain": ("cohere", {**_LLAMA, "attention_bias": True}),
    "cohere2": ("cohere2", {**_LLAMA, **_SLIDING, "logit_scale": 1.7, "rope_theta": 300.0}),
    "glm4": ("glm4", {**_LLAMA, "head_dim": 16, "rope_theta": 300.0}),
    "deepseek-v2": ("deepseek_v2", {**_DEEPSEEK, "q_lora_rank": None, "rope_parameters": _STRETCHED}),
    "deepseek-v2-groups": ("deepseek_v2", {**_DEEPSEEK, **_GROUPS, "topk_method": "group_limited_greedy"}),
    "deepseek-v3": (
        "deepseek_v3",
        {**_DEEPSEEK, **_GROUPS, "num_mtp_layers": 0, "rope_parameters": {**_STRETCHED, "mscale_all_dim": 0.9}},
    ),
    "dots": (
        "dots1",
        {
            **_GLM,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.4,
            "sliding_window": 6,
            "max_window_layers": 2,
        },
    ),
    "glm4-lite": ("glm4_moe_lite", {**_DEEPSEEK, "q_lora_rank": 24, "n_shared_experts": 1, "rope_parameters": _PLAIN_ROPE}),
    "mistral4": (
        "mistral4",
        {**_DEEPSEEK, **_GROUPS, "rope_parameters": {**_STRETCHED, "llama_4_scaling_beta": 0.4}},
    ),
    "lfm2": ("lfm2", {**_LFM2, "conv_bias": True, "tie_embedding": True}),
    "lfm2-short": (
        "lfm2",
        {
            **_LFM2,
            "conv_L_cache": 2,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["full_attention", "conv", "full_attention"],
        },
    ),
    "lfm2-moe": (
        "lfm2_moe",
        {
            **_LFM2,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.4,
        },
    ),
    "qwen3-5": ("qwen3_5_text", {**_DELTA, "attention_bias": True}),
    "qwen3-5-moe": (
        "qwen3_5_moe_text",
        {**{key: one for key, one in _DELTA.items() if key != "intermediate_size"}, **_OF_DELTA},
    ),
    "qwen3-next": ("qwen3_next", {**_DELTA, **_OF_DELTA, "mlp_only_layers": [1]}),
    "kimi-linear": ("kimi_linear", _KIMI),
    "kimi-linear-ranked": (
        "kimi_linear",
        {
            **_KIMI,
            "q_lora_rank": 24,
            "attention_bias": True,
            "norm_topk_prob": False,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "bamba": ("bamba", {**_LLAMA, **_MAMBA, "attn_layer_indices": [1], "mamba_proj_bias": True}),
    "granite-h": ("granitemoehybrid", {**_GRANITE_H, "num_local_experts": 6, "mamba_conv_bias": False}),
    "granite-h-dense": ("granitemoehybrid", {**_GRANITE_H, "num_local_experts": 0, "position_embedding_type": "rope"}),
    "falcon-h1": ("falcon_h1", {**_LLAMA, **_FALCON_H1}),
    "falcon-h1-normed": (
        "falcon_h1",
        {**_LLAMA, **_MAMBA, "mamba_d_ssm": None, "mamba_rms_norm": True, "rope_parameters": _PLAIN_ROPE},
    ),
    "nemotron-h": ("nemotron_h", {**_NEMOTRON_H, "use_bias": True, "mlp_bias": True, "n_group": 2, "topk_group": 1}),
    "nemotron-h-latent": ("nemotron_h", {**_NEMOTRON_H, "moe_latent_size": 96}),
    "nemotron-h-dense": (
        "nemotron_h",
        {**_NEMOTRON_H, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
    ),
    "seed-oss": ("seed_oss", {**_LLAMA, "head_dim": 12, "attention_out_bias": True, "mlp_bias": True}),
    "arcee": ("arcee", {**_LLAMA, "rope_theta": 300.0}),
    "apertus": ("apertus", {**_LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **_LLAMA3_ROPE}}),
    "neox-parallel": ("gpt_neox", {**_NEOX, "use_parallel_residual": True, "hidden_act": "gelu"}),
    "neox-sequential": (
        "gpt_neox",
        {**_NEOX, "use_parallel_residual": False, "hidden_act": "gelu_fast", "attention_bias": False, "rotary_pct": 0.25},
    ),
    "neox-tied": ("gpt_neox", {**_NEOX, "tie_word_embeddings": True, "hidden_act": "gelu_new", "rotary_pct": 1.0}),
}


def of_each_type(kinds: list[str]) -> list[str]:
    """One kind of each model_type."""
    return [*{KINDS[kind][0]: kind for kind in reversed(kinds)}.values()]


def tiny_config(kind: str, **changes: Any) -> PretrainedConfig:
    model_type, values = KINDS[kind]
    common = {
        "vocab_size": VOCAB,
        "max_position_embeddings": POSITIONS,
        "num_hidden_layers": BLOCKS,
        "tie_word_embeddings": model_type == "opt",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    every = {**common, **values, **changes}
    for key in ("layer_types", "mlp_layer_types"):
        if every.get(key):
            every[key] = every[key][: every["num_hidden_layers"]]
    return CONFIG_MAPPING[model_type](**_copied(every))


def tiny_hf_model(kind: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    return random_model(tiny_config(kind, **changes), seed)


def random_model(config: PretrainedConfig, seed: int = 0, kind: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """A model in fp32. Every parameter is random, norms and biases too, so that none can be forgotten unnoticed."""
    model = kind.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    counts_from_one = model.config.model_type in COUNT_FROM_ONE
    for name, parameter in model.named_parameters():
        middle = 0.0 if counts_from_one and not name.endswith(OF_STATES) else _middle(name)
        parameter.data = middle + _spread(name) * torch.randn(parameter.shape, generator=generator)
    for name, buffer in _corrections(model):
        middle = 1.0 if name.endswith(SCALAR) else 0.0
        buffer.data = middle + 0.1 * torch.randn(buffer.shape, generator=generator)
    return model


def _corrections(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """What checkpoints have and is no parameter: how routers correct their choice, and numbers of activations."""
    ends = "e_score_correction_bias", ".expert_bias", ".act_fn.beta", ".act_fn.eps", SCALAR
    return ((name, one) for name, one in model.named_buffers() if name.endswith(ends))


def _middle(name: str) -> float:
    return 1.0 if ("norm" in name or ".ln_" in name) and name.endswith("weight") else 0.0


def _spread(name: str) -> float:
    """The spread of random values. Token embeddings are small beside the blocks, or a tied head would repeat every token."""
    return 0.1 if any(own in name for own in ("embed_tokens", "embed_in", "wte", "word_embeddings")) else 0.25


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every parameter once, by its name in a checkpoint; transformers 5 has another one for NeoX's head in memory."""
    head = "embed_out.weight" if model.config.model_type == "gpt_neox" else "lm_head.weight"
    named = {head if name == "lm_head.weight" else name: tensor.detach() for name, tensor in model.named_parameters()}
    return named_in_model(model.config, dict(_stored(model.config.model_type, {**named, **dict(_corrections(model))})))


def _stored(model_type: str, named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors as checkpoints have them: those of Kimi have a convolution for each of three parts."""
    for name, tensor in named.items():
        if model_type != "kimi_linear" or not name.endswith("self_attn.conv1d.weight"):
            yield name.replace(".forget_gate.", "."), tensor
            continue
        for part, own in zip("qkv", tensor.chunk(3)):
            yield name.replace(".conv1d.", f".{part}_conv1d."), own


def named_in_model(config: PretrainedConfig, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint, as layers have them."""
    names = tensor_names(config)
    found = {names.usual(name): tensor for name, tensor in named.items()}
    usual = {name: tensor.mT if name.endswith(names.turned) else tensor for name, tensor in found.items()}
    for end, parts in names.of_heads.items():
        for name in [name for name in usual if name.endswith(end)]:
            whole = usual.pop(name)
            usual |= {name.removesuffix(end) + part: own.of(whole) for part, own in parts.items()}
    return with_each_expert(usual)


def with_each_expert(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, with those of each expert where there is one for all experts of a layer."""
    has_bias = any(name.endswith(".gate_up_proj_bias") for name in named)
    return {own: values for name, tensor in named.items() for own, values in _of_each_expert(name, tensor, has_bias)}


def _of_each_expert(name: str, tensor: Tensor, has_bias: bool) -> Iterator[tuple[str, Tensor]]:
    """The matrices of experts, which transformers holds as one tensor for a layer."""
    prefix, of_all, kind = name.rpartition(".mlp.experts.")
    if not of_all or kind[0].isdigit():
        yield name, tensor
        return
    if kind.endswith("_bias"):
        yield from ((f"{prefix}{of_all}{number}.{kind.removesuffix('_bias')}.bias", own) for number, own in enumerate(tensor))
        return
    if has_bias:  # gpt-oss: one matrix, transposed
        yield from ((f"{prefix}{of_all}{number}.{kind}.weight", own.T.contiguous()) for number, own in enumerate(tensor))
        return
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    for number, own in enumerate(tensor):
        yield from ((f"{prefix}{of_all}{number}.{part}.weight", one) for part, one in zip(parts, own.chunk(len(parts))))


def save_tiny(
    kind: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int = "5GB",
    safe: bool = True,
    seed: int = 0,
    **changes: Any,
) -> PreTrainedModel:
    """Writes a checkpoint folder; returns the model that it holds, rounded to `dtype` but computing in fp32."""
    model = _cast(tiny_hf_model(kind, seed, **changes), dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if not safe:
        _to_bin(Path(folder))
    return _cast(model, torch.float32)


def save_classifier(kind: str, folder: Path, labels: int = 3, **changes: Any) -> PreTrainedModel:
    """The same for a checkpoint that scores texts by labels."""
    model = random_model(tiny_config(kind, num_labels=labels, **changes), kind=AutoModelForSequenceClassification)
    model.save_pretrained(folder)
    return model


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Casts parameters only: `model.to` would round rotary frequencies as well, which no checkpoint holds."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _to_bin(folder: Path) -> None:
    """Rewrites the same shards as pickles of torch, as older checkpoints are."""
    from safetensors.torch import load_file

    for file in folder.glob("*.safetensors"):
        torch.save(load_file(file), file.with_name(_bin_name(file.name)))
        file.unlink()
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] = {name: _bin_name(file) for name, file in content["weight_map"].items()}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(content))
        index.unlink()


def _bin_name(safetensors_name: str) -> str:
    return safetensors_name.replace("model", "pytorch_model").replace(".safetensors", ".bin")


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """A copy, because configs write into the dicts that they are given."""
    return json.loads(json.dumps(values))
