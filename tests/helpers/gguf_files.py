"""Tiny GGUF files of every supported kind, written by the `gguf` package as llama.cpp lays models out, with the models that
they hold: models of transformers with the weights that the same package decodes.

Where the package cannot encode, matrices are random blocks, in which all codes and scales differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, RopeScalingType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from h2o_flexgen.models import create_model
from tests.helpers.tiny import KINDS, checkpoint_tensors, tiny_hf_model

Bytes = NDArray[np.uint8]

EXPERT = re.compile(r"(model\.layers\.\d+)\.mlp\.experts\.\d+\.(gate|up|down)_proj\.(weight|bias)")
OF_HEADS = "self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"
ROUTERS = (".router.proj.weight", ".mlp.gate.weight", ".mlp.router.weight", ".mlp.shared_expert_gate.weight")
NEVER_PACKED = ("_norm.weight", "e_score_correction_bias", "embed_positions.weight")
FORMATS = {"float32": Type.F32, "float16": Type.F16, "bfloat16": Type.BF16} | {
    name.lower().replace("_k", "_K"): Type[name]
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
}
# where the halves of a block lie, and how large they are for values of a spread of about 1
SCALES: Mapping[Type, Mapping[int, float]] = {
    Type.IQ4_NL: {0: 0.016},
    Type.IQ4_XS: {0: 0.0009},
    Type.Q4_K: {0: 0.005, 2: 0.0375},
    Type.Q5_K: {0: 0.0024, 2: 0.0375},
    Type.Q6_K: {208: 0.0008},
}
# the least sizes in which rows are whole blocks
SIZES_OF_LARGE_BLOCKS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def sizes_for(format: str, model_type: str = "llama") -> dict[str, Any]:
    """Sizes of a tiny model whose rows are whole blocks of this format."""
    family, sizes = FAMILIES[model_type], SIZES_OF_LARGE_BLOCKS if FORMATS[format] in SCALES else SIZES
    return {**{family.called.get(name, name): size for name, size in sizes.items() if name not in family.lacks}, **family.sizes}


def save_gguf(
    kind: str,
    file: Path,
    format: str = "q4_0",
    table_format: str | None = None,
    seed: int = 0,
    tensors_per_part: int = 0,
    alignment: int = 0,
    metadata: Mapping[str, Any] | None = None,
    **changes: Any,
) -> PreTrainedModel:
    """Writes a file, or parts with so many tensors each, with matrices in one format and tables of tokens perhaps in another.
    Returns the model that it holds."""
    model = tiny_hf_model(kind, seed, **{**sizes_for(format, KINDS[kind][0]), **changes})
    model.config.allow_global_per_layer_attribute_access = True
    family = FAMILIES[model.config.model_type]
    if "moe" in (getattr(model.config, "layers_block_type", None) or ()):
        family = family._replace(architecture="nemotron_h_moe", says=(*family.says, _choice_of_nemotron))
    if getattr(model.config, "num_local_experts", None) == 0:  # what all tokens pass through is then the mlp
        family = family._replace(names={own: name.removesuffix("_shexp") for own, name in family.names.items()})
    writer = GGUFWriter(file, family.architecture, split_max_tensors=tensors_per_part)
    _add_metadata(writer, model.config, family)
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in (metadata or {}).items():
        _add_value(writer, key, value)
    _add_numbers(writer, model)
    generator = np.random.default_rng(seed)
    experts: dict[str, list[Tensor]] = {}
    tensors = {name: one for name, one in _tensors(model) if not is_number(name)}
    for name, parameter in tensors.items():
        if expert := EXPERT.fullmatch(name):
            part = "gate_up" if family.gates_with_ups and expert[2] != "down" else expert[2]
            experts.setdefault(f"{expert[1]}.ffn_{part}_exps.{expert[3]}", []).append(parameter)
            continue
        is_table, is_router = name in ("model.embed_tokens.weight", "lm_head.weight"), name.endswith(ROUTERS)
        own = format if not is_table else table_format or format
        is_plain = parameter.ndim != 2 or is_router or name.endswith(NEVER_PACKED)
        kind_there = Type.F32 if is_plain else FORMATS[own]
        _add_tensor(writer, model.config, family, name, parameter, kind_there, generator)
    for name, parameters in experts.items():
        kind_there = FORMATS[format] if name.endswith("weight") else Type.F32
        together = 2 if "gate_up" in name else 1
        _add_experts(writer, name.replace("model.layers", "blk"), parameters, kind_there, generator, together)
    _put_heads_back(model, tensors)
    _add_divisors(writer, model)
    if family.blocks_behind:
        _add_block_behind(writer, model.config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_metadata(writer: GGUFWriter, config: PretrainedConfig, family: Family) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + family.blocks_behind)
    names = ("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_hidden_size")
    usual = 4 * config.hidden_size if config.model_type in ("bloom", "mpt") else None  # where no config says it
    if (inner := next((getattr(config, name) for name in names if hasattr(config, name)), usual)) is not None:
        writer.add_feed_forward_length(inner)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(kv_heads_of(config))
    eps = eps_key(config)
    say_eps = writer.add_layer_norm_rms_eps if eps in EPS_KEYS[:2] else writer.add_layer_norm_eps
    say_eps(getattr(config, eps, USUAL_EPS))
    writer.add_vocab_size(config.vocab_size)
    rope = getattr(config, "rope_parameters", {"rope_theta": 10000.0, "rope_type": "default"})
    rope = rope.get("full_attention", rope)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    for say in family.says:
        say(writer, config)


def kv_heads_of(config: PretrainedConfig) -> int:
    if config.model_type == "falcon" and not config.new_decoder_architecture:
        return 1 if config.multi_query else config.num_attention_heads
    names = ("num_key_value_heads", "num_kv_heads", "num_attention_heads")
    found: int = next(getattr(config, name) for name in names if hasattr(config, name))
    return found


def eps_key(config: PretrainedConfig) -> str:
    """What a config calls that which norms add."""
    return next((key for key in EPS_KEYS if hasattr(config, key)), "")


USUAL_EPS = 1e-5  # where no config says it
EPS_KEYS = "rms_norm_eps", "norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"
Says = Callable[[GGUFWriter, PretrainedConfig], None]  # adds metadata of a family


def _window(writer: GGUFWriter, config: PretrainedConfig) -> None:
    if config.sliding_window:
        writer.add_sliding_window(config.sliding_window)


def _kinds(writer: GGUFWriter, config: PretrainedConfig) -> None:
    """Which layers have a window."""
    _window(writer, config)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _near_theta(writer: GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def _near_heads(writer: GGUFWriter, config: PretrainedConfig) -> None:
    """Keys and values of layers with a window, and the experts."""
    layers = config.per_layer_config
    writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    for say in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        say(layers["full_attention"].head_dim)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _longer_queries(writer: GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
    _temperature(writer, config)


def _temperature(writer: GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])


def _logit_scale(writer: GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_logit_scale(config.logit_scale)


def _caps(writer: GGUFWriter, config: PretrainedConfig) -> None:
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _multipliers(writer: GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _experts(writer: GGUFWriter, config: PretrainedConfig) -> None:
    if (count := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", 0)) == 0:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "moe_intermediate_size", 0):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _inner_width(writer: GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_expert_feed_forward_length(config.intermediate_size)


def _shared_expert(writer: GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _choice_of_ernie(writer: GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    writer.add_leading_dense_block_count(config.moe_layer_start_index)
    writer.add_expert_shared_count(config.moe_num_shared_experts)


def _clip(writer: GGUFWriter, config: PretrainedConfig) -> None:
    if config.clip_qkv:
        writer.add_clamp_kqv(config.clip_qkv)


def _slopes(writer: GGUFWriter, config: PretrainedConfig) -> None:
    attention = config.attn_config
    writer.add_max_alibi_bias(float(attention.alibi_bias_max))
    if attention.clip_qkv:
        writer.add_clamp_kqv(attention.clip_qkv)


def _divisors_of_phi3(writer: GGUFWriter, config: PretrainedConfig) -> None:
    rope = config.rope_parameters
    length, most = config.original_max_position_embeddings, config.max_position_embeddings
    writer.add_rope_scaling_orig_ctx_len(length)
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(most / length) / math.log(length)))
    for kind in ("long", "short"):
        writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))


def _alpha(writer: GGUFWriter, config: PretrainedConfig) -> None:
    """The theta that an alpha makes, as files have it."""
    rope, width = config.rope_parameters, config.head_dim
    if "alpha" in rope:
        theta = rope["rope_theta"] * rope["alpha"] ** (width / (width - 2))
        writer.kv_data[0][f"{writer.arch}.rope.freq_base"].value = theta
        writer.add_rope_scaling_type(RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)


def _slices_of_llama4(writer: GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def _sigmoids(writer: GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _choice_of_glm(writer: GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_nextn_predict_layers(FAMILIES[config.model_type].blocks_behind)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _choice_of_deepseek(writer: GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group or 1)
    writer.add_expert_group_used_count(config.topk_group or 1)
    is_v3 = config.model_type in ("deepseek_v3", "dots1")
    writer.add_expert_weights_norm(bool(config.model_type != "deepseek_v2" and config.norm_topk_prob))
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if is_v3 else gguf.ExpertGatingFuncType.SOFTMAX)


def _choice_of_kimi(writer: GGUFWriter, config: PretrainedConfig) -> None:
    """Blocks with the delta rule have no KV heads."""
    writer.add_leading_dense_block_count(config.mlp_layer_types.count("dense"))
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_kda_head_dim(config.linear_head_dim)
    _latents(writer, config)
    said = writer.kv_data[0][f"{writer.arch}.attention.head_count_kv"]
    said.value, said.type = [int(kind == "full_attention") for kind in config.layer_types], gguf.GGUFValueType.ARRAY


def _latents(writer: GGUFWriter, config: PretrainedConfig) -> None:
    rank, turned = config.kv_lora_rank, config.qk_rope_head_dim
    found = {"head_count_kv": 1, "key_length": rank + turned, "value_length": rank}
    for key, value in found.items():
        writer.kv_data[0][f"{writer.arch}.attention.{key}"].value = value
    writer.kv_data[0][f"{writer.arch}.rope.dimension_count"].value = turned
    writer.add_key_length_mla(config.qk_nope_head_dim + turned)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_kv_lora_rank(rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    if config.model_type != "kimi_linear":
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def _delta_rule(writer: GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", [kind != "full_attention" for kind in config.layer_types])


def _short_convolutions(writer: GGUFWriter, config: PretrainedConfig) -> None:
    """Blocks with one have no KV heads."""
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    writer.kv_data[0][f"{writer.arch}.attention.head_count_kv"].value = heads
    writer.kv_data[0][f"{writer.arch}.attention.head_count_kv"].type = gguf.GGUFValueType.ARRAY
    writer.add_shortconv_l_cache(config.conv_L_cache)


def _scans(writer: GGUFWriter, config: PretrainedConfig) -> None:
    scan = create_model(config, "float32")._scan  # type: ignore[attr-defined]
    writer.add_ssm_conv_kernel(scan.mixed)
    writer.add_ssm_state_size(scan.state_width)
    writer.add_ssm_group_count(scan.groups)
    writer.add_ssm_time_step_rank(scan.heads)
    writer.add_ssm_inner_size(scan.inner)


def _kinds_of_nemotron(writer: GGUFWriter, config: PretrainedConfig) -> None:
    """Blocks without attention have no KV heads, and blocks without an mlp no width of one."""
    lists = {
        "attention.head_count_kv": ("full_attention", config.num_key_value_heads),
        "feed_forward_length": ("mlp", config.intermediate_size),
    }
    if "moe" in config.layers_block_type:
        lists["feed_forward_length"] = "moe", config.moe_intermediate_size
    for key, (kind, value) in lists.items():
        said = writer.kv_data[0][f"{writer.arch}.{key}"]
        said.value = [value if own == kind else 0 for own in config.layers_block_type]
        said.type = gguf.GGUFValueType.ARRAY
    writer.kv_data[0].pop(f"{writer.arch}.attention.layer_norm_epsilon")
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)


def _kinds_of_granite(writer: GGUFWriter, config: PretrainedConfig) -> None:
    said = writer.kv_data[0][f"{writer.arch}.attention.head_count_kv"]
    said.value = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    said.type = gguf.GGUFValueType.ARRAY
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")


def _choice_of_nemotron(writer: GGUFWriter, config: PretrainedConfig) -> None:
    _experts(writer, config)
    writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
    if config.moe_latent_size:
        writer.add_moe_latent_size(config.moe_latent_size)


def _choice_of_lfm2(writer: GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    kind = gguf.GGUFValueType.get_type(value)
    writer.add_key_value(key, value, kind)


def is_number(name: str) -> bool:
    """Whether a tensor is one number, which files have among the metadata."""
    return ".act_fn." in name


def _add_numbers(writer: GGUFWriter, model: PreTrainedModel) -> None:
    """The numbers of activations, each for all layers."""
    found = [(name.rpartition(".")[2], one.item()) for name, one in _tensors(model) if is_number(name)]
    for kind in dict.fromkeys(kind for kind, _ in found):
        writer.add_array(f"{writer.arch}.xielu.{kind}", [value for own, value in found if own == kind])


def _add_divisors(writer: GGUFWriter, model: PreTrainedModel) -> None:
    """The scaling of LLaMA 3, or a rotation of some pairs of values, as what each frequency is divided by."""
    rope = getattr(model.config, "rope_parameters", {})
    if (far := rope.get("full_attention", {})).get("rope_type") == "proportional":
        pairs = model.config.per_layer_config["full_attention"].head_dim // 2
        rotated = int(far["partial_rotary_factor"] * pairs)
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (pairs - rotated), np.float32))
    if rope.get("rope_type") == "llama3":
        scaled: Tensor = model.model.rotary_emb.inv_freq
        plain = rope["rope_theta"] ** -(torch.arange(0, 2 * len(scaled), 2) / (2 * len(scaled)))
        writer.add_tensor("rope_freqs.weight", (plain / scaled).float().numpy())


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by its name in a checkpoint; of gpt-oss the gates of experts and what goes up are apart. What is written
    into any of them is in the model."""
    if model.config.model_type != "gpt_oss":
        yield from checkpoint_tensors(model).items()
        return
    for name, tensor in ((name, parameter.detach()) for name, parameter in model.named_parameters()):
        prefix, of_all, kind = name.rpartition(".mlp.experts.")
        if not of_all:
            yield name, tensor
            continue
        parts = ("gate_proj", "up_proj") if kind.startswith("gate_up_proj") else ("down_proj",)
        for first, part in enumerate(parts):
            for number, own in enumerate(tensor[..., first :: len(parts)]):  # outputs come last
                end = "bias" if kind.endswith("_bias") else "weight"
                yield f"{prefix}{of_all}{number}.{part}.{end}", own.T if own.ndim == 2 else own


