"""Prompts as they are given: every one as it stands, in order, and nothing that is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from h2o_flexgen.text.given_texts import given_prompts


def test_texts_come_before_those_of_the_file_and_all_as_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("  with spaces \nb\u2028c\n\n", encoding="utf-8")
    assert given_prompts(["a\nb"], str(file)) == ["a\nb", "  with spaces ", "b\u2028c"]
    assert given_prompts(["a\nb"], str(file), num=2) == ["a\nb", "  with spaces "]


def test_json_lines_hold_a_prompt_each(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text, "id": 3}) for text in ("two\nlines", "ü")), encoding="utf-8")
    assert given_prompts(None, str(file)) == ["two\nlines", "ü"]


def test_nothing_given_is_nothing() -> None:
    assert given_prompts(None, None) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"one\n\nthree\n", "line 2 is empty"),
        ("a.txt", b"", "is empty; write a prompt per line"),
        (
            "a.md",
            b"one\n",
            "each of its lines would be a prompt; if they are, call it .txt, or for JSON .jsonl",
        ),
        ("a.txt", b"caf\xe9\n", "not UTF-8 text .byte 3"),
        ("a.jsonl", b'{"prompt": "a"}\n{"text": "b"}\n', "line 2 is no"),
        ("a.jsonl", b"[1, 2]\n", "line 1 is no"),
        ("a.jsonl", b'{"prompt": 3}\n', "line 1 is no"),
        ("a.jsonl", b'{"prompt": ""}\n', "line 1 is empty"),
        ("a.jsonl", b"no json\n", "line 1 is no"),
        ("a.jsonl", b"[" * 100_000, "line 1 is no"),
    ],
)
def test_a_file_that_holds_something_else_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        given_prompts(None, str(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.txt cannot be read \(No such file"):
        given_prompts(None, str(tmp_path / "none.txt"))
