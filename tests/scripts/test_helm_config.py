"""The files that make HELM know a model: what they say, several models in one folder, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from h2o_flexgen import LLM
from tests.helpers import tiny
from tests.helpers.real_tokenizers import VOCABS, save_byte_level
from tests.scripts.loading import load_script

FILES = {
    "model_metadata.yaml": "models",
    "model_deployments.yaml": "model_deployments",
    "tokenizer_configs.yaml": "tokenizer_configs",
}
PLACES = ("--percent", "0", "100", "0", "100", "0", "100", "--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-neox"
    tiny.save_tiny("neox-parallel", folder, vocab_size=VOCABS["byte_level"], eos_token_id=1)
    save_byte_level(folder)
    return folder


def written(folder: Path, *arguments: object) -> dict[str, list[dict[str, Any]]]:
    assert load_script("helm_config").main([*map(str, arguments), "--output", str(folder)]) == 0
    return {file: yaml.safe_load((folder / file).read_text())[key] for file, key in FILES.items()}


def test_the_files_say_what_was_asked(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (*PLACES, "--kv-budget", "0.25", "--compress-weight", "--gpu-batch-size", "3", "--gather", "0.5", "--chat")
    found = written(tmp_path / "env", model, *asked)
    ((metadata,), (deployment,), (tokenizer,)) = found.values()
    name = "h2o_flexgen/tiny-neox-h2o-0.25"
    assert {one["name"] for one in (metadata, deployment, tokenizer)} == {name}
    assert (deployment["model_name"], deployment["tokenizer_name"]) == (name, name)
    assert f"--models-to-run {name} " in capsys.readouterr().out
    places: dict[str, Any] = {"model": str(model), "percent": [0, 100, 0, 100, 0, 100], "device": "cpu"}
    kept = {"kv_policy": "h2o", "kv_budget": 0.25, "weight_codec": "group4", "gpu_batch_size": 3, "gather": 0.5}
    assert deployment["client_spec"] == {"class_name": "h2o_flexgen.helm.Client", "args": {**places, **kept, "chat": True}}
    assert tokenizer["tokenizer_spec"] == {"class_name": "h2o_flexgen.helm.Tokenizer", "args": {**places, **kept}}
    assert (tokenizer["prefix_token"], tokenizer["end_of_text_token"]) == ("<s>", "</s>")
    assert deployment["max_request_length"] == tiny.POSITIONS - 1, "the tokenizer adds a start token"
    assert deployment["max_sequence_length"] == tiny.POSITIONS - 2, "HELM writes one before texts that are scored"
    with LLM(str(model), percent=places["percent"], device="cpu") as llm:
        assert metadata["num_parameters"] == sum(tensor.numel for layer in llm.spec.layers for _, tensor in layer.tensors)


def test_models_of_other_names_stay_and_one_of_the_same_is_replaced(model: Path, tmp_path: Path) -> None:
    written(tmp_path, model, *PLACES)
    written(tmp_path, model, *PLACES, "--kv-policy", "local", "--kv-budget", "0.5")
    found = written(tmp_path, model, *PLACES, "--seed", "7")
    names = ["h2o_flexgen/tiny-neox-local-0.5", "h2o_flexgen/tiny-neox"]
    assert all([one["name"] for one in entries] == names for entries in found.values())
    assert found["model_deployments.yaml"][1]["client_spec"]["args"]["seed"] == 7


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no model is named"),
        (("/no/such/folder",), "/no/such/folder"),
        (("MODEL", "--kv-polcy", "h2o"), "did you mean --kv-policy"),
        (("MODEL", "--name", "a,b"), "--name 'a,b' has a character"),
        (("MODEL", "--kv-policy", "h2o", "--kv-budget", "2"), "give a number above 0 and at most 1"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_and_nothing_is_written(
    arguments: tuple[str, ...], said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(model) if one == "MODEL" else one for one in arguments]
    assert load_script("helm_config").main([*given, "--output", str(tmp_path / "env")]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (tmp_path / "env").exists()


def test_a_file_that_is_no_list_of_models_is_left_as_it_is(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model_deployments.yaml").write_text("- mine\n")
    assert load_script("helm_config").main([str(model), *PLACES, "--output", str(tmp_path)]) == 2
    assert "model_deployments.yaml is no list of model_deployments" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["model_deployments.yaml"]
    assert (tmp_path / "model_deployments.yaml").read_text() == "- mine\n"
