"""Every key of a config against transformers: a key that the class of an architecture reads changes our logits as it changes
theirs, one that it does not read changes nothing, and what cannot be computed as they do is refused in one line.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.models import MODELS, create_model, load_config
from h2o_flexgen.planning.block_plan import BlockPlans
from h2o_flexgen.planning.plan import Plan
from tests.helpers.refusals import one_line
from tests.helpers.resident import resident_generate, weights_by_layer
from tests.helpers.samples import every_nth
from tests.helpers.tiny import KINDS, VOCAB, checkpoint_tensors, random_model

BLOCKS, WINDOW = 2, 6
TEXT = torch.randint(VOCAB // 2, (24,), generator=torch.Generator().manual_seed(1)).tolist()  # longer than the window
ENDS = (1, 8, 24)  # tokens of the texts whose logits are compared
NEAR = 1e-4
KEYS_TOGETHER, UNREAD_TOGETHER, MOST_AT_RANDOM = 12, 40, 8
VALUES_TRIED, ROPES_TRIED = 1, 3  # of a key of each architecture; all of them are tried where tests are many

SLIDING, FULL = "sliding_attention", "full_attention"
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.1, 1.5, 2.0, 3.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 30.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
BY_KIND = {FULL: {"rope_theta": 30.0, "rope_type": "linear", "factor": 3.0}, SLIDING: {"rope_theta": 20.0}}
ROPES = ("rope_parameters", "rope_scaling")  # one of them says all

# every key that an architecture here or its class in transformers reads, with values of which at least one is not the usual
VALUES: Mapping[str, tuple[Any, ...]] = {
    "vocab_size": (90,),
    "conv_L_cache": (2, 5),
    **dict.fromkeys(("conv_bias", "block_auto_adjust_ff_dim"), (True, False)),
    "block_multiple_of": (16,),
    "block_ffn_dim_multiplier": (1.5,),
    "full_attn_idxs": ([0], None),
    "num_dense_layers": (0, 1, 2),
    "attn_layer_indices": ([0], [0, 1], None),
    "mamba_n_heads": (2, 8),
    "mamba_n_groups": (1, 2),
    "mamba_d_state": (8, 16),
    "mamba_d_head": ("auto",),
    "mamba_d_conv": (2, 5),
    "mamba_expand": (1, 3),
    "mamba_chunk_size": (4,),
    **dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias"), (True, False)),
    "mamba_d_ssm": (24, None),
    **dict.fromkeys(("mamba_rms_norm", "mamba_norm_before_gate", "projectors_bias"), (True, False)),
    **dict.fromkeys(("key_multiplier", "attention_in_multiplier", "attention_out_multiplier"), (0.6, -2, None)),
    **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier", "lm_head_multiplier"), (0.6, -2, None)),
    "mlp_multipliers": ([0.5, 2.0], None, [1.0]),
    "ssm_multipliers": ([0.5, 2.0, 1.0, 3.0, 0.7], None, [1.0]),
    "layers_block_type": (
        ["linear_attention", "full_attention"],
        ["moe", "full_attention"],
        ["mlp", "linear_attention"],
        ["full_attention", "window"],
        None,
    ),
    "mamba_num_heads": (2, 8),
    "mamba_head_dim": (8,),
    "n_groups": (1, 4),
    "ssm_state_size": (8,),
    "conv_kernel": (2, 5),
    "use_conv_bias": (True, False),
    "mamba_hidden_act": ("gelu", "swish"),
    "mlp_hidden_act": ("relu", "gelu", "silu"),
    "moe_shared_expert_intermediate_size": (16,),
    "moe_latent_size": (16, None),
    "time_step_min": (1e-9, 1e-8),
    "time_step_limit": ([0.2, 1.0], None),
    "z_loss_coefficient": (0.5,),
    "num_logits_to_keep": (2,),
    "shared_intermediate_size": (16,),
    "position_embedding_type": ("rope", None),
    "use_expert_bias": (True, False),
    "linear_conv_kernel_dim": (2, 5),
    "linear_num_heads": (1, 8),
    "linear_head_dim": (16, 40),
    "linear_num_key_heads": (1, 4),
    "linear_num_value_heads": (2, 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), (4, 16)),
    "hidden_size": (48, 64),
    "num_hidden_layers": (3,),
    "num_attention_heads": (2, 8),
    "num_key_value_heads": (1, 4, None),
    "head_dim": (16, 8, None),
    "intermediate_size": (40,),
    "ffn_dim": (40,),
    "max_position_embeddings": (40, 2000),
    "tie_word_embeddings": (True, False),
    "hidden_act": ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "quick_gelu", "swish"),
    "hidden_activation": ("silu", "gelu"),
    "activation_function": ("gelu", "silu"),
    "rms_norm_eps": (0.1,),
    **dict.fromkeys(("layer_norm_eps", "norm_epsilon", "norm_eps"), (0.1,)),
    "attention_bias": (True, False),
    "mlp_bias": (True,),
    **dict.fromkeys(("use_bias", "use_qkv_bias", "qk_layernorm"), (True, False)),
    "qkv_bias": (False,),
    "use_qk_norm": (True, False),
    "attention_out_bias": (True, False),
    "no_rope_layers": ([1, 0], [0, 0], None),
    "no_rope_layer_interval": (2,),
    "attn_temperature_tuning": (True, False),
    "attn_scale": (0.0, 0.3),
    "floor_scale": (3,),
    "attention_chunk_size": (5, 30, None),
    "intermediate_size_mlp": (40,),
    "interleave_moe_layer_step": (1, 3),
    "moe_layers": ([0], [1], [0, 1], []),
    "moe_topk": (1, 3, [3, 3]),
    "logit_scale": (0.3,),
    "enable_bias": (False,),
    "layer_norm_elementwise_affine": (False,),
    "do_layer_norm_before": (False,),
    "_remove_final_layer_norm": (True,),
    "word_embed_proj_dim": (24, None),
    "use_parallel_residual": (True, False),
    "sliding_window": (3, 9, 0, None, 500),
    "use_sliding_window": (True, False),
    "max_window_layers": (0, 1, 5),
    "layer_types": ([FULL, SLIDING], [SLIDING, SLIDING], [FULL, FULL], None),
    "sliding_window_pattern": (2, 1),
    "clip_qkv": (0.5, 0, None),
    "norm_topk_prob": (True, False),
    "decoder_sparse_step": (2, 3),
    "mlp_only_layers": ([0], [0, 1], None),
    "num_experts_per_tok": (1, 3),
    "num_experts": (5,),
    "num_local_experts": (5,),
    "n_routed_experts": (5,),
    "n_shared_experts": (1, 3),
    "moe_intermediate_size": (16,),
    "shared_expert_intermediate_size": (16,),
    "routed_scaling_factor": (0.3,),
    "first_k_dense_replace": (0, 1, 2),
    "n_group": (1,),
    "topk_group": (1,),
    "enable_moe_block": (True, False),
    "top_k_experts": (1, 3),
    "attention_k_eq_v": (True, False),
    "num_global_key_value_heads": (1, 4),
    "global_head_dim": (8, 24),
    "num_kv_shared_layers": (0, 1),
    "use_double_wide_mlp": (True, False),
    "hidden_size_per_layer_input": (0, 8),
    "vocab_size_per_layer_input": (90,),
    **dict.fromkeys(("moe_num_experts",), (5,)),
    "moe_k": (1, 3),
    "moe_num_shared_experts": (0, 1, 3),
    "moe_layer_start_index": (0, 1, 2),
    "moe_layer_end_index": (0, 1, -1),
    "moe_layer_interval": (1, 2),
    "moe_norm_min": (1e-9,),
    "num_ln_in_parallel_attn": (1, 2, None),
    "layer_norm_epsilon": (0.1,),
    "num_kv_heads": (1, 2, None),
    "alibi": (False, True),
    "new_decoder_architecture": (True, False),
    "multi_query": (True, False),
    "parallel_attn": (True, False),
    "bias": (True, False),
    "ffn_hidden_size": (40, None),
    "activation": ("gelu_new", "relu"),
    "n_embed": (48,),
    "apply_residual_connection_post_layernorm": (False, True),
    "slow_but_exact": (True,),
    "d_model": (48,),
    "n_layers": (3,),
    "n_heads": (2, 8),
    **dict.fromkeys(("max_seq_len", "seq_length"), (40, 200)),
    "expansion_ratio": (4, 2),
    "learned_pos_emb": (False,),
    "no_bias": (True, False),
    "norm_type": ("layernorm",),
    "init_device": ("meta",),
    "attn_config": (
        {"clip_qkv": 0.7},
        {"alibi_bias_max": 5},
        {"softmax_scale": 0.3},
        {"qk_ln": True},
        {"alibi": False},
        {"prefix_lm": True},
        {"attn_type": "multiquery_attention"},
    ),
    "n_positions": (40, 200),
    "n_embd": (48,),
    "n_layer": (3,),
    "n_head": (2, 8),
    "n_inner": (40, None),
    "rotary_dim": (2, 8),
    **dict.fromkeys(("summary_type", "summary_activation"), ("first",)),
    **dict.fromkeys(("summary_use_proj", "summary_proj_to_labels"), (False,)),
    **dict.fromkeys(("attn_pdrop", "summary_first_dropout"), (0.5,)),
    "scale_attn_weights": (True, False),
    "scale_attn_by_inverse_layer_idx": (False, True),
    "reorder_and_upcast_attn": (True, False),
    "add_cross_attention": (False,),
    "topk_method": ("greedy",),
    "mlp_layer_types": (["dense", "sparse"], ["sparse", "sparse"], None),
    "kv_lora_rank": (None,),
    "q_lora_rank": (16, None),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), (8,)),
    "qk_rope_head_dim": (4,),
    "swiglu_limit": (1.0,),
    "swiglu_alpha": (0.7,),
    "query_pre_attn_scalar": (3, 40),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"), (0.6, 2, None)),
    "attn_logit_softcapping": (0.5, None),
    "final_logit_softcapping": (0.5, None),
    "use_bidirectional_attention": (False, None, "vision"),
    "rope_theta": (50.0, 10),
    "rotary_emb_base": (50,),
    "rope_local_base_freq": (50.0,),
    "rotary_pct": (0.25, 0.5, 1.0),
    "partial_rotary_factor": (0.25, 0.5, 1.0),
    "rope_interleave": (True, False),
    "rope_divisors": ([1.0, 2.0, 3.0, 4.0],),
    "experts_apart": (True,),
    "norms_are_whole": (True,),
    "original_max_position_embeddings": (16, 64),
    "rope_scaling": (
        {"type": "linear", "factor": 3.0},
        {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
        {"rope_type": "dynamic", "factor": 3.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        LLAMA3,
    ),
    "rope_parameters": (
        {"rope_theta": 30.0},
        {"rope_type": "default", "rope_theta": 30.0, "partial_rotary_factor": 0.5},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 30.0},
        {**YARN, "mscale": 0.5, "mscale_all_dim": 0.9},
        {**YARN, "beta_fast": 1, "beta_slow": 8},
        {**YARN, "original_max_position_embeddings": 4_000_000},
        {**YARN, "attention_factor": 0.7, "truncate": False},
        LONGROPE,
        {**LONGROPE, "factor": 3.0},
        {**LONGROPE, "attention_factor": 1.3},
        BY_KIND,
        None,
    ),
    # what is read, but changes nothing where text is made
    "is_decoder": (True, False),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "classifier_dropout", "dropout", "layerdrop"), (0.5,)),
    **dict.fromkeys(("residual_dropout", "embedding_dropout", "emb_pdrop", "embedding_fraction"), (0.5,)),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "router_jitter_noise", "router_aux_loss_coef"), (0.5,)),
    **dict.fromkeys(("initializer_range", "init_std"), (0.5,)),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "eod_token_id", "sep_token_id"), (7,)),
    **dict.fromkeys(("num_mtp_layers", "num_nextn_predict_layers", "pretraining_tp"), (2,)),
    "use_cache": (False,),
    "output_router_logits": (False,),
    "expand": (3,),
    "chunk_size": (4,),
    **dict.fromkeys(("time_step_max", "time_step_floor"), (0.05,)),
    **dict.fromkeys(("use_mamba_kernels", "moe_shared_expert_overlap", "rescale_prenorm_residual"), (False,)),
    "mamba_ssm_cache_dtype": ("bfloat16",),
    "residual_in_fp32": (True,),
    "mtp_layers_block_type": (["moe"],),
}
Pair = tuple[str, Any]


def values_of(model_type: str) -> dict[str, Any]:
    """A tiny model of the architecture, with a window that the text outgrows wherever there can be one."""
    own = next(values for own_type, values in KINDS.values() if own_type == model_type)
    usual = {
        "model_type": model_type,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "num_hidden_layers": BLOCKS,
        "tie_word_embeddings": model_type == "opt",
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **own,
        "sliding_window": WINDOW,
    }
    return usual | ({"layer_types": own["layer_types"][:BLOCKS]} if "layer_types" in own else {})


def changed(values: Mapping[str, Any], *pairs: Pair) -> dict[str, Any]:
    keys = {key for key, _ in pairs}
    kept = {key: value for key, value in values.items() if not (key in ROPES and keys.intersection(ROPES))}
    return copied({**kept, **dict(pairs)})


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Because configs write into the dicts that they are given."""
    return dict(json.loads(json.dumps(values)))


