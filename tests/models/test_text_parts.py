"""Models of several parts: their texts are those of transformers, parts for images are left unread, and an image is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from h2o_flexgen.checkpoints.stored_architecture import USUAL_NAMES
from h2o_flexgen.llm import LLM
from h2o_flexgen.models import load_config
from h2o_flexgen.models.whole_configs import TEXT_PARTS
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.prompts import read_message
from tests.helpers.refusals import one_line
from tests.helpers.samples import every_nth
from tests.helpers.tiny import BLOCKS, KINDS, OF_STATES, POSITIONS, VOCAB

STEPS, PROMPT = 40, [5, 17, 99]
COUNT_FROM_ONE = "gemma3", "qwen3_5", "qwen3_5_moe"  # the weights of norms
NO_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
COMMON = {"vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "num_hidden_layers": BLOCKS, **NO_IDS}
SIGLIP = {"intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
OF_QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
OF_GEMMA4 = {"intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
AXES = {"rope_type": "default", "rope_theta": 300.0, "mrope_section": [1, 1, 2]}
LLAMA = {**COMMON, **KINDS["llama-mha"][1], "head_dim": 8, "rope_parameters": AXES}
WHOLE: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "text_config": {**COMMON, **KINDS["gemma3"][1]},
        "vision_config": {"hidden_size": 16, **SIGLIP},
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": {**COMMON, **KINDS["gemma4"][1], "pad_token_id": 0, "model_type": "gemma4_text"},
        "vision_config": {**OF_GEMMA4, "hidden_size": 16, "position_embedding_size": 16},
    },
    "gemma4_unified": {
        "text_config": {**COMMON, **KINDS["gemma4-unified"][1], "pad_token_id": 0, "model_type": "gemma4_unified_text"},
        "vision_config": {"mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16},
        "audio_config": {"audio_embed_dim": 16},
    },
    "llama4": {
        "text_config": {**COMMON, **KINDS["llama4"][1]},
        "vision_config": {
            "hidden_size": 16,
            **SIGLIP,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
    },
    "mistral3": {
        "text_config": {**COMMON, **KINDS["mistral-near"][1], "model_type": "mistral"},
        "vision_config": {"model_type": "pixtral", "hidden_size": 16, **SIGLIP, "head_dim": 8},
        "tie_word_embeddings": False,
    },
    "qwen2_vl": {
        "text_config": LLAMA,
        "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
    },
    "qwen2_5_vl": {"text_config": LLAMA, "vision_config": {**OF_QWEN, "fullatt_block_indexes": [0]}},
    "qwen3_vl": {
        "text_config": {**LLAMA, "rope_parameters": {**AXES, "mrope_interleaved": True}},
        "vision_config": {**OF_QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {
        "text_config": {**COMMON, **KINDS["qwen3-5"][1], "model_type": "qwen3_5_text"},
        "vision_config": {**OF_QWEN, "num_position_embeddings": 16},
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe": {
        "text_config": {**COMMON, **KINDS["qwen3-5-moe"][1], "model_type": "qwen3_5_moe_text"},
        "vision_config": {**OF_QWEN, "num_position_embeddings": 16},
        "tie_word_embeddings": True,
    },
}


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(values)))


@cache
def whole_model(model_type: str) -> PreTrainedModel:
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[model_type].from_dict(copied(WHOLE[model_type])))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.float().eval().named_parameters():
        counts_from_one = model_type in COUNT_FROM_ONE and not name.endswith(OF_STATES)
        middle = 1.0 if "norm" in name and name.endswith("weight") and not counts_from_one else 0.0
        spread = 0.1 if "embed_tokens" in name else 0.25
        parameter.data = middle + spread * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("model_type", every_nth(TEXT_PARTS, 2))
def test_texts_are_those_of_the_whole_model(model_type: str, tmp_path: Path) -> None:
    model: Any = whole_model(model_type)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    where = {"percent": (0, 0, 100, 0, 100, 0), "offload_dir": tmp_path / "offload", "device": "cpu"}
    with LLM(str(tmp_path), tokenizer="bytes", dtype="float32", **where) as llm:
        params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True, logprobs=1)
        (row,) = llm.generate([PROMPT], params)
    with torch.inference_mode():
        makes_text = model.language_model if model_type == "llama4" else model  # a whole one fails behind its logits
        expected = makes_text(input_ids=torch.tensor([[*PROMPT, *row.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    assert expected.argmax(-1).tolist() == list(row.token_ids)
    found = torch.tensor([step.chosen.logprob for step in row.logprobs or ()])
    torch.testing.assert_close(found, expected.log_softmax(-1).amax(-1), atol=2e-5, rtol=0)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_older_configs_have_its_keys_beside_those_of_the_other_parts(model_type: str, tmp_path: Path) -> None:
    inner = WHOLE[model_type]["text_config"]
    rope = {"rope_theta": 300.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    flat = {**inner, **rope, "vision_config": WHOLE[model_type]["vision_config"], "model_type": model_type}
    del flat["rope_parameters"]
    for values in (flat, {**WHOLE[model_type], "model_type": model_type}):
        (tmp_path / "config.json").write_text(json.dumps(values))
        found = load_config(str(tmp_path))
        assert (found.model_type, found.hidden_size, found.rope_parameters["rope_type"]) == ("qwen2", 32, "default")
        assert found.rope_parameters["rope_theta"] == 300.0 and not found.tie_word_embeddings


def test_what_a_config_does_not_say_is_what_transformers_means(tmp_path: Path) -> None:
    """Published ones leave most out."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    values = {"model_type": "gemma3", "text_config": {**text, "sliding_window": 1024}, "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps({**values, "vision_config": {}}))
    found = load_config(str(tmp_path))
    meant = CONFIG_MAPPING["gemma3"].from_dict(copied(values)).text_config
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "layer_types"):
        assert getattr(found, key) == getattr(meant, key)
    assert found.tie_word_embeddings and found.eos_token_id == [1, 106]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"text_config": {"model_type": "gpt2"}}, "of the architecture 'gpt2', which is not supported"),
        ({"text_config": {"num_hidden_layers": 2**62}}, f"num_hidden_layers is {2**62}"),
        ({"text_config": {"hidden_size": "wide"}}, "hidden_size is 'wide'"),
        ({"text_config": {"layer_types": ["full_attention"]}}, "is not valid"),
    ],
)
def test_a_text_part_that_cannot_be_run_is_named(values: Mapping[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", **values}))
    assert said in one_line(lambda: load_config(str(tmp_path)))


def test_keys_of_gguf_files_are_read_of_no_text_part(tmp_path: Path) -> None:
    text = {**WHOLE["gemma3"]["text_config"], "norms_are_whole": True, "rope_divisors": [1.0, 2.0]}
    values = {**WHOLE["gemma3"], "text_config": text, "model_type": "gemma3"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = load_config(str(tmp_path))
    assert found.hidden_size == 32 and not {"norms_are_whole", "rope_divisors"} & vars(found).keys()


def test_names_of_text_parts_become_the_usual_ones_and_others_stay() -> None:
    for prefix in ("language_model.model.", "model.language_model.", "language_model."):
        assert USUAL_NAMES.usual(f"{prefix}layers.3.mlp.up_proj.weight") == "model.layers.3.mlp.up_proj.weight"
    assert USUAL_NAMES.usual("language_model.lm_head.weight") == "lm_head.weight"
    for name in ("model.layers.3.mlp.up_proj.weight", "lm_head.weight", "model.visual.blocks.0.attn.qkv.weight"):
        assert USUAL_NAMES.usual(name) == name


def test_the_other_parts_are_in_the_files(tmp_path: Path) -> None:
    whole_model("gemma3").save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert any("vision" in name for name in names) and any("projector" in name for name in names)


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "image"}])
def test_an_image_in_a_message_is_refused(part: Mapping[str, Any]) -> None:
    said = one_line(lambda: read_message("message 0", {"role": "user", "content": [{"type": "text", "text": "what?"}, part]}))
    assert "only text is read" in said
