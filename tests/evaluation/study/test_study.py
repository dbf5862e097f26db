"""A study under any plan and on any device, what it says of itself, its pictures, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_flexgen.evaluation.study import study_pictures
from h2o_flexgen.evaluation.study.heavy_hitters import HeavyHitterStudy, study
from h2o_flexgen.evaluation.study.readers import coding_of
from h2o_flexgen.evaluation.study.study_pictures import draw, kept_map
from h2o_flexgen.kv.slots import Coding
from h2o_flexgen.llm import LLM
from tests.helpers.contract import Checkpoints, distinct_prompts
from tests.helpers.samples import first_of
from tests.helpers.tiny import save_tiny

TEXT = distinct_prompts((48,), seed=4)[0]
POLICIES = ("h2o", "snapkv", "local")


def studied(checkpoints: Checkpoints, kind: str = "llama-gqa", **options: Any) -> HeavyHitterStudy:
    with LLM(str(checkpoints.folder(kind)), **{"dtype": "float32", **options}) as llm:
        return study(llm, TEXT, POLICIES, 0.25)


@pytest.mark.parametrize("kind", first_of(["llama-gqa", "qwen3-5", "opt", "neox-parallel"], 2))
def test_devices_and_joined_layers_say_the_same(kind: str, any_device: str, checkpoints: Checkpoints, offload: Path) -> None:
    plain = studied(checkpoints, kind)
    for options in ({}, {"sep_layer": False}, {"percent": (0, 0, 100, 0, 100, 0)}):
        found = studied(checkpoints, kind, offload_dir=offload, device=any_device, **options)
        np.testing.assert_allclose(found.scores, plain.scores, atol=1e-4)
        assert all((found.gone[name] == gone).mean() > 0.99 for name, gone in plain.gone.items())


@pytest.mark.parametrize("kind", ["opt", "llama-gqa", "neox-tied"])
def test_packed_weights_and_kv_are_studied_as_they_are_run(kind: str, checkpoints: Checkpoints) -> None:
    plain, packed = studied(checkpoints, kind), studied(checkpoints, kind, weight_codec="group8", kv_codec="group4")
    difference = np.abs(packed.scores - plain.scores).max()
    assert 0 < difference < 0.5 * plain.scores.max()
    assert any((packed.gone[name] != plain.gone[name]).any() for name in POLICIES)


def test_an_engine_that_is_loaded_is_not_disturbed(checkpoints: Checkpoints) -> None:
    with LLM(str(checkpoints.folder("opt")), dtype="float32", kv_policy="h2o", heavy=2, recent=2) as llm:
        before = llm.generate([TEXT[:9]])[0].token_ids
        layers: list[tuple[int, int]] = []
        study(llm, TEXT, POLICIES, 0.25, on_layer=lambda done, total: layers.append((done, total)))
        assert llm.generate([TEXT[:9]])[0].token_ids == before
    assert layers == [(done, 6) for done in range(1, 7)]


def test_latent_vectors_are_studied_as_they_are_kept(checkpoints: Checkpoints) -> None:
    with LLM(str(checkpoints.folder("deepseek-v3")), dtype="float32", kv_codec="group4") as llm:
        assert coding_of(llm) == Coding.of(llm.spec)
        found = study(llm, TEXT, POLICIES, 0.25)
    assert found.gone["h2o"].shape == (3, 1, 48)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gemma4", "a study: layers of .* have 1 or 2 KV heads, and it is for layers that have equally many"),
        ("gemma4-dense", "a study: layers of .* have KV heads of 12 or 16 values, and .* equally wide ones"),
    ],
)
def test_layers_with_unlike_heads_are_refused_before_anything_is_read(
    kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(kind, tmp_path, sliding_window=128)
    monkeypatch.setattr("h2o_flexgen.evaluation.study.heavy_hitters.read_texts", lambda *_: pytest.fail("it was read"))
    with LLM(str(tmp_path), tokenizer="bytes", dtype="float32") as llm, pytest.raises(ValueError, match=said):
        study(llm, TEXT, POLICIES, 0.25)


def test_random_weights_can_be_studied(offload: Path) -> None:
    with LLM("facebook/opt-125m", dummy_weights=True, dtype="float32", offload_dir=offload) as llm:
        found = study(llm, TEXT[:20], ["h2o"], 0.5)
    assert found.sparsity.shape == (12, 12) and found.scores.sum() == pytest.approx(12 * 12 * 20, rel=1e-4)


def test_it_says_all_of_it(checkpoints: Checkpoints) -> None:
    found = studied(checkpoints)
    assert (found.tokens, found.prompt_len, found.slots, found.later) == (48, 12, 12, 12)
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert set(told["policies"]) == {"oracle", *POLICIES} == set(told["overlap"])
    assert told["policies"]["h2o"]["captured_attention_by_layer"] == pytest.approx(found.captured["h2o"].mean(-1).tolist())
    assert np.shape(told["accumulated_scores"]["mean_curve_by_layer"]) == (3, len(told["accumulated_scores"]["ranks"]))
    assert told["accumulated_scores"]["ranks"][0] == 1 and told["accumulated_scores"]["ranks"][-1] == 48
    text = "\n".join(found.lines())
    assert "48 tokens, of which 12 are the prompt" in text and "25 %, 12 slots" in text
    for name in POLICIES:
        assert sum(line.startswith(f"{name} ") for line in found.lines()) == 2


def test_policies_are_told_apart(checkpoints: Checkpoints) -> None:
    found = studied(checkpoints)
    assert (found.overlap["h2o", "h2o"] == 1).all() and (found.overlap["local", "h2o"] < 1).all()
    assert np.array_equal(found.overlap["local", "h2o"], found.overlap["h2o", "local"])
    assert found.heaviest_found["oracle"].tolist() == [1, 1, 1]
    assert found.heaviest_found["h2o"].mean() > found.heaviest_found["local"].mean()
    assert found.captured["oracle"].mean() > found.captured["local"].mean()


def test_pictures_are_written(checkpoints: Checkpoints, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = studied(checkpoints)
    files = draw(found, tmp_path / "deep" / "folder", layer=2)
    assert [file.name for file in files] == [
        f"{name}.png" for name in ("who-is-kept", "accumulated-scores", "sparsity", "overlap", "persistence")
    ]
    assert all(file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 5000 for file in files)
    with pytest.raises(ValueError, match=r"layer 3 is not in .*; it has 0 to 2"):
        draw(found, tmp_path, layer=3)


def test_a_heat_map_says_how_many_heads_hold_a_token() -> None:
    gone = np.array([[2, 5, 5, 4], [5, 3, 5, 5]], dtype=np.int32)
    expected = [[0.5, 1.0, np.nan, np.nan], [0.5, 0.5, 1.0, np.nan], [0.5, 0.5, 1.0, 0.5]]
    np.testing.assert_array_equal(kept_map(gone, np.array([2, 3, 4])), expected)


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    monkeypatch.setattr(study_pictures, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"need matplotlib; install it, or the extra \[plot\]"):
        draw(studied(checkpoints), tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ids": TEXT[:9]}, "the text to study has 9 tokens; give one of 16 or more"),
        ({"ids": TEXT * 3}, "has 144 tokens, but .* has 128 positions; give a shorter one"),
        ({"ids": [*TEXT, 113]}, "has the token id 113; .* knows 0 to 112"),
        ({"prompt_len": 48}, "the prompt to study has 48 tokens of a text of 48; give 1 to 47"),
        ({"prompt_len": 0}, "the prompt to study has 0 tokens"),
        ({"budget": 0.0}, "kv_budget is 0.0; allowed is a number above 0"),
        ({"budget": 0.01}, "'h2o' has a budget of 0 slots"),
        ({"policies": ["streming"]}, "kv_policy 'streming' is unknown; .*did you mean streaming"),
        ({"policies": ["h2o", "full"]}, "kv_policy 'full' keeps everything, and there is nothing to study"),
        ({"policies": ["h2o", "h2o"]}, "kv_policy 'h2o' is named twice"),
        ({"policies": ["kvzip"]}, "kv_policy 'kvzip' judges a prompt by an echo that a study does not compute; leave it out"),
        ({"policies": []}, "no KV policy to study was named"),
    ],
)
def test_what_cannot_be_studied_is_refused_before_anything_is_read(
    changed: dict[str, Any], message: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("h2o_flexgen.evaluation.study.heavy_hitters.read_texts", lambda *_: pytest.fail("it was read"))
    with LLM(str(checkpoints.folder("opt")), dtype="float32") as llm, pytest.raises(ValueError, match=message):
        study(llm, **{"ids": TEXT, "policies": POLICIES, "budget": 0.25, **changed})


def test_a_text_longer_than_a_window_is_not_studied_as_if_all_were_seen(checkpoints: Checkpoints) -> None:
    said = r"has 96 tokens, but .* has 64 positions within its window; give a shorter one"
    with LLM(str(checkpoints.folder("mistral")), dtype="float32") as llm, pytest.raises(ValueError, match=said):
        study(llm, ids=TEXT * 2, policies=POLICIES, budget=0.25)
