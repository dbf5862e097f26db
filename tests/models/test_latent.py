"""Latent attention: what is kept of a token, what its matrices are made of, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from h2o_flexgen.checkpoints.gguf_format import Gguf, Metadata
from h2o_flexgen.checkpoints.packed import PackedCheckpoint
from h2o_flexgen.checkpoints.stored_architecture import BY_SIGMOID, BY_SOFTMAX, GATING, GgufModel
from h2o_flexgen.core.model_spec import PromptHeads
from h2o_flexgen.core.site import Site
from h2o_flexgen.llm import LLM
from h2o_flexgen.models import create_model, gguf_architectures, known_config, load_config
from h2o_flexgen.models.latent import Latents
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.session.opened_model import OpenedModel
from tests.helpers import gguf_files
from tests.helpers.contract import as_stored, head_budgets, opened
from tests.helpers.gguf_files import save_gguf
from tests.helpers.quantised import METHODS, save_quantised
from tests.helpers.refusals import one_line
from tests.helpers.resident import resident_generate, weights_by_layer
from tests.helpers.tiny import KINDS, save_tiny, tiny_config

PUBLISHED = {  # bytes of a token in 16 bits, in all layers
    "deepseek-ai/DeepSeek-V2-Lite": 27 * 1152,
    "deepseek-ai/DeepSeek-V3": 61 * 1152,
    "moonshotai/Kimi-K2-Instruct-0905": 61 * 1152,
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": 7 * 1152,
    "zai-org/GLM-4.7-Flash": 47 * 1152,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_token_leaves_one_latent_vector_in_a_layer(name: str) -> None:
    config = known_config(name)
    assert config is not None
    spec = create_model(config, "bfloat16", name=name).spec
    assert spec.kv_heads == 1 and spec.kv_bytes_per_slot * len(spec.kv_layers) == PUBLISHED[name]


def test_halves_of_the_matrix_of_all_heads_are_what_a_head_multiplies_with(tmp_path: Path) -> None:
    model = save_tiny("deepseek-v3", tmp_path)
    config, checkpoint = tiny_config("deepseek-v3"), opened(tmp_path)
    own, whole = Latents.of(config), model.get_parameter("model.layers.1.self_attn.kv_b_proj.weight").detach()
    spec = create_model(config, "float32").spec
    keys, values = (
        as_stored(checkpoint, spec.tensors[f"model.layers.1.self_attn.{part}_b_proj.weight"])[1] for part in ("k", "v")
    )
    latent = torch.randn(own.rank, generator=torch.Generator().manual_seed(1))
    for head, (both, into_keys, into_values) in enumerate(zip(whole.chunk(4), keys.chunk(4), values.chunk(4))):
        made = both @ latent
        torch.testing.assert_close(into_keys.T @ latent, made[: own.unrotated], msg=str(head))
        torch.testing.assert_close(into_values @ latent, made[own.unrotated :], msg=str(head))


def test_packed_matrices_of_all_heads_are_copied_in_the_type_that_is_computed_in(tmp_path: Path) -> None:
    """With the values that are computed with anyway, and one copy for each type."""
    save_quantised("deepseek-v2-groups", tmp_path / "model", METHODS["mxfp8"])
    found = {dtype: OpenedModel.of(str(tmp_path / "model"), False, dtype, Site()) for dtype in ("float32", "bfloat16")}
    folders, values = set(), dict[str, torch.Tensor]()
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        spec, checkpoint = found[dtype].spec(Plan()), found[dtype].checkpoint
        assert checkpoint is not None
        for part in ("k", "v"):
            tensor = spec.tensors[f"model.layers.1.self_attn.{part}_b_proj.weight"]
            assert tensor.stored_itemsize == itemsize and tensor.name in checkpoint.to_write(spec)
            values[dtype + part] = as_stored(checkpoint, tensor)[1]
        folders.add(PackedCheckpoint(checkpoint, spec, tmp_path / "cache").folder)
    assert len(folders) == 2
    for part in ("k", "v"):
        assert torch.equal(values["float32" + part].bfloat16(), values["bfloat16" + part])


def test_a_matrix_of_other_heads_is_refused(tmp_path: Path) -> None:
    save_tiny("deepseek-v2", tmp_path)
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace('"v_head_dim": 16', '"v_head_dim": 48')
    )
    said = one_line(lambda: opened(tmp_path))
    assert "kv_b_proj.weight" in said and "no rows of 4 heads" in said


LONGER = KINDS["mistral4"][1]["rope_parameters"]


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; greedy and group_limited_greedy"),
        ("deepseek-v2", {"mlp_bias": True}, "mlp_bias is True"),
        ("glm4-lite", {"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        (
            "mistral4",
            {"rope_parameters": {**LONGER, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5, but 8 of 32 values are rotated",
        ),
        ("deepseek-v3", {"n_group": 3}, "n_group is 3 and topk_group 2, from which 2 of 8 experts cannot be chosen"),
        ("deepseek-v3", {"n_group": 8}, "n_group is 8 and topk_group 2"),
        ("deepseek-v3", {"topk_group": 9}, "n_group is 4 and topk_group 9"),
    ],
)
def test_what_is_not_known_is_refused(kind: str, changes: dict[str, object], said: str) -> None:
    assert said in one_line(lambda: create_model(tiny_config(kind, **changes), "float32"))


def test_the_name_of_kimi_is_that_of_deepseek(tmp_path: Path) -> None:
    tiny_config("deepseek-v3").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"model_type": "deepseek_v3"', '"model_type": "kimi_k2"'))
    assert load_config(str(tmp_path)).model_type == "deepseek_v3"


@pytest.mark.parametrize(
    ("model_type", "router", "experts", "said", "meant"),
    [
        ("deepseek_v3", BY_SIGMOID, 256, {}, (8, 4)),
        ("deepseek_v2", BY_SOFTMAX, 160, {}, (8, 3)),
        ("deepseek_v2", 0, 160, {}, (8, 3)),
        ("deepseek_v3", BY_SIGMOID, 384, {}, (1, 1)),
        ("deepseek_v3", BY_SIGMOID, 64, {}, (1, 1)),
        ("deepseek_v2", BY_SOFTMAX, 256, {}, (1, 1)),
        ("deepseek_v3", BY_SIGMOID, 256, {"count": 1}, (1, 1)),
        ("deepseek_v3", BY_SIGMOID, 256, {"count": 16, "used_count": 2}, (16, 2)),
    ],
)
def test_an_older_file_has_the_groups_of_published_models(
    model_type: str, router: int, experts: int, said: dict[str, int], meant: tuple[int, int]
) -> None:
    values: dict[str, int] = {"expert_count": experts, GATING: router}
    values |= {f"expert_group_{key}": value for key, value in said.items()}
    metadata = Metadata(Path("older.gguf"), {f"deepseek2.{key}": value for key, value in values.items()})
    kind = gguf_architectures()[model_type]
    file = GgufModel(Gguf(metadata, ()), kind, model_type)
    assert (kind.keys["n_group"](file), kind.keys["topk_group"](file)) == meant
    if "topk_method" in kind.keys:
        assert kind.keys["topk_method"](file) == ("greedy" if meant[0] == 1 else "group_limited_greedy")


def test_a_correction_of_a_router_that_reads_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V2 chooses experts by their scores alone."""
    correction = np.zeros(8, dtype=np.float32)
    monkeypatch.setattr(
        gguf_files, "_add_divisors", lambda writer, model: writer.add_tensor("blk.1.exp_probs_b.bias", correction)
    )
    save_gguf("deepseek-v2", tmp_path / "tiny.gguf")
    said = one_line(lambda: opened(tmp_path / "tiny.gguf"))
    assert "'blk.1.exp_probs_b.bias', which no layer of a deepseek_v2 model reads" in said


