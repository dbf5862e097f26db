"""Turns in files: read in order, refused by the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_flexgen.cli.chat_request import GOES_ON, parse, request_of, turns_in


def test_a_line_is_a_turn_and_a_json_line_one_or_several(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello\n/reset\nwhat now?\n\n")
    assert turns_in(str(tmp_path / "a.txt")) == ["hello", "/reset", "what now?"]
    (tmp_path / "a.jsonl").write_text('{"prompt": "hello"}\n{"turns": ["one", "two"], "category": "x"}\n')
    assert turns_in(str(tmp_path / "a.jsonl")) == ["hello", "one", "two"]
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^input .*a.json is called .json, .*; give a turn per line, as a text"):
        turns_in(str(tmp_path / "a.json"))
    with pytest.raises(ValueError, match=r"^input .*a.log is called .log, and each of its lines would be a turn; if "):
        turns_in(str(tmp_path / "a.log"))


@pytest.mark.parametrize(
    "line", ["no json", "[" * 100_000, '{"text": "hello"}', '{"turns": "hello"}', '{"prompt": ""}', '{"turns": [1]}', "7", ""]
)
def test_a_line_that_is_no_turn_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "hello"}}\n{line}\n{{"prompt": "x"}}\n')
    with pytest.raises(ValueError, match=r"a.jsonl, line 2 is neither .*; mend or remove it"):
        turns_in(str(tmp_path / "a.jsonl"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"input .*none.jsonl cannot be read"):
        turns_in(str(tmp_path / "none.jsonl"))


def test_without_a_model_it_is_said_that_the_one_of_the_package_only_goes_on() -> None:
    assert request_of(parse([])).notes == (GOES_ON,)
    assert request_of(parse(["--model", "demo"])).notes == ()