def held(values: Mapping[str, Any], folder: Path) -> str:
    """How our logits of a config relate to those of transformers; what differs is an error."""
    (folder / "config.json").write_text(json.dumps(values))
    try:
        model = create_model(load_config(str(folder)), "float32")
    except ValueError as error:
        assert "\n" not in str(error)
        return "refused"
    if not model.spec.kv_layers:
        with pytest.raises(ValueError, match=r"no layer of .* has attention"):
            BlockPlans.of(model.spec, Plan(), Workload.uniform(1, 4, 2), Site())
        return "refused"
    ends = [end for end in ENDS if end <= model.spec.max_positions]
    theirs = _theirs(values, ends)
    if theirs is None:
        return "theirs alone fails"
    tensors, logits = theirs
    made = resident_generate(model, weights_by_layer(model, tensors), [TEXT[:end] for end in ends], 1)
    torch.testing.assert_close(made[0], logits, atol=NEAR, rtol=0, msg=lambda message: f"{values}: {message}")
    return "equal"


def _theirs(values: Mapping[str, Any], ends: list[int]) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
    """The tensors of a random model, and its logits behind each text; None: transformers cannot compute it."""
    try:
        model = random_model(CONFIG_MAPPING[values["model_type"]].from_dict(copied(values)))
        with torch.inference_mode():
            found = model(torch.tensor([TEXT[: max(ends)]]), use_cache=False).logits[0]
    except Exception:  # whatever it is, there is nothing that ours could be held to
        return None
    return checkpoint_tensors(model), found[[end - 1 for end in ends]]


