"""The benchmark of rows that are held to a schema: it has steps of both kinds, and masks for one."""

from __future__ import annotations

import json

import pytest

from tests.scripts.loading import load_script

pytest.importorskip("llguidance", reason="needs the extra [grammar]")
held = load_script("held.py", "benchmarks")


def test_it_tells_of_steps_with_and_without(capsys: pytest.CaptureFixture[str]) -> None:
    assert held.main(["--model", "demo", "--rows", "3", "--tokens", "5", "--rounds", "1", "--threads", "1"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["ms_of_a_step"] > 0 and found["ms_of_a_held_step"] > 0 and found["us_to_make_a_mask"] > 0
    assert found["steps"] == 4 and found["rows"] == 3 and 0 < found["masks_of_a_token"] <= 5 / 4
