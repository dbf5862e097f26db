"""Configs that are understood without transformers mean what they mean to it, and all others are left to it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from h2o_flexgen.core.allowed_values import EOS
from h2o_flexgen.models import MODELS, architecture, create_model, load_config
from h2o_flexgen.models.llama import Decoder
from h2o_flexgen.models.rotary import Rope
from h2o_flexgen.models.whole_configs import ROPES, whole_config
from tests.helpers.tiny import KINDS as TINY_KINDS
from tests.helpers.tiny import tiny_config

KINDS = [model_type for model_type in MODELS if architecture(model_type).usual]
SIZES: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 8192,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def sizes_of(model_type: str) -> Mapping[str, Any]:
    """Under the names that the architecture has for them."""
    sizes = {**SIZES, "ffn_dim": 48} if model_type == "opt" else SIZES
    called = architecture(model_type).called
    return {called.get(key, key): value for key, value in sizes.items()}


def test_the_models_that_are_run_most_need_no_transformers() -> None:
    of_experts = {"mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "granitemoe"}
    others = {"opt", "gpt2", "gemma", "gemma2", "olmo", "olmo2", "granite", "starcoder2", "arcee", "seed_oss"}
    assert {"llama", "mistral", "qwen2", "qwen3"} | of_experts | others == set(KINDS)


@pytest.mark.parametrize("model_type", KINDS)
def test_a_missing_key_means_what_it_means_to_transformers(model_type: str) -> None:
    kind, usual = CONFIG_MAPPING[model_type], architecture(model_type).usual
    theirs = {key: one.default for key, one in inspect.signature(kind).parameters.items() if key in usual}
    assert theirs == {key: usual[key].value for key in theirs} and len(theirs) > 5
    rotates = "rope_theta" in usual
    assert not rotates or usual["rope_theta"].value == getattr(kind, "default_theta", 10000.0)
    assert kind.attribute_map.keys() <= usual.keys() | architecture(model_type).called.keys()  # other names of keys


def recorded(config: Any) -> tuple[Any, dict[str, Any]]:
    """A config that writes down what is read of it."""
    read: dict[str, Any] = {}

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            read[name] = getattr(config, name, None) or None  # nothing, 0 and an empty list mean the same
            return getattr(config, name)

    return Recorder(), read


def same_models(ours: Any, theirs: Any) -> None:
    """Holds that a model is made of equal values."""
    (one, of_ours), (other, of_theirs) = recorded(ours), recorded(theirs)
    assert create_model(one, "bfloat16").spec == create_model(other, "bfloat16").spec
    in_specs = {"num_key_value_heads", "head_dim", "max_window_layers", "layer_types", "sliding_window"}
    said = {key: value for key, value in of_ours.items() if key not in in_specs.union(ROPES, ["rope_theta"])}
    assert said == {key: of_theirs.get(key) for key in said} and of_theirs.keys() <= of_ours.keys() | in_specs
    assert Rope.of(ours).theta == Rope.of(theirs).theta and getattr(ours, EOS) == getattr(theirs, EOS)


PLAIN_KINDS = [kind for kind, (model_type, _) in TINY_KINDS.items() if model_type in KINDS]


def test_configs_that_transformers_writes_make_the_same_models(tmp_path: Path) -> None:
    found: set[str] = set()
    for kind in PLAIN_KINDS:
        theirs = tiny_config(kind)
        theirs.save_pretrained(tmp_path / kind)
        ours = load_config(str(tmp_path / kind))
        if type(ours) is SimpleNamespace:
            same_models(ours, theirs)
            found.add(theirs.model_type)
    assert found == set(KINDS)


NOT_UNDERSTOOD: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("mixtral", {"num_experts": 4}),
    ("olmoe", {"num_local_experts": 4}),
    ("qwen3_moe", {"num_experts": 8, "num_local_experts": 4}),
    ("qwen2_moe", {"use_sliding_window": True}),
    ("gemma", {"hidden_act": "gelu"}),
)


@pytest.mark.parametrize(("model_type", "said"), NOT_UNDERSTOOD, ids=str)
def test_what_one_architecture_says_otherwise_is_left_to_transformers(model_type: str, said: Mapping[str, Any]) -> None:
    usual, called = architecture(model_type).usual, architecture(model_type).called
    assert whole_config(SIZES, usual, called) is not None and whole_config({**SIZES, **said}, usual, called) is None


@pytest.mark.parametrize("model_type", KINDS)
@pytest.mark.parametrize(
    "said",
    [
        {},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}, "num_key_value_heads": 16, "sliding_window": 32},
        {"sliding_window": None, EOS: [1, 2]},
        SLIDING,
        {**SLIDING, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        {**SLIDING, "use_sliding_window": False},
    ],
    ids=str,
)
def test_a_config_makes_the_same_model(model_type: str, said: Mapping[str, Any], tmp_path: Path) -> None:
    values = {"model_type": model_type, **sizes_of(model_type), **said}
    (tmp_path / "config.json").write_text(json.dumps(values))
    ours, theirs = load_config(str(tmp_path)), CONFIG_MAPPING[model_type].from_dict(json.loads(json.dumps(values)))
    if type(ours) is not SimpleNamespace:
        assert said.get("use_sliding_window") and model_type in ("qwen2_moe", "gpt2")
        return
    if model_type == "gemma2" and "sliding_window" in said and said["sliding_window"] is None:
        with pytest.raises(ValueError, match="sliding_window is None"):
            create_model(ours, "bfloat16")
        return
    same_models(ours, theirs)
    made = [create_model(config, "bfloat16") for config in (ours, theirs)]
    if all(isinstance(model, Decoder) and model.rotates for model in made):
        width = made[0].spec.head_dim
        turned = [Rope.of(config).rotary(width).frequencies for config in (ours, theirs)]
        assert torch.equal(*turned)


@pytest.mark.parametrize(
    "said",
    [
        {"rope_theta": None},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {"full_attention": {"rope_theta": 30.0}}},
        {"rope_scaling": [1]},
        {"rope_scaling": {"type": ["linear"], "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5},
        {"original_max_position_embeddings": 64},
        {"tie_word_embeddings": None},
        {"attention_bias": 1},
        {"hidden_act": 3},
        {"rms_norm_eps": 1},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"layer_types": ["sliding_attention"]},
        {"sliding_window": 0},
        {"layer_types": ["attention"] * 3},
    ],
    ids=str,
)
def test_what_transformers_alone_understands_is_left_to_it(said: Mapping[str, Any]) -> None:
    usual = architecture("llama").usual
    assert whole_config(SIZES, usual) is not None and whole_config({**SIZES, **said}, usual) is None
