"""Calibration: scores are the attention that transformers sees in a text that is repeated, and the command makes a file of them
that the other commands take."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from h2o_flexgen import batch, calibrate, chat, evaluate, run
from h2o_flexgen.calibration import text_reading
from h2o_flexgen.calibration.calibration import BUDGETS, LayerRead, RepeatedText
from h2o_flexgen.calibration.calibration import calibrate as calibrated
from h2o_flexgen.calibration.text_reading import read_texts
from h2o_flexgen.checkpoints.model_places import SMOLLM2, folders_beside
from h2o_flexgen.checkpoints.probe_file import read_probe
from h2o_flexgen.cli.calibrate_request import PROGRAM
from h2o_flexgen.llm import LLM
from h2o_flexgen.policies.head_budgets import FILE, read_head_budgets
from tests.helpers.commands import Result, called
from tests.helpers.contract import Checkpoints, distinct_prompts

TEXTS = distinct_prompts((17, 20), seed=3)
HYBRIDS = "qwen3-5", "granite-h", "nemotron-h", "falcon-h1", "lfm2-moe"  # layers with states beside those with KV


def looked_up(model: PreTrainedModel, ids: list[int], kv_heads: int) -> Tensor:
    """The scores by transformers. (layers, kv_heads, tokens)"""
    model.config._attn_implementation = "eager"
    n = len(ids)
    layers = model(torch.tensor([[*ids, *ids]]), output_attentions=True).attentions
    attended = [layer for layer in layers if layer is not None]  # of layers with states some models give nothing
    return torch.stack([layer[0, :, n:, :n].reshape(kv_heads, -1, n, n).amax((1, 2)) for layer in attended])


def assert_scores_are_those_of_transformers(kind: str, checkpoints: Checkpoints) -> None:
    seen: list[list[LayerRead]] = [[] for _ in TEXTS]
    with torch.inference_mode(), LLM(str(checkpoints.folder(kind)), dtype="float32") as llm:
        read_texts(llm.loaded.reading, [RepeatedText(ids, layers.append).reading for ids, layers in zip(TEXTS, seen)])
        for ids, layers in zip(TEXTS, seen):
            expected = looked_up(checkpoints.hf_model(kind), ids, llm.spec.kv_heads)
            assert len(layers) == len(llm.spec.kv_layers)
            torch.testing.assert_close(torch.stack([layer.scores for layer in layers]), expected, atol=1e-4, rtol=0)
            assert {tuple(layer.x.shape) for layer in layers if layer.x is not None} == {(2 * len(ids), llm.spec.width)}


@pytest.mark.parametrize("kind", ["opt", "llama-gqa", "neox-parallel", *HYBRIDS])
def test_a_tokens_score_is_the_highest_attention_that_its_repetition_pays_it(kind: str, checkpoints: Checkpoints) -> None:
    assert_scores_are_those_of_transformers(kind, checkpoints)


def test_a_state_that_another_text_has_left_is_found(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_reading, "states_of", cache(text_reading.states_of))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_scores_are_those_of_transformers("qwen3-5", checkpoints)


@pytest.mark.parametrize("kind", ["llama-gqa", "granite-h"])
def test_texts_have_nothing_to_do_with_each_other(kind: str, checkpoints: Checkpoints) -> None:
    with LLM(str(checkpoints.folder(kind)), dtype="float32") as llm:
        both, second = calibrated(llm.loaded.reading, TEXTS, "two texts"), calibrated(llm.loaded.reading, TEXTS[1:], "one text")
        assert calibrated(llm.loaded.reading, TEXTS, "two texts").head_budgets == both.head_budgets
    assert all((both.shares[budget][1] == second.shares[budget][0]).all() for budget in BUDGETS)
    assert second.spread(0.5) is None and 0 < (both.spread(0.5) or 0) < 1
    blocks = {"llama-gqa": (0, 1, 2), "granite-h": (1,)}[kind]
    assert both.head_budgets.shape == (len(blocks), 2) and both.head_budgets.blocks == blocks
    assert both.head_budgets.model == checkpoints.folder(kind).name


def test_texts_that_cannot_be_read_twice_are_refused(checkpoints: Checkpoints) -> None:
    with LLM(str(checkpoints.folder("opt")), dtype="float32") as llm:
        with pytest.raises(ValueError, match=r"texts of .* tokens are read twice, and .* positions; give .* tokens or fewer"):
            calibrated(llm.loaded.reading, [[5] * llm.spec.max_positions], "a text")
        with pytest.raises(ValueError, match="a text has 3 tokens; give 16 or more"):
            calibrated(llm.loaded.reading, [[5, 6, 7]], "a text")
        llm.loaded.limits = replace(llm.limits, host=10)
        with pytest.raises(ValueError, match=r"the largest layer of .* and 10 B may be held"):
            calibrated(llm.loaded.reading, TEXTS, "texts")


def test_layers_with_unlike_heads_are_refused_before_anything_is_read(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("h2o_flexgen.calibration.calibration.reading_of", lambda *_: pytest.fail("it was read"))
    said = r"calibration: layers of .* have 1 or 2 KV heads"
    with LLM(str(checkpoints.folder("gemma4")), dtype="float32") as llm, pytest.raises(ValueError, match=said):
        calibrated(llm.loaded.reading, TEXTS, "texts")


# -- the command -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], offload: Path, tiny_llama: Path) -> Any:
    def call(main: Any, *argv: object) -> Result:
        common = ("--model", tiny_llama, "--device", "cpu", "--dtype", "float32", "--offload-dir", offload)
        return called(main, capfd, *common, *argv)

    return call


def test_what_is_measured_is_what_other_commands_take(command: Any, tiny_llama: Path, text_file: Path, tmp_path: Path) -> None:
    file = tmp_path / FILE
    told = command(calibrate.main, "--text", text_file, "--tokens", 40, "--texts", 3, "--output", file)
    budgets = read_head_budgets(file)
    named = {"model": tiny_llama.name, "source": f"3 texts of 40 tokens: {text_file.stem}", "checksum": budgets.checksum}
    assert {name: told.json[name] for name in named} == named and budgets.shape == (3, 2) and budgets.budgets == BUDGETS
    assert sum(line.startswith(f"{100 * budget:g} %") for line in told.out for budget in BUDGETS) == len(BUDGETS)

    ran = command(run.main, "--head-budgets", file, "--prompt-len", 40, "--gen-len", 8, "--num-prompts", 1, "--dry-run")
    assert ran.json["plan"]["head_budgets"] == named and ran.json["plan"]["kv_policy"] == "h2o"
    assert any(line.startswith("heads ") and budgets.checksum in line for line in ran.out)

    turns = tmp_path / "turns.txt"
    turns.write_text("Once upon a time there was a garden\nand then\n", encoding="utf-8")
    talk = ("--kv-policy", "h2o", "--input", turns, "--gen-len", 4, "--style", "plain", "--head-budgets", file)
    assert command(chat.main, *talk).json["head_budgets"] == named

    requests = tmp_path / "in.txt"
    requests.write_text("Once upon a time there was a garden with a gate\n", encoding="utf-8")
    job = ("-i", requests, "-o", tmp_path / "out.jsonl", "--gen-len", 4, "--kv-policy", "h2o")
    assert command(batch.main, *job, "--head-budgets", file).status == 0
    refused = command(batch.main, *job, "--resume", "--head-budgets", "equal").error
    assert "--head-budgets was " in refused and budgets.checksum in refused

    asked = ("--policies", "full,h2o", "--budgets", "50", "--tasks", "perplexity", "--window", 48, "--examples", 1)
    cells = command(evaluate.main, *asked, "--text", text_file, "--head-budgets", f"equal,{file}").json
    kept = [(cell["policy"], cell["head_budgets"]) for cell in cells["tasks"]["perplexity"]["cells"]]
    assert kept == [("full", None), ("h2o", None), ("h2o", named)]


def test_what_is_measured_for_no_file_is_kept_for_all_runs_of_the_model(
    command: Any, tiny_llama: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = ("--kv-policy", "h2o", "--prompt-len", 40, "--gen-len", 8, "--num-prompts", 1, "--dry-run")
    before = command(run.main, *asked)
    assert before.json["plan"]["head_budgets"] is None and before.json["facts"] is None
    advice = (
        "heads     equal budgets: what each needs is measured by the first run, once; or, if that takes more than 2 minutes, by"
    )
    assert f"{advice}: {PROGRAM} --model {tiny_llama}" in before.out and any(
        line.startswith("facts ") and "was not measured" in line for line in before.out
    )
    told = command(calibrate.main, "--text", text_file, "--tokens", 40, "--texts", 1)
    budgets = read_head_budgets(told.json["output"])
    assert f"kept in {told.json['output']}; runs of this model that evict take it by themselves" in told.out
    ran = command(run.main, *asked)
    assert ran.json["plan"]["head_budgets"]["checksum"] == budgets.checksum
    assert any(line.startswith("heads ") and told.json["output"] in line for line in ran.out)
    equal = command(run.main, *asked, "--head-budgets", "equal")
    assert equal.json["plan"]["head_budgets"] is None
    assert "heads     equal budgets: what each needs is known, and --head-budgets auto goes by it" in equal.out
    assert command(run.main, *asked, "--dummy-weights").json["plan"]["head_budgets"] is None
    assert command(run.main, *asked[2:]).json["plan"]["head_budgets"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output", "no/such/folder/x.json"], "--output no/such/folder/x.json cannot be written"),
        (["--output", "x.json", "--text", "a.txt", "b.txt", "--texts", "1"], "--texts 1 leaves out files of --text"),
        (["--output", "x.json", "--probe", "./x.json"], "--output and --probe are both x.json, and each writes a file"),
        (["--probe", "no/such/folder/x.json"], "--probe no/such/folder/x.json cannot be written"),
        (["--output", "x.json", "--text", "a.txt"], "give a longer text or a smaller --tokens"),
        (["--output", "x.json", "--texts", "0"], "argument --texts: '0' is not allowed"),
        (["--dummy-weights"], "has no weights here that would identify it, so nothing is kept; give --output FILE"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str], said: str, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("a text", encoding="utf-8")
    assert said in command(calibrate.main, *words).error
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--head-budgets", "own"], "there are no head budgets of"),
        (
            ["--head-budgets", "auto"],
            "--head-budgets auto is for runs, and tables say what was measured; give equal, own or FILE",
        ),
        (["--head-budgets", "a.json,b.json"], "--head-budgets has a.json and b.json"),
        (["--head-budgets", "own", "--kv-sizes", "8"], "--head-budgets own shares out --budgets"),
        (["--head-budgets", "own", "--policies", "full"], "--head-budgets own is for policies that evict"),
        (["--head-budgets", "nowhere.json"], "head budgets nowhere.json cannot be read"),
    ],
)
def test_an_evaluation_refuses_heads_that_it_cannot_compare(words: list[str], said: str, command: Any) -> None:
    assert said in command(evaluate.main, *words).error


def test_a_picture_of_the_heads_is_drawn(command: Any, text_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "heads.png"
    read = ("--text", text_file, "--tokens", 16, "--texts", 1, "--output", tmp_path / FILE)
    assert command(calibrate.main, *read, "--picture", picture).status == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


# -- the file that travels with the package --------------------------------------------------------------------------------


def test_the_file_of_the_package_can_be_read() -> None:
    budgets = read_head_budgets(folders_beside(SMOLLM2.name)[-1] / FILE)
    assert budgets.budgets == BUDGETS and budgets.shape == (30, 3) and budgets.model == SMOLLM2.name


@pytest.mark.smollm2
def test_the_file_of_the_package_fits_its_model_by_either_name() -> None:
    for name in (SMOLLM2.name, str(SMOLLM2.path)):
        with LLM(name, kv_policy="h2o", kv_budget=0.2, head_budgets="own") as llm:
            assert llm.plan.head_budgets is not None
            shares = llm.plan.head_budgets.at(0.2)
    assert shares[18][2] > 0.95 > 0.1 > max(shares[3])  # a head that looks back, and a layer that does not


def test_a_probe_is_what_other_commands_rank_tokens_by(command: Any, tiny_llama: Path, text_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "probe.safetensors"
    told = command(calibrate.main, "--text", text_file, "--tokens", 40, "--texts", 3, "--probe", file)
    probe = read_probe(file)
    named = {"model": tiny_llama.name, "source": f"3 texts of 40 tokens: {text_file.stem}", "checksum": probe.checksum}
    assert {name: told.json["probe"][name] for name in named} == named and told.json["output"] is None
    assert probe.weights.shape == (3, 2, 32) and 0 < told.json["probe"]["found"] <= 1
    asked = ("--kv-policy", "kvzap", "--kv-budget", 0.3, "--probe", file)
    ran = command(run.main, *asked, "--prompt-len", 40, "--gen-len", 4, "--num-prompts", 1)
    assert ran.json["plan"]["probe"] == named and any(line.startswith("probe ") and probe.checksum in line for line in ran.out)


def test_a_probe_is_fitted_to_all_pieces_where_texts_have_fewer_than_asked_for(
    command: Any, text_file: Path, tmp_path: Path
) -> None:
    asked = ("--text", text_file, "--tokens", 40, "--texts", 1000, "--probe", tmp_path / "probe.safetensors")
    assert command(calibrate.main, *asked).status == 0
    assert not read_probe(tmp_path / "probe.safetensors").source.startswith("1000 ")
