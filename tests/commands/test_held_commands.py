"""Commands of which the texts are held to something: a file with a schema, and lines of a job that say it each."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen import batch, chat, run
from tests.commands.test_batch import choice, records, write
from tests.helpers.commands import Result, called
from tests.helpers.random_schemas import validated

pytest.importorskip("llguidance", reason="needs the extra [grammar]")

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["ship", "house"]}, "rooms": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["kind", "rooms"],
    "additionalProperties": False,
}
PLAN = ("--dtype", "float32", "--device", "cpu", "--percent", "0", "100", "0", "100", "0", "100")
MISSING = "error: llguidance, which holds texts to a grammar, is not installed; it comes with the extra [grammar]: "
Command = Callable[..., Result]


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    return file


def command_of(door: Any, capfd: pytest.CaptureFixture[str], offload: Path) -> Command:
    return partial(called, door.main, capfd, "--model", "demo", *PLAN, "--offload-dir", offload)


@pytest.fixture
def batch_command(capfd: pytest.CaptureFixture[str], offload: Path) -> Command:
    return partial(command_of(batch, capfd, offload), "--gpu-batch-size", "2", "--num-gpu-batches", "2", "--verbose", "0")


def test_run_holds_its_texts_to_a_file(capfd: pytest.CaptureFixture[str], offload: Path, schema: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    asked = (
        "--prompt",
        "Once",
        "--prompt",
        "The",
        "--gen-len",
        "60",
        "--temperature",
        "1",
        "--seed",
        "1",
        "--output",
        out,
        "--no-log",
    )
    assert command_of(run, capfd, offload)("--json-schema", schema, *asked).status == 0
    texts = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert len(texts) == 2 and all(validated(SCHEMA, text) for text in texts)


def test_replies_of_a_chat_are_held_to_it(
    capfd: pytest.CaptureFixture[str], offload: Path, schema: Path, tmp_path: Path
) -> None:
    turns = tmp_path / "turns.txt"
    turns.write_text("What do you see?\nAnd then?\n")
    told = command_of(chat, capfd, offload)("--json-schema", schema, "--input", turns, "--gen-len", "60")
    assert told.status == 0
    replies = told.json["turns"]
    assert len(replies) == 2 and all(validated(SCHEMA, turn["reply"]) for turn in replies)


def requests() -> list[dict[str, Any]]:
    return [
        {"custom_id": "by the command", "prompt": "Once", "temperature": 1},
        {"custom_id": "choice", "prompt": "The", "structured_outputs": {"choice": ["yes", "no"]}, "n": 2},
        {"custom_id": "openai", "messages": [{"role": "user", "content": "x"}], "response_format": of_openai({"enum": [5, 7]})},
        {"custom_id": "free", "prompt": "It was", "response_format": {"type": "text"}, "max_tokens": 3},
        {"custom_id": "wrong", "prompt": "It was", "structured_outputs": {"json": {"uniqueItems": True}}},
        {"custom_id": "short", "prompt": "Once", "max_tokens": 3},
    ]


def of_openai(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def hold(found: dict[str, Any]) -> None:
    assert validated(SCHEMA, choice(found["by the command"])["text"])
    both = [one["text"] for one in found["choice"]["response"]["body"]["choices"]]
    assert len(both) == 2 and {*both} <= {"yes", "no"} and choice(found["openai"])["message"]["content"] in ("5", "7")
    assert choice(found["free"])["finish_reason"] == choice(found["short"])["finish_reason"] == "length"
    assert 'keywords that are not supported: "uniqueItems"' in found["wrong"]["error"]["message"]


def test_lines_of_a_job_are_held_to_what_they_say_or_else_to_the_file(
    batch_command: Command, schema: Path, tmp_path: Path
) -> None:
    out, file = tmp_path / "out.jsonl", write(tmp_path / "in.jsonl", requests())
    asked = ("-i", file, "-o", out, "--json-schema", schema, "--gen-len", "60", "--seed", "3")
    assert batch_command(*asked).status == 1, "there is an error"
    first = records(out)
    hold(first)
    half = out.read_bytes().splitlines(keepends=True)[:2]
    out.write_bytes(b"".join(half))
    assert batch_command(*asked, "--resume").status == 1
    assert records(out) == first, "a job that goes on says the same"
    schema.write_text('{"enum": [1]}')
    told = batch_command(*asked, "--resume")
    assert "structured_outputs was " in told.error


def test_a_line_that_is_no_request_is_named_before_anything_is_read(batch_command: Command, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", [{"prompt": "x", "structured_outputs": {"regex": ""}}])
    told = batch_command("-i", file, "-o", tmp_path / "out.jsonl")
    assert "structured_outputs.regex is ''; allowed is a text that is not empty" in told.error
    assert not (tmp_path / "out.jsonl").exists()


def test_a_file_that_is_no_schema_is_one_line(capfd: pytest.CaptureFixture[str], offload: Path, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"uniqueItems": true}')
    for given, said in ((file, "has keywords that are not supported"), (tmp_path / "none", "cannot be read (No such file")):
        told = command_of(run, capfd, offload)("--json-schema", given, "--prompt", "x", "--gen-len", "3")
        assert said in told.error and told.out == []


def test_a_missing_extra_is_one_line(
    capfd: pytest.CaptureFixture[str], offload: Path, schema: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    turns = write(tmp_path / "turns.txt", ["x"])
    for door, flags in ((run, ("--prompt", "x", "--no-log")), (chat, ("--input", turns))):
        told = command_of(door, capfd, offload)("--json-schema", schema, "--gen-len", "5", *flags)
        assert told.error.startswith(MISSING)
