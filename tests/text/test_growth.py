"""Rules of a tokenizer that would make a text fill all memory are refused before the library reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from h2o_flexgen.text.load_tokenizer import load_tokenizer, refuse_growth
from tests.helpers.refusals import one_line


def replacing(content: str, **pattern: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def folder_of(tmp_path: Path, part: str, *rules: object) -> Path:
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    sequence = {"type": "Sequence", {"decoder": "decoders"}.get(part, f"{part}s"): rules}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": [], part: sequence}))
    return tmp_path


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
@pytest.mark.parametrize("pattern", [{"String": "a"}, {"Regex": "a"}, {"Regex": "a*"}])
def test_a_few_rules_that_multiply_a_text_are_refused(tmp_path: Path, part: str, pattern: dict[str, str]) -> None:
    folder = folder_of(tmp_path, part, *[replacing("a" * 40, **pattern)] * 6)
    said = one_line(lambda: load_tokenizer(folder, None, 10))
    assert said.startswith(f"{folder / 'tokenizer.json'}: the 6 rules of its {part} may make a text ")
    assert "256 is the most" in said


def test_rules_in_a_sequence_of_a_sequence_count_too(tmp_path: Path) -> None:
    inner = {"type": "Sequence", "normalizers": [replacing("a" * 40, String="a")] * 6}
    folder = folder_of(tmp_path, "normalizer", inner)
    assert "the 6 rules of its normalizer" in one_line(lambda: refuse_growth(folder))


def test_rules_as_tokenizers_have_them_are_taken(tmp_path: Path) -> None:
    usual = [replacing("▁", String=" "), replacing(" ", Regex=" {2,}"), replacing("", Regex="^a|b$"), {"type": "NFKC"}]
    refuse_growth(folder_of(tmp_path, "normalizer", *usual, *[replacing(" ", Regex="[ x]+")] * 20))
    refuse_growth(folder_of(tmp_path, "normalizer", replacing("a" * 256, String="a")))
    (tmp_path / "tokenizer.json").unlink()
    refuse_growth(tmp_path)
