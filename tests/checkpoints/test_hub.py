"""A model's name becomes a folder, or one line that says why not. The hub is a stand-in here."""

from __future__ import annotations

from pathlib import Path
from socket import gaierror
from types import SimpleNamespace

import huggingface_hub
import pytest

from h2o_flexgen.checkpoints.model_places import resolve_model


class Hub:
    """Answers as the hub would: `files` are in the repository, `cached` is what an earlier download left."""

    def __init__(self, files: list[str], cached: Path | None = None, error: Exception | None = None) -> None:
        self.files, self.cached, self.error = files, cached, error
        self.patterns: list[str] = []

    def model_info(self, name: str, timeout: float) -> SimpleNamespace:
        if self.error:
            raise self.error
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in self.files])

    def snapshot_download(self, name: str, **options: object) -> str:
        if options.get("local_files_only"):
            if self.cached is None:
                raise FileNotFoundError("nothing is cached")
            return str(self.cached)
        assert isinstance(options["allow_patterns"], list)
        self.patterns = options["allow_patterns"]
        return "/downloaded"

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Hub:
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        return self


def failing(name: str) -> str:
    with pytest.raises(ValueError) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub([], error=AssertionError("nothing should ask the hub")).install(monkeypatch)
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/folder", "./opt", "~nobody-here/opt", "a/b/c", ""])
def test_a_path_that_is_not_there_never_goes_to_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub([], error=AssertionError("nothing should ask the hub")).install(monkeypatch)
    assert repr(name) in failing(name)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert "is a file; give a folder with weights and their config" in failing(str(tmp_path / "model.safetensors"))


def test_a_gguf_file_of_another_name_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"GGUF...")
    assert "it is a GGUF file, but its name does not end in .gguf; rename it" in failing(str(tmp_path / "blob"))


@pytest.mark.parametrize(
    ("files", "wanted", "unwanted"),
    [
        (["config.json", "model.safetensors", "pytorch_model.bin"], "model.safetensors", "pytorch_model.bin"),
        (["model.safetensors.index.json", "pytorch_model.bin.index.json"], "model-*.safetensors", "pytorch_model-*.bin"),
        (["config.json", "pytorch_model.bin", "flax_model.msgpack"], "pytorch_model.bin", "model.safetensors"),
    ],
)
def test_bins_are_fetched_only_where_there_are_no_safetensors(
    files: list[str], wanted: str, unwanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(files).install(monkeypatch)
    assert resolve_model("facebook/opt-125m") == Path("/downloaded")
    assert wanted in hub.patterns and unwanted not in hub.patterns
    assert "config.json" in hub.patterns and not any(pattern.endswith(".py") for pattern in hub.patterns)


def test_weights_are_left_out_where_only_the_config_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(["model.safetensors", "pytorch_model.bin"]).install(monkeypatch)
    resolve_model("facebook/opt-125m", with_weights=False)
    assert hub.patterns and not any("safetensors" in pattern or "bin" in pattern for pattern in hub.patterns)


def test_without_a_network_an_earlier_download_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub([], cached=tmp_path, error=ConnectionError("offline")).install(monkeypatch)
    (tmp_path / "config.json").touch()
    assert resolve_model("facebook/opt-125m", with_weights=False) == tmp_path
    assert "offline" in failing("facebook/opt-125m")  # the weights were not part of it
    (tmp_path / "model.safetensors").touch()
    assert resolve_model("facebook/opt-125m") == tmp_path


def test_an_unreachable_hub_is_one_line_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub([], error=ConnectionError("Name or service not known\nand so on")).install(monkeypatch)
    message = failing("facebook/opt-125m")
    assert "facebook/opt-125m" in message and "Name or service not known" in message and "--dummy-weights" in message


def test_a_machine_without_a_network_is_told_so_and_not_by_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = ConnectionError("[Errno -2] Name or service not known")
    lost.__context__ = gaierror(-2, "Name or service not known")
    Hub([], error=lost).install(monkeypatch)
    assert "(the hub cannot be reached: its name is not known" in failing("facebook/opt-125m")


def test_offline_mode_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "offline mode" in failing("nobody/has-this-model")


# -- GGUF files ------------------------------------------------------------------------------------------------------------

PARTED = ["big-00001-of-00002.gguf", "big-00002-of-00002.gguf"]


def test_a_gguf_file_of_a_repository_is_fetched_alone_and_with_all_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(["config.json", "small.gguf", *PARTED]).install(monkeypatch)
    assert resolve_model("owner/name/small.gguf") == Path("/downloaded/small.gguf") and hub.patterns == ["small.gguf"]
    assert resolve_model(f"owner/name/{PARTED[1]}") == Path("/downloaded", PARTED[0])
    assert hub.patterns == ["big-*-of-00002.gguf"]


def test_a_repository_of_gguf_files_asks_for_the_name_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(["README.md", "small.gguf", *PARTED]).install(monkeypatch)
    message = failing("owner/name")
    assert message.endswith("name one of them: owner/name/big-00001-of-00002.gguf, owner/name/small.gguf")
    assert "no file 'smal.gguf'; GGUF files there: owner/name/big-" in failing("owner/name/smal.gguf")


def test_without_a_network_a_gguf_file_of_an_earlier_download_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub([], cached=tmp_path, error=ConnectionError("offline")).install(monkeypatch)
    assert "offline" in failing("owner/name/small.gguf")
    (tmp_path / "small.gguf").touch()
    assert resolve_model("owner/name/small.gguf") == tmp_path / "small.gguf"
    with pytest.raises(ValueError, match="offline"):
        resolve_model("owner/name/other.gguf")
