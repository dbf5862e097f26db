"""The models of the package: they open by name, write words, and are small enough to travel."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.checkpoints.model_places import ARCHITECTURES, DEMO, demo_folder, held_out_prose, resolve_model
from h2o_flexgen.cli.run_request import DEMO_PROMPTS

NAMES = [f"{DEMO}-{architecture}" for architecture in ARCHITECTURES]
LARGEST_BYTES = {"demo-llama": 12_000_000, "demo-opt": 4_000_000, "demo-neox": 4_000_000}


@pytest.mark.parametrize("name", NAMES)
def test_a_demo_model_writes_words_of_english(name: str) -> None:
    words = set(held_out_prose().lower().split())
    with LLM(name, gpu_batch_size=4, dtype="float32") as llm:
        params = SamplingParams(max_tokens=24, temperature=0.7, top_p=0.9)  # greedily a model this small goes round in circles
        texts = llm.generate(DEMO_PROMPTS, params, seed=0)
    said = [word for text in texts for word in text.text.lower().split()[:-1]]  # the last one may be cut
    assert len(said) >= 40
    assert sum(word in words for word in said) / len(said) > 0.7


@pytest.mark.parametrize("name", NAMES)
def test_a_demo_model_is_small_enough_to_travel(name: str) -> None:
    folder = demo_folder(name)
    assert folder is not None
    assert sum(file.stat().st_size for file in folder.iterdir()) <= LARGEST_BYTES[name]


def test_demo_alone_is_the_first_of_them() -> None:
    assert demo_folder(DEMO) == demo_folder(NAMES[0])
    assert demo_folder("facebook/opt-1.3b") is None


def test_an_unknown_demo_model_is_told_the_known_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"model 'demo-neo' is neither .* the hub; did you mean demo-neox\?"):
        resolve_model("demo-neo")


def test_a_folder_of_the_same_name_does_not_stand_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / DEMO).mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model(DEMO) == demo_folder(DEMO)
    assert resolve_model(f"./{DEMO}") == Path(DEMO)
