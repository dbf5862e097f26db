"""What guesses bring is measured on texts that are the same with them and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.scripts.loading import load_script

drafts = load_script("drafts.py", "benchmarks")


@pytest.mark.slow
def test_both_ways_say_the_same_and_their_rates_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new"
    given = ["--model", "demo", "--rounds", "1", "--tokens", "12", "--threads", "1", "--output", str(out)]
    assert drafts.main(given) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((out / "drafts.json").read_text()) == document
    for kind, aim in drafts.AIMS.items():
        found = document[kind]
        assert found["aim"] == aim and len(found["gains"]) == 1 and found["tokens_per_pass"] >= 1
        assert 0 <= found["accepted"] <= found["proposed"]
        assert min(found["tokens_per_second_off"], found["tokens_per_second_ngram"]) > 0
    assert str(tmp_path) not in json.dumps(document)
