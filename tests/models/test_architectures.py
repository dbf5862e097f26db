"""Every architecture against transformers: logits, tokens, names and shapes of the tensors; and what bad configs are told."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from h2o_flexgen.checkpoints import model_places
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.models import create_model, hub_name, known_config, known_names, load_config
from h2o_flexgen.models.base import Given, computed, logits
from h2o_flexgen.models.config_values import Config
from h2o_flexgen.models.llama import Decoder
from h2o_flexgen.models.mixture import MixtureOfExperts
from h2o_flexgen.models.new_tokens import RowStates
from h2o_flexgen.models.rotary import Rope
from tests.helpers.resident import resident_generate, weights_by_layer
from tests.helpers.samples import every_nth
from tests.helpers.tiny import (
    KINDS,
    POSITIONS,
    VOCAB,
    checkpoint_tensors,
    named_in_model,
    save_tiny,
    tiny_config,
    tiny_hf_model,
)

STEPS = 6
ROUNDING = 2e-5  # of logits in single precision


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = prompts_of((9, 1, 40, 23))


@cache
def hf_model(kind: str) -> PreTrainedModel:
    return tiny_hf_model(kind, seed=3)


@cache
def hf_tensors(kind: str) -> dict[str, Tensor]:
    return checkpoint_tensors(hf_model(kind))


def their_logits(model: PreTrainedModel, tokens: list[list[int]]) -> Tensor:
    """The logits (rows, steps, vocab) of transformers that these tokens follow from, in one pass for each row. So its own
    greedy tokens are the same ones, if all of these are the likeliest."""
    texts = [[*prompt, *row[:-1]] for prompt, row in zip(PROMPTS, tokens, strict=True)]
    with torch.inference_mode():
        found = [model(torch.tensor([text]), use_cache=False).logits[0] for text in texts]  # type: ignore[operator]
    return torch.stack([row[len(prompt) - 1 :] for row, prompt in zip(found, PROMPTS)])


def exact_logits(kind: str, tokens: list[list[int]]) -> Tensor:
    """The same in double precision."""
    model = deepcopy(hf_model(kind)).double()
    model.set_experts_implementation("eager")  # the default has products of groups in single precision alone
    return their_logits(model, tokens)


def assert_as_exact(kind: str, logits: Tensor) -> None:
    """Logits (rows, steps, vocab) are those of transformers, and so are the likeliest tokens. Where the two have rounded to
    different sides, they are as near to the exact ones: a processor's products may round some models' states further than
    ROUNDING."""
    tokens = logits.argmax(-1).tolist()
    theirs = their_logits(hf_model(kind), tokens)
    assert tokens == theirs.argmax(-1).tolist()
    if (logits - theirs).abs().max() > ROUNDING:
        exact = exact_logits(kind, tokens)
        own_error, their_error = (float((each - exact).abs().max()) for each in (logits, theirs))
        assert own_error <= max(ROUNDING, 2 * their_error), f"{own_error:.1e}, and transformers {their_error:.1e}"


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_rows_give_the_logits_and_tokens_of_transformers(kind: str) -> None:
    """And attention and MLP apart are bitwise the joined block."""
    config, tensors = tiny_config(kind), hf_tensors(kind)
    apart, joined = (create_model(config, "float32", sep_layer) for sep_layer in (True, False))
    logits, together = (resident_generate(model, weights_by_layer(model, tensors), PROMPTS, STEPS) for model in (apart, joined))
    assert torch.equal(torch.stack(logits), torch.stack(together))
    assert_as_exact(kind, torch.stack(logits, dim=1))
    assert len({tuple(row) for row in torch.stack(logits).argmax(-1).T.tolist()}) > 1


@pytest.mark.parametrize("kind", every_nth(KINDS, 3))
def test_bfloat16_stays_near_the_logits_in_float32(kind: str) -> None:
    model = create_model(tiny_config(kind), "bfloat16")
    logits = resident_generate(model, weights_by_layer(model, hf_tensors(kind)), PROMPTS, 1)
    assert logits[0].dtype == torch.bfloat16
    exact = their_logits(hf_model(kind), logits[0].argmax(-1)[:, None].tolist())[:, 0]
    allowed = 0.2 if "experts" in str(model.spec.layers) else 0.05  # rounding may give a token to another expert
    assert (logits[0].float() - exact).norm() < allowed * exact.norm()


@pytest.mark.parametrize("kind", ["llama-gqa", "gemma3", "gemma4", "gemma4-dense"])
def test_norms_in_16_bits_are_rounded_where_transformers_rounds_them(kind: str) -> None:
    """Before they are multiplied by their weights, or only then."""
    model, name = create_model(tiny_config(kind), "bfloat16"), "input_layernorm"
    norm = deepcopy(hf_model(kind).get_submodule(f"model.layers.0.{name}")).bfloat16()
    rounded = {tensor_name: tensor.bfloat16() for tensor_name, tensor in hf_tensors(kind).items()}
    weights = next(own for own in weights_by_layer(model, rounded) if f"{name}.weight" in own)
    x = torch.randn(500, model.spec.width, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert isinstance(model, Decoder)
    assert (model.normed(x, weights, name) == norm(x)).float().mean() > 0.99


@pytest.mark.parametrize("kind", ["ernie-moe", "glm4-moe", "glm4-lite", "deepseek-v2", "deepseek-v3", "minimax", "kimi-linear"])
def test_a_router_that_works_in_fp32_has_its_matrix_in_fp32(kind: str) -> None:
    model, draw = create_model(tiny_config(kind), "bfloat16"), torch.Generator().manual_seed(2)
    assert isinstance(model, MixtureOfExperts)
    each = zip(model.spec.layers, weights_by_layer(model, hf_tensors(kind)), strict=True)
    layer, weights = next(one for one in each if "routed" in one[0].functions)
    stored = dict(layer.tensors)["mlp.gate.weight"]
    matrix, x = hf_tensors(kind)[stored.name], torch.randn(9, 1, model.spec.width, generator=draw).bfloat16()
    torch.testing.assert_close(model.scored(x, x, weights).scores, x.float() @ matrix.T, atol=1e-5, rtol=1e-5)
    packed = model.spec.packed("group4").tensors[stored.name]
    assert packed.format == PLAIN and packed.nbytes == 4 * matrix.numel() and stored in layer.matrices


@pytest.mark.parametrize("kind", KINDS)
def test_spec_names_exactly_the_tensors_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path, seed=3)
    stored = named_in_model(tiny_config(kind), load_file(tmp_path / "model.safetensors"))  # tied ones once
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in hf_tensors(kind).items())
    for spec in (create_model(tiny_config(kind), "float32", sep_layer).spec for sep_layer in (True, False)):
        assert {name: tensor.shape for name, tensor in spec.tensors.items()} == shapes
        assert spec.weight_bytes == sum(tensor.nbytes for tensor in stored.values())
        for layer in spec.layers:
            assert len({name for name, _ in layer.tensors}) == len(layer.tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_hand_on_hidden_states_of_the_width_that_the_spec_says(kind: str) -> None:
    model = create_model(tiny_config(kind), "float32")
    weights = weights_by_layer(model, hf_tensors(kind))
    *layers, head = model.spec.layers
    hidden, widths = torch.tensor([[5, 7]]), []
    given = Given(torch.tensor([[0, 1]]), lambda tokens: tokens.q.flatten(2))
    for layer, own in zip(layers, weights):
        before = hidden.clone()
        states = {one.name: torch.zeros(1, *one.shape) for one in layer.states}
        after = computed(model, layer, hidden, own, replace(given, states=RowStates(states)))
        assert torch.equal(hidden, before), "a layer may not write into what it is given"
        widths.append(after.shape[-1])
        hidden = after
    widths.append(logits(model, head, hidden[:, -1], weights[-1:]).shape[-1])
    assert widths == [layer.out_width for layer in model.spec.layers]


@pytest.mark.parametrize("kind", ["opt", "llama-gqa", "qwen2", "neox-tied"])
def test_matrix_products_are_counted_once_per_token_and_lookups_not_at_all(kind: str) -> None:
    spec = create_model(tiny_config(kind), "float32").spec
    assert spec.layers[0].matmul_values == 0
    assert spec.layers[-1].matmul_values == spec.vocab * spec.width
    matrices = [tensor.numel() for name, tensor in hf_tensors(kind).items() if ".layers.0." in name and tensor.ndim == 2]
    assert sum(layer.matmul_values for layer in spec.layers[1:3]) == sum(matrices)


def test_sizes_of_grouped_heads_come_from_the_config() -> None:
    spec = create_model(tiny_config("llama-gqa"), "bfloat16", name="tiny").spec
    assert (spec.name, spec.architecture, spec.heads, spec.kv_heads, spec.head_dim) == ("tiny", "llama", 4, 2, 12)
    assert spec.kv_bytes_per_slot == 2 * 2 * 12 * 2


# -- rotary positions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0}, partial_rotary_factor=0.5),
        SimpleNamespace(rotary_emb_base=500, rope_scaling={"rope_type": "linear", "factor": 2.0}, rotary_pct=0.5),
        SimpleNamespace(
            rope_parameters={"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
        ),
    ],
    ids=["transformers 4", "transformers 4 neox", "transformers 5"],
)
def test_rope_reads_old_and_new_configs_alike(config: Config) -> None:
    rope = Rope.of(config)
    assert (rope.kind, rope.theta, rope.share, rope.scaling["factor"]) == ("linear", 500.0, 0.5, 2.0)


def test_rope_without_any_parameters_is_the_default() -> None:
    rope = Rope.of(SimpleNamespace(rope_scaling=None))  # type: ignore[arg-type]
    assert (rope.kind, rope.theta, rope.share) == ("default", 10000.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_keeps_dtype_shape_and_lengths_and_depends_on_distance_only(dtype: torch.dtype) -> None:
    rotate = Rope("default", 10000.0, 1.0, {}).rotary(16)
    q, k = torch.randn(2, 1, 2, 3, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    first, second = torch.tensor([[3, 8]]), torch.tensor([[103, 108]])
    turned = rotate(q, first)
    assert turned.dtype == dtype and turned.shape == q.shape
    assert torch.equal(turned[..., 16:], q[..., 16:])
    assert torch.equal(rotate(q, torch.zeros_like(first)), q)
    if dtype == torch.float32:
        torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))
        near, far = ((rotate(q, at)[:, 0] * rotate(k, at)[:, 1]).sum(-1) for at in (first, second))
        torch.testing.assert_close(near, far, atol=1e-4, rtol=0)


def test_longrope_is_for_texts_within_the_original_length() -> None:
    """Transformers turns everything anew when a text outgrows it."""
    spec = create_model(tiny_config("phi3"), "float32").spec
    assert spec.max_positions == 64 < POSITIONS
    rope = Rope.of(tiny_config("phi3"))
    assert rope.rotary(4).stretch == pytest.approx((1 + math.log(2) / math.log(64)) ** 0.5)


# -- windows ---------------------------------------------------------------------------------------------------------


def test_a_window_hides_nothing_of_texts_within_it() -> None:
    spec = create_model(tiny_config("mistral"), "float32").spec
    assert spec.windows == (64,) * 3 and spec.max_positions == POSITIONS
    within = spec.within_windows()
    assert within.windows == (None,) * 3 and within.max_positions == 64 and within.tensors == spec.tensors
    for window in (None, POSITIONS):
        assert create_model(tiny_config("mistral", sliding_window=window), "float32").spec.windows == (None,) * 3


@pytest.mark.parametrize(
    ("use_sliding_window", "dense_layers", "windows"),
    [(False, 0, (None,) * 3), (True, 3, (None,) * 3), (True, 1, (None, 32, 32)), (True, 0, (32,) * 3)],
)
def test_a_window_counts_only_where_layers_use_it(
    use_sliding_window: bool, dense_layers: int, windows: tuple[int | None, ...]
) -> None:
    changes = {"use_sliding_window": use_sliding_window, "sliding_window": 32, "max_window_layers": dense_layers}
    for sep_layer in (True, False):
        spec = create_model(tiny_config("qwen2", **changes), "float32", sep_layer).spec
        assert spec.windows == spec.cut_at_attention().windows == windows and spec.max_positions == POSITIONS


# -- shapes that ship with the package -------------------------------------------------------------------------------

PUBLISHED = {
    "EleutherAI/gpt-neox-20b": 20.55e9,
    "EleutherAI/pythia-1b": 1.012e9,
    "EleutherAI/pythia-1.4b": 1.415e9,
    "EleutherAI/pythia-2.8b": 2.775e9,
    "EleutherAI/pythia-6.9b": 6.857e9,
    "EleutherAI/pythia-12b": 11.846e9,
    "Qwen/Qwen1.5-MoE-A2.7B": 14.3e9,
    "Qwen/Qwen2.5-7B": 7.61e9,
    "Qwen/Qwen2.5-32B": 32.5e9,
    "Qwen/Qwen2.5-72B": 72.7e9,
    "Qwen/Qwen3-30B-A3B": 30.5e9,
    "Qwen/Qwen3-8B": 8.2e9,
    "Qwen/Qwen3.6-35B-A3B": 34.7e9,  # its text part
    "LiquidAI/LFM2-1.2B": 1.17e9,
    "allenai/OLMoE-1B-7B-0924": 6.92e9,
    "allenai/Olmo-3-1025-7B": 7.30e9,
    "HuggingFaceTB/SmolLM3-3B": 3.08e9,
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": 23.6e9,  # its text part
    "deepseek-ai/DeepSeek-V2-Lite": 15.7e9,
    "deepseek-ai/DeepSeek-V3": 671e9,
    "moonshotai/Kimi-K2-Instruct-0905": 1.026e12,
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": 49.1e9,  # 48.4e9 without its two tables of tokens
    "zai-org/GLM-4.7-Flash": 29.9e9,
    "facebook/opt-125m": 125e6,
    "facebook/opt-350m": 331e6,
    "facebook/opt-1.3b": 1.3e9,
    "facebook/opt-2.7b": 2.65e9,
    "facebook/opt-6.7b": 6.7e9,
    "facebook/opt-13b": 13e9,
    "facebook/opt-30b": 30e9,
    "facebook/opt-66b": 66e9,
    "facebook/opt-175b": 175e9,
    "bigscience/bloom-7b1": 7.07e9,
    "google/gemma-2-9b": 9.24e9,
    "google/gemma-3-1b-pt": 1.0e9,
    "google/gemma-3-4b-pt": 3.88e9,  # its text part
    "google/gemma-4-26B-A4B": 25.2e9,  # its text part
    "google/gemma-4-31B": 30.7e9,  # its text part
    "meta-llama/Llama-2-7b-hf": 6.74e9,
    "meta-llama/Llama-2-13b-hf": 13.02e9,
    "meta-llama/Llama-2-70b-hf": 68.98e9,
    "meta-llama/Meta-Llama-3-8B": 8.03e9,
    "meta-llama/Meta-Llama-3-70B": 70.55e9,
    "meta-llama/Llama-3.1-8B": 8.03e9,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": 107.8e9,  # its text part
    "tencent/Hunyuan-7B-Instruct": 7.5e9,
    "meta-llama/Llama-3.1-70B": 70.55e9,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1.10e9,
    "microsoft/Phi-3-mini-4k-instruct": 3.82e9,
    "mistralai/Mistral-7B-v0.1": 7.24e9,
    "mistralai/Mixtral-8x7B-v0.1": 46.7e9,
    "mistralai/Mistral-7B-v0.3": 7.25e9,
    "openai/gpt-oss-20b": 20.9e9,
    "openai/gpt-oss-120b": 116.8e9,
    "zai-org/GLM-4.5-Air": 106e9,
}


def test_every_known_model_has_a_published_size() -> None:
    assert known_names() == sorted(PUBLISHED)


@pytest.mark.parametrize("name", every_nth(PUBLISHED, 3))
def test_known_shapes_add_up_to_the_published_number_of_parameters(name: str) -> None:
    config = known_config(name)
    assert config is not None
    spec = create_model(config, "bfloat16", name=name).spec
    assert spec.weight_bytes / 2 == pytest.approx(PUBLISHED[name], rel=0.015)
    widths = (
        spec.width // spec.heads + spec.position_values,
        getattr(config, "head_dim", None),
        spec.values_in_keys + getattr(config, "qk_rope_head_dim", 0),
    )
    assert spec.head_dim in widths


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_shapes_say_all_that_transformers_would_fill_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that transformers is not imported for them."""
    monkeypatch.setattr("h2o_flexgen.models.whole_config", lambda *_: None)  # which knows some families without the library
    own, library = known_config(name), known_config(name, bos_token_id=None)
    assert own is not None and library is not None
    assert not isinstance(own, PretrainedConfig) and isinstance(library, PretrainedConfig)
    read = _Reads(library)
    assert create_model(own, "bfloat16", name=name).spec == create_model(read, "bfloat16", name=name).spec
    own_of_library = ("per_layer_", "architectures")
    found = {key: value for key, value in read.found.items() if not key.startswith(own_of_library)}
    assert {key: getattr(own, key) for key in found} == found