def held_together(values: Mapping[str, Any], pack: list[Pair], folder: Path) -> list[str]:
    """The outcome of each pair: what hides the others is found by halves."""
    together = held(changed(values, *pack), folder)
    if together == "equal" or len(pack) == 1:
        return [together] * len(pack)
    middle = len(pack) // 2
    return held_together(values, pack[:middle], folder) + held_together(values, pack[middle:], folder)


def packs(pairs: list[Pair], most: int = KEYS_TOGETHER) -> Iterator[list[Pair]]:
    """All pairs, some at a time, with no key twice."""
    left = list(pairs)
    while left:
        pack: list[Pair] = []
        for pair in left:
            keys = {key for key, _ in pack}
            is_second_rope = pair[0] in ROPES and keys.intersection(ROPES)
            if len(pack) < most and pair[0] not in keys and not is_second_rope:
                pack.append(pair)
        left = [pair for pair in left if pair not in pack]
        yield pack


@pytest.mark.parametrize("model_type", every_nth(MODELS, 3))
def test_every_key_means_what_it_means_to_transformers(model_type: str, tmp_path: Path) -> None:
    random, values = Random(model_type), values_of(model_type)
    most = {key: ROPES_TRIED if key in ROPES else VALUES_TRIED for key in VALUES}
    pairs = [(key, value) for key, own in VALUES.items() for value in random.sample(own, min(most[key], len(own)))]
    assert held(values, tmp_path) == "equal"
    random.shuffle(pairs)
    theirs = inspect.signature(CONFIG_MAPPING[model_type]).parameters
    read, others = ([pair for pair in pairs if (pair[0] in theirs) is known] for known in (True, False))
    each = [*packs(read), *packs(others, UNREAD_TOGETHER)]  # what changes nothing hides nothing of the rest
    outcomes = [outcome for pack in each for outcome in held_together(values, pack, tmp_path)]
    assert outcomes.count("equal") > 0.8 * len(pairs)


