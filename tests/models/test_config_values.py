"""What is refused of a model folder's JSON before anything is built from it: in one line, and without counting to 2**62."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen.checkpoints.safetensors_format import TensorHeader, read_header, write_safetensors
from h2o_flexgen.core.allowed_values import eos_ids_of
from h2o_flexgen.core.files import NotADocument, parse_json
from h2o_flexgen.llm import LLM
from h2o_flexgen.models import create_model, known_config, known_names, load_config
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.text.load_tokenizer import load_tokenizer
from tests.helpers.refusals import one_line
from tests.helpers.tiny import save_tiny, tiny_config

DEEP = "[" * 100_000
MISSING = object()
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("config")
    save_tiny("qwen3", folder)
    return dict(json.loads((folder / "config.json").read_text()))


def told(values: Mapping[str, Any], folder: Path, **changes: object) -> str:
    changed = {name: value for name, value in {**values, **changes}.items() if value is not MISSING}
    (folder / "config.json").write_text(json.dumps(changed))
    return one_line(lambda: load_config(str(folder)))


@pytest.mark.parametrize("wrong", [0, -1, 2**62, 1.5, "many", True, [3], {"a": 1}, MISSING, "x" * 5000])
def test_a_size_that_makes_no_sense_is_named(wrong: object, values: Mapping[str, Any], tmp_path: Path) -> None:
    for key in (*SIZES, "intermediate_size"):
        assert f"{key} is " in told(values, tmp_path, **{key: wrong})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_attention_heads": 5, "head_dim": None}, "hidden_size 32 is no multiple of num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"head_dim": -4}, "head_dim is -4"),
        ({"sliding_window": "wide"}, "sliding_window is 'wide'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": "far"}}}, "rope_theta is 'far'"),
        ({"sliding_window": 1}, "sliding_window is 1, in which a token would see itself alone"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5, which is no whole number from 1 to 4"),
        ({"num_experts": 4, "num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"model_type": "hunyuan_v1_moe", "moe_topk": [2, 0]}, "moe_topk is 0, which is no whole number from 1"),
        ({"num_local_experts": 0}, "num_local_experts is 0"),
        ({"moe_intermediate_size": "x"}, "moe_intermediate_size is 'x'"),
        ({"rope_theta": "word"}, "rope_theta is 'word'"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"rope_theta": 0}, "rope_theta is 0, which is no number from 1 to 1e+12"),
        ({"rope_parameters": {"rope_theta": 0.5}}, "rope_theta is 0.5"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor is 2, which is no number from 0 to 1"),
        ({"rotary_pct": 1e12}, "rotary_pct is 1000000000000.0"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id is {'a': 1}"),
    ],
)
def test_values_that_do_not_go_together_are_named(
    changes: Mapping[str, object], problem: str, values: Mapping[str, Any], tmp_path: Path
) -> None:
    assert problem in told(values, tmp_path, **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma2", {"attn_logit_softcapping": "much"}, "attn_logit_softcapping is 'much', which is no number"),
        ("opt", {"ffn_dim": MISSING}, "ffn_dim is missing"),
        ("qwen2-moe", {"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size is -1"),
        ("glm4-moe", {"n_shared_experts": 0}, "n_shared_experts is 0"),
        ("deepseek-v3", {"kv_lora_rank": MISSING}, "kv_lora_rank is missing"),
        ("deepseek-v3", {"q_lora_rank": 0}, "q_lora_rank is 0, which is no whole number"),
        ("deepseek-v2", {"qk_rope_head_dim": "x"}, "qk_rope_head_dim is 'x'"),
        ("deepseek-v3", {"rope_interleave": 1}, "rope_interleave is 1, which is neither true nor false"),
        ("kimi-linear", {"linear_head_dim": 0}, "linear_head_dim is 0"),
        ("kimi-linear", {"num_experts": 0}, "num_experts is 0"),
        ("kimi-linear", {"model_max_length": "long"}, "max_position_embeddings is 'long'"),
    ],
)
def test_values_that_one_architecture_reads_are_named(
    kind: str, changes: Mapping[str, object], problem: str, tmp_path: Path
) -> None:
    values = json.loads(tiny_config(kind).to_json_string(use_diff=False))
    assert problem in told(values, tmp_path, **changes)


def test_layers_that_attend_in_chunks_say_how_long_these_are() -> None:
    """Otherwise nothing bounds a text; where no layer attends so, the key says nothing."""
    chunked = tiny_config("llama4")
    chunked.attention_chunk_size = None
    said = one_line(lambda: create_model(chunked, "float32"))
    assert said == "attention_chunk_size is missing, but layer_types has chunked_attention; download the model again"
    chunked.layer_types = ["full_attention"] * chunked.num_hidden_layers
    assert create_model(chunked, "float32").spec.max_positions == chunked.max_position_embeddings


def test_a_published_falcon_says_nothing_of_its_positions(tmp_path: Path) -> None:
    """Then transformers has 2048 of them. These are the keys of falcon-7b."""
    sizes = {"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "vocab_size": 65024}
    kinds = {"alibi": False, "bias": False, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True}
    values = {"model_type": "falcon", "layer_norm_epsilon": 1e-05, "bos_token_id": 11, "eos_token_id": 11, **sizes, **kinds}
    (tmp_path / "config.json").write_text(json.dumps(values))
    spec = create_model(load_config(str(tmp_path)), "bfloat16").spec
    assert (spec.max_positions, spec.kv_heads, spec.head_dim) == (2048, 1, 64)
    assert "max_position_embeddings is 0" in told(values, tmp_path, max_position_embeddings=0)


OF_KIMI = {  # the keys of Kimi-Linear-48B-A3B-Instruct
    "model_type": "kimi_linear",
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def test_a_published_kimi_linear_says_the_sizes_of_its_states_in_a_part_of_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OF_KIMI))
    name = "moonshotai/Kimi-Linear-48B-A3B-Instruct"
    known = known_config(name)
    assert known is not None
    assert create_model(load_config(str(tmp_path)), "bfloat16").spec == create_model(known, "bfloat16").spec


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"head_dim": 0}, "linear_head_dim is 0"),
        ({"num_heads": 1 << 20}, "linear_num_heads is 1048576"),
        ({"kda_layers": []}, "layer_types"),
    ],
)
def test_a_part_of_a_config_is_held_to_bounds_too(changes: Mapping[str, object], problem: str, tmp_path: Path) -> None:
    values = {**OF_KIMI, "linear_attn_config": {**OF_KIMI["linear_attn_config"], **changes}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert problem in one_line(lambda: create_model(load_config(str(tmp_path)), "bfloat16"))


def test_latent_attention_that_rotates_is_refused_where_none_is_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**OF_KIMI, "mla_use_nope": False}))
    said = one_line(lambda: create_model(load_config(str(tmp_path)), "bfloat16"))
    assert said == "mla_use_nope is False, but attention of kimi_linear rotates nothing here; give another model"


@pytest.mark.parametrize(
    ("kind", "width", "said"),
    [
        ("nemotron-h", 63, "hidden_size is 63 and moe_latent_size None, which are odd together; give another model"),
        ("nemotron-h-latent", 63, "hidden_size is 63 and moe_latent_size 96, which are odd together; give another model"),
    ],
)
def test_widths_of_nemotron_that_are_odd_together_are_both_named(kind: str, width: int, said: str) -> None:
    config = tiny_config(kind)
    config.hidden_size = width
    assert one_line(lambda: create_model(config, "float32")) == said


@pytest.mark.parametrize("factor", ["two", 0, -1.0, True])
def test_a_rope_is_scaled_by_a_number_above_0(factor: object, tmp_path: Path) -> None:
    save_tiny("llama-gqa", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_scaling": {"rope_type": "linear", "factor": factor}}))
    assert "factor of the rope scaling is " in one_line(lambda: LLM(str(tmp_path), offload_dir=tmp_path / "offload"))


@pytest.mark.parametrize(
    ("kind", "key"), [("lfm2", "conv_L_cache"), ("qwen3-5", "linear_conv_kernel_dim"), ("bamba", "mamba_d_conv")]
)
def test_a_convolution_mixes_two_tokens_at_least(kind: str, key: str, tmp_path: Path) -> None:
    """Of one token alone a row would keep nothing."""
    values = json.loads(tiny_config(kind).to_json_string(use_diff=False))
    said = told(values, tmp_path, **{key: 1})
    assert f"{key} is 1, which is no whole number from 2 to 1024" in said


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"model_type": "deepseek_v32", "kv_lora_rank": 512, "n_group": 8}, "kv_lora_rank is 512: keys and values"),
        ({"model_type": "glm4_moe", "n_group": 8, "topk_group": 4}, "n_group is 8 and topk_group 4: experts"),
        ({"model_type": "glm4_moe", "n_group": "two"}, "n_group is 'two': experts"),
        ({"model_type": "glm4_moe", "n_routed_experts": 2}, "num_experts_per_tok is 3, which is no whole number from 1 to 2"),
        ({"model_type": "gpt_oss", "swiglu_limit": "seven"}, "swiglu_limit is 'seven', which is no number"),
    ],
)
def test_what_no_architecture_knows_is_refused_by_its_setting(own: dict[str, object], said: str, tmp_path: Path) -> None:
    values = json.loads(tiny_config("gpt-oss").to_json_string(use_diff=False))
    (tmp_path / "config.json").write_text(json.dumps({**values, **own}))
    assert said in one_line(lambda: LLM(str(tmp_path), offload_dir=tmp_path / "offload"))


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"model_type": "mllama", "vision_config": {"hidden_size": 32}}, "has vision_config beside its text part"),
        ({"model_type": "mllama", "vision_config": {}, "quantization_config": {}}, "has vision_config beside its text part"),
        ({"model_type": "mllama"}, "has other parts beside its text part"),
    ],
)
def test_a_model_with_parts_beside_its_text_is_called_so(values: dict[str, object], parts: str, tmp_path: Path) -> None:
    text = json.loads(tiny_config("gemma3").to_json_string(use_diff=False))
    (tmp_path / "config.json").write_text(json.dumps({**values, "text_config": text}))
    said = one_line(lambda: load_config(str(tmp_path)))
    assert parts in said and repr(values["model_type"]) in said
    assert "text parts are read of gemma3, gemma4, " in said and "give a checkpoint of the text model alone" in said


def test_every_known_model_is_within_the_bounds() -> None:
    assert all(known_config(name) for name in known_names())
    assert "num_hidden_layers is 0" in one_line(lambda: known_config("opt-125m", num_hidden_layers=0))


@pytest.mark.parametrize("wrong", [{"a": 1}, [[1]], "two", 2.5, True, [1, None], DEEP])
def test_only_token_ids_end_a_text(wrong: object, tmp_path: Path) -> None:
    assert "eos_token_id is " in one_line(lambda: eos_ids_of(wrong))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    assert "generation_config.json" in one_line(lambda: load_tokenizer(tmp_path, {}, 100))
    (tmp_path / "generation_config.json").unlink()
    assert "config.json" in one_line(lambda: load_tokenizer(tmp_path, {"eos_token_id": wrong}, 100))


def test_an_id_a_list_of_them_or_none_may_end_a_text() -> None:
    assert (eos_ids_of(3), eos_ids_of([3, 5, 3]), eos_ids_of(None)) == ({3}, {3, 5}, frozenset())


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"]
)
@pytest.mark.parametrize("content", [DEEP, '{"a": ' * 100_000, "no json", "\ud800", "[1]", '{"a": 1, "a": 2}', "1" * 10_000])
def test_json_that_cannot_be_read_is_an_error_of_one_line(name: str, content: str, tmp_path: Path) -> None:
    save_tiny("opt", tmp_path, max_shard_size="40KB")
    (tmp_path / name).write_bytes(content.encode("utf-8", errors="surrogatepass"))
    if name == "tokenizer_config.json":
        (tmp_path / "tokenizer.json").write_text("{}")
    assert str(tmp_path) in one_line(lambda: LLM(str(tmp_path), offload_dir=tmp_path / "offload"))


def test_what_is_wrong_with_a_json_text_is_said() -> None:
    for text, problem in (
        (DEEP, "nested too deeply"),
        ('{"b": {"a": 1, "a": 2}}', "'a' stands there twice"),
        (b"\xff", "utf-8"),
    ):
        with pytest.raises(NotADocument, match=problem):
            parse_json(text)
    assert parse_json('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_yaml_that_is_nested_too_deeply_is_an_error_of_one_line(opening: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(opening * 1000)
    assert str(file) in one_line(lambda: Machine.load(file))


def test_a_header_that_names_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    headers = [TensorHeader(name, torch.float32, (4,)) for name in ("first", "other")]
    write_safetensors(file, headers, lambda name: torch.ones(4))
    file.write_bytes(file.read_bytes().replace(b"other", b"first"))
    message = one_line(lambda: read_header(file))
    assert str(file) in message and "'first' stands there twice" in message


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("harm", ["elsewhere", "unnamed"])
def test_index_and_files_must_agree(harm: str, safe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    save_tiny("opt", folder, max_shard_size="40KB", safe=safe)
    index = next(folder.glob("*.index.json"))
    content = json.loads(index.read_text())
    name, file = next(iter(content["weight_map"].items()))
    other = next(one for one in content["weight_map"].values() if one != file)
    if harm == "elsewhere":
        content["weight_map"][name] = other
        expected = f"{index} names tensor {name!r} in {other}, but it is in {file}"
    else:
        del content["weight_map"][name]
        expected = f"{folder / file} has the tensor {name!r}, which {index} does not name"
    index.write_text(json.dumps(content))
    assert expected in one_line(lambda: LLM(str(folder), offload_dir=tmp_path / "offload"))