class _Reads:
    """A config that notes what is read of it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.found: dict[str, object] = {}

    def __getattr__(self, key: str) -> object:
        self.found[key] = getattr(self._config, key)
        return self.found[key]


@pytest.mark.parametrize("name", ["facebook/opt-30b", "opt-30b", "OPT-30B", "Facebook/OPT-30b"])
def test_a_known_model_is_found_by_short_name_and_in_any_case(name: str) -> None:
    config = known_config(name)
    assert config is not None
    assert (hub_name(name), config.num_hidden_layers, config.hidden_size) == ("facebook/opt-30b", 48, 7168)


def test_llama_31_shapes_carry_their_rope_scaling() -> None:
    rope = Rope.of(known_config("Llama-3.1-8B"))
    assert (rope.kind, rope.theta, rope.scaling["factor"]) == ("llama3", 500000.0, 8.0)


def test_gemma_3_shapes_have_a_rotation_for_each_kind_of_layer() -> None:
    config = known_config("gemma-3-4b-pt")
    near, everything = (Rope.of(config, kind) for kind in ("sliding_attention", "full_attention"))
    assert (near.kind, near.theta) == ("default", 10_000.0)
    assert (everything.kind, everything.theta, everything.scaling["factor"]) == ("linear", 1_000_000.0, 8.0)
    assert create_model(config, "bfloat16").spec.windows[:7] == (1024,) * 5 + (None, 1024)


def test_importing_the_table_does_not_import_torch_or_transformers() -> None:
    code = "import sys, h2o_flexgen.models; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# -- configs on disk, and what is wrong with them --------------------------------------------------------------------


def error_of(call: object, *arguments: object, **options: object) -> str:
    with pytest.raises(ValueError) as caught:
        call(*arguments, **options)  # type: ignore[operator]
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_config_is_read_back_to_the_same_spec(kind: str, tmp_path: Path) -> None:
    tiny_config(kind).save_pretrained(tmp_path)
    assert create_model(load_config(str(tmp_path)), "float32").spec == create_model(tiny_config(kind), "float32").spec


@pytest.mark.parametrize(("architecture", "like"), [("gemma5", "gemma, gemma2"), ("rwkv", None)])
def test_an_unknown_architecture_is_named_beside_those_like_it(architecture: str, like: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": architecture}))
    for call, argument in ((create_model, SimpleNamespace(model_type=architecture)), (load_config, str(tmp_path))):
        message = error_of(call, argument, *(("float32",) if call is create_model else ()))
        named = f"; known and like it: {like}" if like else ""
        assert f"{architecture!r} is not supported{named}; docs/checkpoints.md lists all that are" in message


def test_a_config_without_an_architecture_is_refused_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for call, arguments in ((create_model, (SimpleNamespace(model_type=None), "float32")), (load_config, (str(tmp_path),))):
        assert "the config names no architecture (model_type); give the folder of" in error_of(call, *arguments)


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("llama-mha", {"hidden_act": "tanh"}, ["'tanh'", "silu", "gelu"]),
        ("opt", {"activation_function": "mish"}, ["'mish'", "relu"]),
        (
            "llama-mha",
            {"rope_scaling": {"rope_type": "axial", "factor": 2.0, "partial_rotary_factor": 0.5}},
            ["'axial'", "default", "linear", "llama3", "yarn", "longrope"],
        ),
    ],
)
def test_what_a_config_asks_for_and_is_not_known_is_named(kind: str, changes: dict[str, object], named: list[str]) -> None:
    message = error_of(create_model, tiny_config(kind, **changes), "float32")
    assert all(word in message for word in named)


def test_an_unknown_dtype_is_named() -> None:
    message = error_of(create_model, tiny_config("opt"), "float8")
    assert "'float8'" in message and "bfloat16" in message


def test_a_folder_without_a_config_and_a_broken_config_are_told_apart(tmp_path: Path) -> None:
    assert "has no config.json" in error_of(load_config, str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "opt", ')
    assert "config.json" in error_of(load_config, str(tmp_path))
    (tmp_path / "config.json").write_text('["opt"]')
    assert "no JSON object" in error_of(load_config, str(tmp_path))
    assert "neither an existing folder" in error_of(load_config, str(tmp_path / "missing"))


@pytest.mark.parametrize("name", ["facebook/opt-30", "opt30b"])
def test_a_misspelt_model_is_told_the_nearest_known_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str, with_weights: bool) -> Path:
        raise ValueError(f"model {name!r} is nowhere")

    monkeypatch.setattr(model_places, "_from_hub", nowhere)
    message = error_of(load_config, name)
    assert repr(name) in message and "did you mean" in message and "facebook/opt-30b" in message
    assert known_config(name) is None


def test_halves_of_a_block_with_experts_are_called_after_what_they_do() -> None:
    spec = create_model(tiny_config("mixtral"), "float32", sep_layer=False, name="tiny").spec
    assert spec.layer_names[1].title == "attention, experts 0-3 of block 0"
    asks, answers = (name.title for name in spec.cut_at_attention().layer_names[1:3])
    assert asks == "before_attended of block 0"
    assert answers.startswith("behind_attended, routed") and answers.endswith("of block 0")