@pytest.mark.parametrize(
    ("model_type", "pairs"),
    [
        ("llama", [("partial_rotary_factor", 0.5)]),
        ("qwen3_moe", [("rope_parameters", {"rope_type": "default", "rope_theta": 30.0, "partial_rotary_factor": 0.5})]),
        ("gpt_oss", [("rotary_pct", 0.25)]),
        ("llama", [("rope_interleave", True)]),
        ("llama", [("rope_divisors", [1.0, 2.0, 3.0, 4.0])]),
        ("llama", [("rope_parameters", {**YARN, "beta_fast": 1, "beta_slow": 8})]),
        ("glm4_moe", [("rope_parameters", {**YARN, "original_max_position_embeddings": 4_000_000})]),
        ("llama", [("rope_scaling", LLAMA3), ("original_max_position_embeddings", 64)]),
        ("llama", [("rope_scaling", {**LLAMA3, "high_freq_factor": 1.0})]),
        ("gpt_oss", [("original_max_position_embeddings", 16)]),
        ("gpt_oss", [("experts_apart", True)]),
        ("gemma", [("norms_are_whole", True)]),
        ("gemma3_text", [("use_sliding_window", False)]),
        ("mistral", [("max_window_layers", 5)]),
        ("phi3", [("layer_types", [FULL, FULL])]),
        ("mixtral", [("mlp_only_layers", [0])]),
        ("olmoe", [("decoder_sparse_step", 2)]),
    ],
)
def test_a_key_that_is_read_elsewhere_or_nowhere_changes_nothing_more(
    model_type: str, pairs: list[Pair], tmp_path: Path
) -> None:
    assert held(changed(values_of(model_type), *pairs), tmp_path) == "equal"


