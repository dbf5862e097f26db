"""Experts of checkpoints: whatever their tensors are called, and however many are one tensor, the matrices are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from h2o_flexgen.checkpoints.checkpoint import open_checkpoint
from h2o_flexgen.checkpoints.packed import stored_values
from h2o_flexgen.checkpoints.stored_tensors import StoredTensor
from h2o_flexgen.llm import LLM
from h2o_flexgen.models import tensor_names
from tests.helpers.contract import Case, Checkpoints, generate_with
from tests.helpers.refusals import one_line
from tests.helpers.tiny import checkpoint_tensors, save_tiny, tiny_config, tiny_hf_model

OF_EXPERTS = ("mixtral", "olmoe", "qwen2-moe", "qwen3-moe", "gpt-oss", "glm4-moe", "granite-moe", "minimax", "deepseek-v3")
OF_EXPERTS += ("hunyuan-moe", "llama4")


def save_as_held(kind: str, folder: Path) -> None:
    """A checkpoint as transformers holds the model: all experts of a layer in one tensor."""
    model = tiny_hf_model(kind)
    model.save_pretrained(folder, save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(folder / "model.safetensors"))


def values_of(kind: str, folder: Path, name: str) -> torch.Tensor:
    stored = open_checkpoint(folder, names=tensor_names(tiny_config(kind)))._find(name)
    assert isinstance(stored, StoredTensor)
    return torch.cat([*stored_values(stored, 1)]).view(stored.shape)


@pytest.mark.parametrize("kind", OF_EXPERTS)
@pytest.mark.parametrize("save", [save_as_held, save_tiny], ids=["as one tensor", "each for itself"])
def test_each_expert_has_the_values_that_transformers_computes_with(kind: str, save, tmp_path: Path) -> None:
    save(kind, tmp_path)
    expected = {name: one for name, one in checkpoint_tensors(tiny_hf_model(kind)).items() if ".experts." in name}
    assert len(expected) >= 3 * 4 * 1
    for name, values in expected.items():
        assert torch.equal(values_of(kind, tmp_path, name), values), name


def test_tokens_are_the_same_from_either(tmp_path: Path, checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("mixtral", (0, 0, 100, 0, 100, 0))
    with case.open(checkpoints, offload) as llm:
        expected, _ = generate_with(llm, case)
    save_as_held("mixtral", tmp_path / "held")
    asked = {"tokenizer": "bytes", "percent": case.percent, "dtype": "float32", "offload_dir": offload}
    with LLM(str(tmp_path / "held"), **asked) as llm:
        found, _ = generate_with(llm, case)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_names_of_mixtral_become_the_usual_ones_and_others_stay() -> None:
    prefix, usual_name = "model.layers.3.", tensor_names(tiny_config("mixtral")).usual
    assert usual_name(f"{prefix}block_sparse_moe.gate.weight") == f"{prefix}mlp.gate.weight"
    assert usual_name(f"{prefix}block_sparse_moe.experts.12.w3.qweight") == f"{prefix}mlp.experts.12.up_proj.qweight"
    for name in (f"{prefix}mlp.experts.1.up_proj.weight", f"{prefix}self_attn.q_proj.weight", "lm_head.weight"):
        assert usual_name(name) == name


def test_two_tensors_for_one_matrix_are_refused(tmp_path: Path) -> None:
    tiny_config("mixtral").save_pretrained(tmp_path)
    of_mixtral, usual = (
        f"model.layers.0.{name}.weight" for name in ("block_sparse_moe.experts.0.w1", "mlp.experts.0.gate_proj")
    )
    save_file({name: torch.zeros(2, 2) for name in (of_mixtral, usual)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"is there under another name, too \(model.layers.0.mlp.experts.0.gate_proj.weight\)"):
        open_checkpoint(tmp_path, names=tensor_names(tiny_config("mixtral")))


def test_experts_in_another_shape_are_refused_in_one_line(tmp_path: Path) -> None:
    tiny_config("mixtral").save_pretrained(tmp_path)
    save_file({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 7, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"gate_up_proj in .* has the shape \(4, 7, 8\) instead of \(experts, 2 times as many"):
        open_checkpoint(tmp_path)
    save_file({"model.layers.0.mlp.experts.down_proj": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"down_proj in .* has the shape \(4, 8\) instead of"):
        open_checkpoint(tmp_path)
    of_gpt_oss = {"model.layers.0.mlp.experts.gate_up_proj_bias": torch.zeros(4, 8)}
    save_file({**of_gpt_oss, "model.layers.0.mlp.experts.down_proj": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"down_proj in .* has the shape \(4, 8\) instead of \(experts, columns, rows\)"):
        open_checkpoint(tmp_path)
    save_file({"model.layers.0.mlp.experts.down_proj_bias": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"down_proj_bias in .* has the shape \(4,\) instead of \(experts, rows\)"):
        open_checkpoint(tmp_path)


def test_turned_experts_in_another_shape_are_refused_in_one_line(tmp_path: Path) -> None:
    tiny_config("llama4").save_pretrained(tmp_path)
    save_file({"model.layers.1.feed_forward.experts.gate_up_proj": torch.zeros(4, 8, 7)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has the shape \(4, 8, 7\) instead of \(experts, columns, 2 times as many rows"):
        open_checkpoint(tmp_path, names=tensor_names(tiny_config("llama4")))


def test_missing_experts_are_counted(tmp_path: Path) -> None:
    save_tiny("gpt-oss", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_local_experts": 8}))
    first = "model.layers.0.mlp.experts.6.gate_up_proj.weight"
    said = one_line(lambda: LLM(str(tmp_path), tokenizer="bytes", device="cpu", offload_dir=tmp_path))
    assert said.startswith(f"tensor {first} is missing in {tmp_path}, and so are 23 of ") and "download the model again" in said
