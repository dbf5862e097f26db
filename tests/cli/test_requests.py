"""Which model a command runs, from --model, --path and --dummy-weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_flexgen.cli.common_requests import choose_model
from h2o_flexgen.session.open_request import ModelRequest


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """FlexGen's folder of weights, with one model in it."""
    folder = tmp_path / "owner" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return tmp_path


def test_a_name_alone_is_left_to_the_hub() -> None:
    assert choose_model("owner/model", None, False) == ModelRequest("owner/model", "owner/model", False)


@pytest.mark.parametrize(("path", "dummy"), [("_DUMMY_", False), (None, True), ("/anything", True)])
def test_random_weights_need_no_folder(path: str | None, dummy: bool) -> None:
    assert choose_model("owner/model", path, dummy) == ModelRequest("owner/model", "owner/model", True)


def test_the_model_is_found_in_the_folder_of_weights(weights: Path) -> None:
    found = str(weights / "owner" / "model")
    assert choose_model("owner/model", str(weights), False) == ModelRequest("owner/model", found, False)
    assert choose_model("other/model", str(weights / "owner"), False).source == found
    assert choose_model("any", found, False).source == found
    assert choose_model(None, found, False) == ModelRequest("model", found, False)


def test_a_folder_without_the_model_is_refused_with_the_places_looked_at(weights: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json") as caught:
        choose_model("a/b", str(weights), False)
    assert all(str(weights / place) in str(caught.value) for place in ("a/b", "b"))


def test_a_look_at_the_plan_reads_headers_of_safetensors_and_nothing_else(weights: Path) -> None:
    folder = weights / "owner" / "model"
    chosen = choose_model(None, str(folder), False)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert chosen.without_weights().dummy_weights  # else it would be converted
    seen = choose_model("owner/model", None, False).without_weights()
    assert seen.dummy_weights and seen.stands_for_own  # else it would be downloaded
    assert not choose_model("owner/model", None, True).without_weights().stands_for_own  # random ones were asked for
    (folder / "model.safetensors").write_bytes(b"")
    assert not chosen.without_weights().dummy_weights and chosen.without_weights().is_looked_at
