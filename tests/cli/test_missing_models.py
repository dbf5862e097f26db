"""Models and adapters that are not there are refused before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from h2o_flexgen import run

NO_FOLDER = "neither an existing folder nor a name on the hub; give a local folder or .gguf file, or dummy weights"
CODE = """import sys
from importlib import import_module
status = import_module("h2o_flexgen." + sys.argv[1]).main(sys.argv[2:])
print(status, "torch" in sys.modules)"""
REQUEST = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hello", "max_tokens": 1}}\n'
COMMANDS = {
    "run": (),
    "chat": (),
    "serve": (),
    "plan": (),
    "evaluate": (),
    "calibrate": ("--output", "heads.json"),
    "batch": ("-i", "requests.jsonl", "-o", "answers.jsonl"),
}


def refusal(command: str, *flags: str, folder: Path) -> str:
    """What a command says, once it is clear that it has failed without torch."""
    (folder / "requests.jsonl").write_text(REQUEST, encoding="utf-8")
    words = (sys.executable, "-c", CODE, command, *COMMANDS[command], *flags)
    ended = subprocess.run(words, capture_output=True, text=True, check=True, cwd=folder)
    assert ended.stdout == "2 False\n", ended.stderr
    return ended.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_file_is_refused_without_torch(command: str, tmp_path: Path) -> None:
    said = refusal(command, "--model", "/none.gguf", folder=tmp_path)
    assert said == "error: /none.gguf is missing; give a file that is there\n"


@pytest.mark.parametrize("flags", [("run",), ("run", "--dummy-weights"), ("plan",)])
def test_a_missing_folder_is_refused_without_torch(flags: tuple[str, ...], tmp_path: Path) -> None:
    assert refusal(*flags, "--model", "/none", folder=tmp_path).startswith(f"error: model '/none' is {NO_FOLDER}")


def test_a_name_that_looks_like_a_known_one_is_named_where_shapes_are_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hint = "; did you mean facebook/opt-30b or facebook/opt-350m?\n"
    assert refusal("plan", "--model", "/none/opt-30", folder=tmp_path).endswith(hint)
    assert run.main(["--model", "/none/opt-30"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_a_file_of_another_kind_is_refused_without_torch(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(b"weights")
    said = refusal("run", "--model", str(file), folder=tmp_path)
    assert said == f"error: model '{file}' is a file; give a folder with weights and their config, or a .gguf file\n"
    (tmp_path / "config.json").touch()
    said = refusal("run", "--model", str(file), folder=tmp_path)
    assert said == f"error: model '{file}' is a file; give the folder that it lies in, or a .gguf file\n"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--adapter", "/none"), "adapter /none does not exist; give the folder that PEFT has saved, or a GGUF file"),
        (("--adapter", "/none=much"), "adapter '/none=much' has the weight 'much'; give PATH, or PATH=WEIGHT with a number"),
        (("--lora", "x=/none"), "adapter /none does not exist; give the folder that PEFT has saved, or a GGUF file"),
    ],
)
def test_a_missing_adapter_is_refused_without_torch(flags: tuple[str, ...], said: str, tmp_path: Path) -> None:
    assert refusal("run", "--model", "demo", *flags, folder=tmp_path) == f"error: {said}\n"