def _add_block_behind(writer: GGUFWriter, config: PretrainedConfig) -> None:
    """Some of what files of GLM have behind the blocks of the model."""
    for part in ("attn_norm", "nextn.eh_proj"):
        writer.add_tensor(f"blk.{config.num_hidden_layers}.{part}.weight", np.ones((2, 4), dtype=np.float32))


def _add_tensor(
    writer: GGUFWriter,
    config: PretrainedConfig,
    family: Family,
    name: str,
    parameter: Tensor,
    kind: Type,
    generator: np.random.Generator,
) -> None:
    """Writes what the parameter becomes in this format, and puts what comes of that into the parameter."""
    if name.endswith("e_score_correction_bias"):
        name = name.replace("correction_bias", "correction.bias")
    name += ".weight" * name.endswith((".sinks", ".layer_scalar"))
    name = name.replace("router.per_expert_scale", "router.experts.scale")
    kind = _fitting(kind, parameter.shape[-1])
    is_fused = name.endswith("shared_experts.gate_up_proj.weight")
    is_of_kimi = name.endswith(("_conv1d.weight", "self_attn.A_log", "self_attn.dt_bias"))
    if name.endswith(".conv.conv.weight") or "linear_attn." in name or ".mamba." in name or is_fused or is_of_kimi:
        _add_of_states(writer, config, family, name, parameter, kind, generator)
        return
    order = _rows_in_file(config, family, name, len(parameter))
    added = family.norms_add if "norm" in name else 0.0
    written = _in_blocks(parameter[order].numpy() + np.float32(added), kind, generator)
    parameter[order] = torch.from_numpy(dequantize(written, kind).astype(np.float32)).view(parameter.shape) - added
    if name.endswith(("shared_expert_gate.weight", "e_score_correction.bias")) and written.ndim == 2:
        written = written[0]
    if name.endswith(OF_HEADS):
        written = written.reshape(config.num_attention_heads, -1, written.shape[-1])
    writer.add_tensor(name_in_file(name, family.names), written, raw_dtype=kind)