@pytest.mark.parametrize("held", [0, 5, 40, 4000])
@pytest.mark.parametrize("tokens", [1, 7, 600])
def test_keys_of_heads_are_made_where_that_takes_fewer_operations(tokens: int, held: int) -> None:
    """Counted one by one: of DeepSeek-V3, whose head has 192 values of a key, 128 of a value, and 576 that are kept."""
    pays = PromptHeads(512, 64, 128, 128, ()).pays(tokens, held + tokens)
    pairs = sum(held + place + 1 for place in range(tokens))
    of_heads = pairs * (192 + 192) + (held + tokens) * 512 * (128 + 128)
    of_latents = pairs * (576 + 576) + tokens * 512 * (128 + 128)
    assert pays == (of_heads < of_latents)


@pytest.mark.parametrize("kind", ["deepseek-v3", "deepseek-v2"])
@pytest.mark.parametrize("policy", [{}, {"kv_policy": "h2o", "kv_budget": 0.4}, {"kv_policy": "h2o-flexgen", "kv_budget": 0.4}])
@pytest.mark.parametrize("at_once", [1024, 8])
def test_prompts_are_attended_alike_with_keys_of_heads_and_with_latents(
    kind: str, policy: dict[str, object], at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece and in several, some heads at a time; and slots get the same, so that the same tokens are kept."""
    hf_model, config = save_tiny(kind, tmp_path), tiny_config(kind)
    model, made = create_model(config, "float32"), list[list[torch.Tensor]]()
    checkpoint, asked = opened(tmp_path), list[bool]()
    tensors = {name: as_stored(checkpoint, tensor)[1] for name, tensor in model.spec.tensors.items()}
    prompts, levels = [[*range(3, 24)], [*range(40, 54)]], Plan.create(**policy).levels(model.spec)
    monkeypatch.setattr("h2o_flexgen.models.latent.IN_HEADS_BYTES", 3 * PromptHeads(32, 8, 24, 16, ()).nbytes(1, 8, 21, 4))
    for in_heads in (True, False):

        def pays(own: PromptHeads, tokens: int, keys: int, answer: bool = in_heads) -> bool:
            asked.append(answer)
            return answer

        monkeypatch.setattr(PromptHeads, "pays", pays)
        made.append(
            resident_generate(model, weights_by_layer(model, tensors), prompts, 5, policy=levels, prefill_tokens=at_once)
        )
    assert set(asked) == {True, False} and hf_model is not None
    for with_heads, without in zip(*made, strict=True):
        assert not torch.equal(with_heads, without), "there are two ways"
        torch.testing.assert_close(with_heads, without, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("tokens", "at_once"), [(1, 1024), (12, 1024), (12, 5), (12, 1)])
def test_a_whole_prompt_decides_what_it_is_attended_with(
    tokens: int, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its pieces are, and even if it is one token, which may be padded beside longer ones. Steps have no choice."""
    save_tiny("deepseek-v3", tmp_path)
    model, checkpoint, asked = create_model(tiny_config("deepseek-v3"), "float32"), opened(tmp_path), list[tuple[int, int]]()
    tensors = {name: as_stored(checkpoint, tensor)[1] for name, tensor in model.spec.tensors.items()}

    def pays(own: PromptHeads, tokens: int, keys: int) -> bool:
        asked.append((tokens, keys))
        return True

    monkeypatch.setattr(PromptHeads, "pays", pays)
    resident_generate(model, weights_by_layer(model, tensors), [[*range(3, 3 + tokens)]], 3, prefill_tokens=at_once)
    assert asked == [(tokens, tokens)] * len(model.spec.kv_layers) * -(-tokens // at_once)


def test_values_of_heads_as_wide_as_keys_are_not_taken_for_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcome of attention says by its width what it is made of. So where both are as wide it is made of latents."""
    made = list[torch.Tensor]()
    model, seeded = create_model(tiny_config("deepseek-v3", v_head_dim=32 + 8), "float32"), torch.Generator().manual_seed(1)
    tensors = {name: 0.1 * torch.randn(one.shape, generator=seeded) for name, one in model.spec.tensors.items()}
    for answer in (True, False):
        monkeypatch.setattr(PromptHeads, "pays", lambda own, tokens, keys, answer=answer: answer)
        (first, *_) = resident_generate(model, weights_by_layer(model, tensors), [[*range(3, 20)]], 2)
        made.append(first)
    assert torch.equal(*made) and model.spec.prompt_heads is None


def test_head_budgets_are_budgets_of_layers(tmp_path: Path) -> None:
    save_tiny("deepseek-v3", tmp_path)
    budgets = head_budgets(((0.3,), (1.0,), (0.6,)), 1)
    options = {"kv_policy": "h2o", "head_budgets": budgets, "kv_budget": budgets.budgets[0]}
    spec = create_model(tiny_config("deepseek-v3"), "float32").spec
    levels = Plan.create(**options).levels(spec)
    assert [[len(heads) for heads in level.heads] for level in levels] == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
    with LLM(str(tmp_path), tokenizer="bytes", dtype="float32", offload_dir=tmp_path / "offload", **options) as llm:
        (row,) = llm.generate([[3, 50, 7, 112, 9, 21, 4, 8, 30, 5]], SamplingParams(4, ignore_eos=True))
    assert len(row.token_ids) == 4
