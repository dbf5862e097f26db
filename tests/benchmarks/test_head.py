"""The benchmark of the head: every case has its line, and what rows ask for is done in it."""

from __future__ import annotations

import json

import pytest

from tests.scripts.loading import load_script

head = load_script("head.py", "benchmarks")


@pytest.mark.parametrize("seated", [[], ["--seated"]])
def test_every_case_has_a_line_of_each_number_of_rows(
    seated: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "STEPS", 8)
    monkeypatch.setattr(head, "opened_tokenizer", lambda vocab: head.load_tokenizer(None, None, vocab, head.BYTES))
    assert head.main(["--rows", "1", "3", "--vocab", "400", *seated]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)["cells"]
    assert len(table) == 2 + len(found) and len(found) == 2 * len(head.CASES)
    assert all(one["step"] > 0 and one["seated"] == bool(seated) for one in found)
    assert all(one["parts"][part] > 0 for one in found for part in ("last hidden", "pick", "push", "next"))