def _add_of_states(
    writer: GGUFWriter,
    config: PretrainedConfig,
    family: Family,
    name: str,
    parameter: Tensor,
    kind: Type,
    generator: np.random.Generator,
) -> None:
    """Writes a tensor of a layer with states: value heads that belong to one key head stand as far apart as there are key
    heads, and rates are no logarithms."""
    if name.endswith((".A_log", ".mamba.D")):
        moved = _tiled(config, name, parameter, 0).numpy()
        own = moved if name.endswith(".D") else -np.exp(moved)
        own = own[:, None] if ".mamba." in name else own.reshape(-1, 1) if _lacks_ones(name) else own
        writer.add_tensor(name_in_file(f"{name}.weight", family.names).removesuffix(".weight"), own)
        return
    if name.endswith("shared_experts.gate_up_proj.weight"):
        stem = name.removesuffix("gate_up_proj.weight")
        for part, own in zip(("gate", "up"), parameter.chunk(2)):
            written = _in_blocks(own.numpy(), kind, generator)
            own.copy_(torch.from_numpy(dequantize(written, kind).astype(np.float32)))
            writer.add_tensor(name_in_file(f"{stem}{part}_proj.weight", family.names), written, raw_dtype=kind)
        return
    if name.endswith("in_proj_qkvz.weight"):
        for part, rows in _of_qkvz(config).items():
            kind = _fitting(kind, parameter.shape[-1])
            written = _in_blocks(parameter[rows].numpy(), kind, generator)
            parameter[rows] = torch.from_numpy(dequantize(written, kind).astype(np.float32))
            writer.add_tensor(name_in_file(name.replace("qkvz", part), family.names), written, raw_dtype=kind)
        return
    axis = 1 if name.endswith(".out_proj.weight") else 0
    moved = _tiled(config, name, parameter, axis).flatten(1) if parameter.ndim == 3 else _tiled(config, name, parameter, axis)
    kind = Type.F32 if parameter.ndim != 2 else kind
    written = _in_blocks(moved.contiguous().numpy(), kind, generator)
    there = torch.from_numpy(dequantize(written, kind).astype(np.float32)).view(_tiled(config, name, parameter, axis).shape)
    parameter.copy_(_tiled(config, name, there, axis, back=True))
    own = name.removesuffix(".dt_bias") + ".dt_proj.bias" if name.endswith(".dt_bias") else name
    if name.endswith("_conv1d.weight"):
        written = written.reshape(*(() if _lacks_ones(name) else (1,)), -1, 1, parameter.shape[-1])
    if name.endswith(".mamba.norm.weight"):
        written = written.reshape(writer.kv_data[0][f"{writer.arch}.ssm.group_count"].value, -1)
    writer.add_tensor(name_in_file(own, family.names), written, raw_dtype=kind)


