"""Latent attention: what is kept of a token, what its matrices are made of, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from h2o_flexgen.checkpoints.gguf_format import Gguf, Metadata
from h2o_flexgen.checkpoints.stored_architecture import GATING, SIGMOID, SOFTMAX, GgufModel
from h2o_flexgen.llm import LLM
from h2o_flexgen.models import create_model, gguf_architectures, known_config, load_config
from h2o_flexgen.models.latent import Latents
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.sampling.params import SamplingParams
from tests.helpers import gguf_files
from tests.helpers.contract import as_stored, head_budgets, opened
from tests.helpers.gguf_files import save_gguf
from tests.helpers.refusals import one_line
from tests.helpers.tiny import save_tiny, tiny_config

PUBLISHED = {  # bytes of a token in 16 bits, in all layers
    "deepseek-ai/DeepSeek-V2-Lite": 27 * 1152,
    "deepseek-ai/DeepSeek-V3": 61 * 1152,
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


def test_a_matrix_of_other_heads_is_refused(tmp_path: Path) -> None:
    save_tiny("deepseek-v2", tmp_path)
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace('"v_head_dim": 16', '"v_head_dim": 48')
    )
    said = one_line(lambda: opened(tmp_path))
    assert "kv_b_proj.weight" in said and "no rows of 4 heads" in said


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; greedy and group_limited_greedy"),
        ("deepseek-v2", {"mlp_bias": True}, "mlp_bias is True"),
        ("glm4-lite", {"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
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
        ("deepseek_v3", SIGMOID, 256, {}, (8, 4)),
        ("deepseek_v2", SOFTMAX, 160, {}, (8, 3)),
        ("deepseek_v2", 0, 160, {}, (8, 3)),
        ("deepseek_v3", SIGMOID, 384, {}, (1, 1)),
        ("deepseek_v3", SIGMOID, 64, {}, (1, 1)),
        ("deepseek_v2", SOFTMAX, 256, {}, (1, 1)),
        ("deepseek_v3", SIGMOID, 256, {"count": 1}, (1, 1)),
        ("deepseek_v3", SIGMOID, 256, {"count": 16, "used_count": 2}, (16, 2)),
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