@pytest.mark.parametrize("interleaves", [True, False])
@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "llama"])
def test_neighbours_are_rotated_together_where_transformers_does_so(model_type: str, interleaves: bool, tmp_path: Path) -> None:
    """Two of these read the key."""
    assert held(changed(values_of(model_type), ("rope_interleave", interleaves)), tmp_path) == "equal"


@pytest.mark.parametrize("model_type", ["hunyuan_v1_dense", "hunyuan_v1_moe"])
def test_norms_behind_a_rotation_that_lengthens_add_as_much_as_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    assert held(changed(values_of(model_type), ("rope_parameters", YARN), ("rms_norm_eps", 0.1)), tmp_path) == "equal"


def test_no_rotated_value_is_lost_by_a_quotient(tmp_path: Path) -> None:
    """In float64, 30 / 44 * 44 is less than 30."""
    sizes = [("n_embd", 88), ("n_head", 2), ("rotary_dim", 30)]
    assert held(changed(values_of("gptj"), *sizes), tmp_path) == "equal"


@pytest.mark.fuzz
@pytest.mark.parametrize("model_type", MODELS)
def test_every_value_of_every_key(model_type: str, tmp_path: Path) -> None:
    for pair in ((key, value) for key, own in VALUES.items() for value in own):
        held(changed(values_of(model_type), pair), tmp_path)


@pytest.mark.fuzz
def test_many_keys_at_once(fuzz_seed: int, tmp_path: Path) -> None:
    random = Random(fuzz_seed)
    for model_type in MODELS:
        keys = random.sample(sorted(VALUES), random.randint(1, MOST_AT_RANDOM))
        keys = [key for key in keys if key != ROPES[1] or ROPES[0] not in keys]
        held(changed(values_of(model_type), *((key, random.choice(VALUES[key])) for key in keys)), tmp_path)


@pytest.mark.parametrize("model_type", MODELS)
def test_every_key_of_the_class_in_transformers_is_varied(model_type: str) -> None:
    own, usual = (set(inspect.signature(kind).parameters) for kind in (CONFIG_MAPPING[model_type], PretrainedConfig))
    assert own - usual <= VALUES.keys() | {"args", "kwargs"}


@pytest.mark.parametrize(
    ("model_type", "pair", "said"),
    [
        ("llama", ("rope_scaling", VALUES["rope_scaling"][1]), "partial_rotary_factor is 0.5 and the rope type 'linear'"),
        ("llama", ("rope_parameters", {**LLAMA3, "high_freq_factor": 0.5}), "low_freq_factor of the rope scaling is 1"),
        ("llama", ("rope_theta", None), "rope_theta of the rope parameters is None"),
        ("mistral", ("sliding_window", 0), "sliding_window is 0, but layers have one"),
        ("gpt_oss", ("sliding_window", None), "sliding_window is None, but layers have one"),
        ("llama", ("head_dim", 3), "heads have 3 values, which are not rotated in pairs"),
        ("glm4_moe", ("partial_rotary_factor", 0.0), "partial_rotary_factor is 0, by which no value is rotated"),
        ("phi", ("partial_rotary_factor", 0.13), "partial_rotary_factor is 0.13, by which a single value is rotated"),
        ("qwen3", ("rope_parameters", {**YARN, "rope_theta": 1.0}), "rope_theta is 1, by which all values rotate alike"),
        ("gpt_neox", ("head_dim", 16), "head_dim is 16, but heads of gpt_neox have"),
        ("stablelm", ("head_dim", 16), "head_dim is 16, but heads of stablelm have"),
        ("stablelm", ("qk_layernorm", True), "qk_layernorm is True"),
        ("qwen3_moe", ("decoder_sparse_step", 0), "decoder_sparse_step is 0"),
    ],
)
def test_what_transformers_cannot_compute_is_refused(model_type: str, pair: Pair, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changed(values_of(model_type), pair)))
    assert said in one_line(lambda: create_model(load_config(str(tmp_path)), "float32"))