def _lacks_ones(name: str) -> bool:
    """Whether a tensor of Kimi is written without its first dimensions of one, as they are in files that were packed later."""
    return ".self_attn." in name and ".layers.0." in name


def _of_qkvz(config: PretrainedConfig) -> Mapping[str, Tensor]:
    """The rows of the matrix that has all of a key head together, as the two matrices of files have them."""
    served = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    widths = [config.linear_key_head_dim] * 2 + [served] * 2
    each = torch.arange(config.linear_num_key_heads * sum(widths)).view(-1, sum(widths)).split(widths, dim=1)
    *qkv, gate = (part.flatten() for part in each)
    return {"qkv": torch.cat(qkv), "z": gate}


def _tiled(config: PretrainedConfig, name: str, values: Tensor, axis: int, back: bool = False) -> Tensor:
    """Values with those of value heads in the order of files, or back."""
    if not config.model_type.startswith("qwen3_5") or name.endswith(".norm.weight"):
        return values
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    rest = 2 * keys * config.linear_key_head_dim if name.endswith(("in_proj_qkv.weight", "conv1d.weight")) else 0
    before, own = values.narrow(axis, 0, rest), values.narrow(axis, rest, values.shape[axis] - rest)
    groups = (heads // keys, keys) if back else (keys, heads // keys)
    moved = own.unflatten(axis, (*groups, -1)).transpose(axis, axis + 1).flatten(axis, axis + 2)
    return torch.cat((before, moved), dim=axis)


def _fitting(kind: Type, columns: int) -> Type:
    """The format, or one with smaller blocks, if rows are no whole blocks of it."""
    return next(own for own in (kind, Type.Q8_0, Type.F32) if columns % gguf.GGML_QUANT_SIZES[own][0] == 0)


def _put_heads_back(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Puts what was written of parts of a matrix of all heads into the matrix."""
    for name, parameter in model.named_parameters():
        if name.endswith(".kv_b_proj.weight"):
            keys, values = (tensors[name.replace("kv_b_proj", part)] for part in ("k_b_proj", "v_b_proj"))
            by_head = parameter.data.view(model.config.num_attention_heads, -1, parameter.shape[1])
            first = keys.shape[1]
            by_head[:, :first] = keys.view(len(by_head), -1, first).transpose(1, 2)
            by_head[:, first:] = values.view(len(by_head), -1, values.shape[1])


def _add_experts(
    writer: GGUFWriter, name: str, parameters: list[Tensor], kind: Type, generator: np.random.Generator, together: int
) -> None:
    """One matrix or bias of all experts, or so many behind one another, as one tensor."""
    values = torch.stack(parameters)
    written = _in_blocks(values.view(-1, values.shape[-1]).numpy(), kind, generator)
    decoded = torch.from_numpy(dequantize(written, kind).astype(np.float32)).view(values.shape)
    for parameter, own in zip(parameters, decoded, strict=True):
        parameter.copy_(own)
    experts, rows = len(values) // together, together * values.shape[1]
    shape = (experts, rows) if values.ndim == 3 else (experts,)
    writer.add_tensor(name, written.reshape(*shape, -1), raw_dtype=kind)


def _in_blocks(values: NDArray[np.float32], kind: Type, generator: np.random.Generator) -> NDArray[Any]:
    """Values that the package can encode, or else random blocks with values of the same spread."""
    if kind not in SCALES:
        return quantize(values, kind)
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(256, size=(values.size // size, nbytes), dtype=np.uint8)
    for place, scale in SCALES[kind].items():
        halves = generator.uniform(0.7, 1.3, len(blocks)) * scale * values.std()
        blocks[:, place : place + 2] = halves.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(len(values), -1)


def _rows_in_file(config: PretrainedConfig, family: Family, name: str, rows: int) -> Tensor:
    """The row of a tensor in transformers that is each row in the file: some have values rotated together as neighbours."""
    order = torch.arange(rows)
    if config.model_type == "bloom" and "qkv_proj" in name:
        return order.view(config.num_attention_heads, 3, -1).transpose(0, 1).flatten()
    if config.model_type == "falcon" and "qkv_proj" in name:
        each = order.view(kv_heads_of(config), -1, config.head_dim)  # the queries of a KV head, its key and its value
        return torch.cat([part.flatten() for part in (each[:, :-2], each[:, -2], each[:, -1])])
    is_moved = family.moves_rows and ("q_proj" in name or "k_proj" in name)
    heads = config.num_attention_heads if "q_proj" in name else kv_heads_of(config)
    return order.view(heads, 2, -1).transpose(1, 2).flatten() if is_moved else order


def name_in_file(name: str, names: Mapping[str, str]) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{names[stem]}.{kind}"
    block, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{block}.{names[part]}.{kind}"


PARTS = "gate", "up", "down"
NAMES: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embed_positions": "position_embd",
    "self_attn.qkv_proj": "attn_qkv",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction": "exp_probs_b",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.{shared}.{part}_proj": f"ffn_{part}_shexp" for part in PARTS for shared in ("shared_expert", "shared_experts")},
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES_OF_LATENTS = NAMES | {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in ("q_a", "q_b", "k_b", "v_b")},
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    **{f"self_attn.{part}_a_layernorm": f"attn_{part}_a_norm" for part in ("q", "kv")},
}
NAMES_OF_KIMI = NAMES_OF_LATENTS | {
    **{f"self_attn.{part}_proj": f"ssm_{part}" for part in ("f_a", "f_b", "g_a", "g_b")},
    **{f"self_attn.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    "self_attn.b_proj": "ssm_beta",
    "self_attn.A_log": "ssm_a",
    "self_attn.dt_proj": "ssm_dt",
    "self_attn.o_norm": "ssm_norm",
}
NAMES_BEHIND = NAMES | {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
NAMES_AROUND = NAMES_BEHIND | {"pre_feedforward_layernorm": "ffn_norm"}
NAMES_OF_GLM4 = NAMES | {
    "mlp.gate_up_proj": "ffn_up",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
NAMES_BY_PLACE = NAMES | {"post_attention_layernorm": "post_attention_norm"}


NAMES_OF_DELTA = NAMES_BY_PLACE | {
    **{f"linear_attn.in_proj_{own}": f"attn_{part}" for part, own in (("qkv", "qkv"), ("gate", "z"))},
    **{f"linear_attn.in_proj_{own}": f"ssm_{part}" for part, own in (("alpha", "a"), ("beta", "b"))},
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_proj": "ssm_dt",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
NAMES_OF_NEXT = NAMES_OF_DELTA | {"linear_attn.in_proj_ba": "ssm_ba"}
NAMES_OF_SCANS = NAMES | {
    **{f"mlp.{own}_latent_proj": f"ffn_latent_{part}" for part, own in (("down", "fc1"), ("up", "fc2"))},
    **{f"mamba.{part}": f"ssm_{own}" for part, own in (("in_proj", "in"), ("out_proj", "out"), ("A_log", "a"), ("D", "d"))},
    **{f"mamba.{part}": f"ssm_{own}" for part, own in (("conv1d", "conv1d"), ("dt_proj", "dt"), ("norm", "norm"))},
}
NAMES_OF_LFM2 = NAMES | {
    "model.norm": "token_embd_norm",
    **{f"conv.{part}": f"shortconv.{part}" for part in ("conv", "in_proj", "out_proj")},
}


class Family(NamedTuple):
    """How files have the models of a model_type."""

    architecture: str
    says: tuple[Says, ...] = ()
    names: Mapping[str, str] = NAMES
    moves_rows: bool = False  # of queries and keys, so that values that are rotated together are neighbours
    sizes: Mapping[str, Any] = MappingProxyType(
        {}
    )  # with which rows are whole blocks, and nothing that files do not say is used
    norms_add: float = 0.0  # to their weights
    gates_with_ups: bool = False  # of experts
    called: Mapping[str, str] = MappingProxyType({})  # sizes, where its configs call them otherwise
    lacks: tuple[str, ...] = ()  # sizes that its configs do not have
    blocks_behind: int = 0  # those of a model, to guess at more tokens


NAMES_OF_GEMMA4 = NAMES_AROUND | {
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "router": "ffn_gate_inp",
    "router.experts": "ffn_down_exps",
    "layer_scalar": "layer_output_scale",
}
SMOLLM3_SIZES = {"no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4, "mlp_bias": False}
QWEN3_SIZES = {"moe_intermediate_size": 32, "decoder_sparse_step": 1, "norm_topk_prob": True}
DEEPSEEK_SIZES = {
    "head_dim": 8,  # of what is rotated
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
    "rope_parameters": {**KINDS["deepseek-v2"][1]["rope_parameters"]},
}
QWEN2_SIZES = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "mlp_only_layers": []}
DELTA_SIZES = {"linear_value_head_dim": 16, "linear_key_head_dim": 16, "attention_bias": False}
LFM2_SIZES = {"block_auto_adjust_ff_dim": False, "conv_bias": False}
FALCON_SIZES = {
    "projectors_bias": False,
    "mamba_norm_before_gate": False,
    "mlp_multipliers": [1.0] * 2,
    "ssm_multipliers": [1.0] * 5,
    **{f"{part}_multiplier": 1.0 for part in ("embedding", "lm_head", "key")},
    **{f"{part}_{way}_multiplier": 1.0 for part in ("attention", "ssm") for way in ("in", "out")},
}
PHI3_ROPE = {
    **KINDS["phi3"][1]["rope_parameters"],
    "short_factor": [1.1, 1.9, 2.5, 1.3],
    "long_factor": [2.0, 7.0, 1.2, 3.0],
}
LLAMA4_SIZES = {
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "no_rope_layer_interval": 4,
    "num_hidden_layers": 4,
    "use_qk_norm": True,
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", moves_rows=True),
    "mistral": Family("llama", (_window,), moves_rows=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "gemma": Family("gemma", norms_add=1.0),
    "gemma2": Family("gemma2", (_kinds, _caps), NAMES_AROUND, sizes={"query_pre_attn_scalar": 16}, norms_add=1.0),
    "gemma3_text": Family(
        "gemma3", (_kinds, _caps, _near_theta), NAMES_AROUND, sizes={"query_pre_attn_scalar": 16}, norms_add=1.0
    ),
    "gemma4_text": Family(
        "gemma4",
        (_kinds, _caps, _near_theta, _near_heads),
        NAMES_OF_GEMMA4,
        sizes={"global_head_dim": 32, "moe_intermediate_size": 32},
        gates_with_ups=True,
    ),
    "smollm3": Family("smollm3", moves_rows=True, sizes=SMOLLM3_SIZES),
    "olmo": Family("olmo", (_clip,), moves_rows=True),
    "olmo2": Family("olmo2", names=NAMES_BEHIND),
    "olmo3": Family("olmo2", (_kinds,), NAMES_BEHIND),
    "ministral3": Family("mistral3", (_longer_queries,), moves_rows=True),
    "exaone4": Family("exaone4", (_kinds,), NAMES_BEHIND),
    "cohere": Family("command-r", (_logit_scale,)),
    "cohere2": Family("cohere2", (_logit_scale, _kinds)),
    "glm4": Family("glm4", names=NAMES_OF_GLM4),
    "seed_oss": Family("seed_oss", names=NAMES_BY_PLACE),
    "arcee": Family("arcee", moves_rows=True),
    "apertus": Family("apertus"),
    "granite": Family("granite", (_multipliers,), moves_rows=True),
    "granitemoe": Family("granitemoe", (_multipliers, _experts), moves_rows=True),
    "mixtral": Family("llama", (_experts,), moves_rows=True),
    "olmoe": Family("olmoe", (_experts, _clip)),
    "qwen2_moe": Family("qwen2moe", (_experts, _shared_expert), sizes=QWEN2_SIZES),
    "qwen3_moe": Family("qwen3moe", (_experts,), sizes=QWEN3_SIZES),
    "starcoder2": Family("starcoder2", (_window,), sizes={"hidden_act": "gelu_pytorch_tanh"}),
    "stablelm": Family("stablelm"),
    "phi": Family("phi2", sizes={"hidden_act": "gelu_new", "qk_layernorm": False, "tie_word_embeddings": False}),
    "ernie4_5": Family("ernie4_5"),
    "ernie4_5_moe": Family(
        "ernie4_5-moe", (_experts, _choice_of_ernie), sizes={"moe_intermediate_size": 32, "use_bias": False}
    ),
    "falcon": Family(
        "falcon",
        names=NAMES | {"ln_attn": "attn_norm_2"},
        sizes={"bias": False, "activation": "gelu"},
        called={"intermediate_size": "ffn_hidden_size"},
        lacks=("head_dim",),
    ),
    "gpt2": Family(
        "gpt2",
        sizes={"scale_attn_weights": True, "activation_function": "gelu_new"},
        called={"intermediate_size": "n_inner", "hidden_size": "n_embd"},
        lacks=("head_dim",),
    ),
    "phi3": Family(
        "phi3",
        (_window, _divisors_of_phi3),
        NAMES | {"mlp.gate_up_proj": "ffn_up"},
        sizes={"original_max_position_embeddings": 64, "rope_parameters": PHI3_ROPE},
    ),
    "bloom": Family(
        "bloom",
        names=NAMES | {"model.embed_layernorm": "token_embd_norm"},
        sizes={"hidden_size": 96},
        lacks=("head_dim", "intermediate_size"),
    ),
    "mpt": Family(
        "mpt",
        (_slopes,),
        sizes={"attn_config": {"clip_qkv": 1.5}},
        called={"hidden_size": "d_model"},
        lacks=("head_dim", "intermediate_size"),
    ),
    "hunyuan_v1_dense": Family("hunyuan-dense", (_alpha,)),
    "hunyuan_v1_moe": Family("hunyuan-moe", (_experts, _inner_width), sizes={"intermediate_size": 32}),
    "llama4_text": Family("llama4", (_experts, _slices_of_llama4), sizes=LLAMA4_SIZES),
    "minimax_m2": Family("minimax-m2", (_experts, _inner_width, _sigmoids)),
    "gpt_oss": Family(
        "gpt-oss",
        (_window, _experts, _inner_width),
        NAMES_BY_PLACE,
        sizes={"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    ),
    "deepseek_v2": Family("deepseek2", (_experts, _choice_of_deepseek, _latents), NAMES_OF_LATENTS, sizes=DEEPSEEK_SIZES),
    "deepseek_v3": Family("deepseek2", (_experts, _choice_of_deepseek, _latents), NAMES_OF_LATENTS, sizes=DEEPSEEK_SIZES),
    "mistral4": Family(
        "mistral4",
        (_experts, _choice_of_deepseek, _latents, _temperature),
        NAMES_OF_LATENTS,
        sizes={
            **{key: size for key, size in DEEPSEEK_SIZES.items() if key != "head_dim"},
            "rope_parameters": KINDS["mistral4"][1]["rope_parameters"],
        },
        lacks=("head_dim",),
    ),
    "qwen3_5_text": Family("qwen35", (_delta_rule,), NAMES_OF_DELTA, sizes=DELTA_SIZES, norms_add=1.0),
    "qwen3_5_moe_text": Family(
        "qwen35moe",
        (_experts, _shared_expert, _delta_rule),
        NAMES_OF_DELTA,
        sizes={**DELTA_SIZES, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
        norms_add=1.0,
        lacks=("intermediate_size",),
    ),
    "lfm2": Family("lfm2", (_short_convolutions,), NAMES_OF_LFM2, sizes=LFM2_SIZES),
    "lfm2_moe": Family(
        "lfm2moe",
        (_experts, _short_convolutions, _choice_of_lfm2),
        NAMES_OF_LFM2,
        sizes={"conv_bias": False, "moe_intermediate_size": 32, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
    ),
    "qwen3_next": Family(
        "qwen3next",
        (_experts, _shared_expert, _delta_rule),
        NAMES_OF_NEXT,
        sizes={
            **DELTA_SIZES,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
        norms_add=1.0,
    ),
    "granitemoehybrid": Family(
        "granitehybrid",
        (_multipliers, _experts, _scans, _kinds_of_granite),
        NAMES_OF_SCANS,
        moves_rows=True,
        sizes={"intermediate_size": 32, "shared_intermediate_size": 64},
    ),
    "falcon_h1": Family("falcon-h1", (_scans,), NAMES_OF_SCANS, sizes=FALCON_SIZES),
    "nemotron_h": Family(
        "nemotron_h",
        (_scans, _kinds_of_nemotron),
        NAMES_OF_SCANS,
        sizes={
            "use_bias": False,
            "mlp_bias": False,
            "intermediate_size": 32,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 64,
        },
    ),
    "kimi_linear": Family(
        "kimi-linear",
        (_experts, _choice_of_kimi),
        NAMES_OF_KIMI,
        sizes={
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "moe_intermediate_size": 32,
            "linear_num_heads": 4,
            "linear_head_dim": 32,
            "attention_bias": False,
            "norm_topk_prob": True,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        lacks=("head_dim",),
    ),
    "dots1": Family("dots1", (_experts, _choice_of_deepseek), sizes={"moe_intermediate_size": 32, "sliding_window": None}),
    "glm4_moe": Family(
        "glm4moe", (_experts, _choice_of_glm), NAMES_BY_PLACE, sizes={"moe_intermediate_size": 32}, blocks_behind=1
    ),
}
