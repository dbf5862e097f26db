"""Where Ray is not installed, one line names the extra that brings it."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_flexgen.batch import main
from tests.helpers.commands import called
from tests.helpers.missing import hide, said_by

SAID = "Ray is not installed; it comes with the extra [ray]: pip install -e '.[ray]'"


@pytest.fixture(autouse=True)
def ray_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "ray", "h2o_flexgen.ray")


def test_one_line_names_the_extra() -> None:
    assert said_by("h2o_flexgen.ray") == SAID


def test_so_does_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("{}\n", encoding="utf-8")
    asked = called(main, capfd, "-i", file, "-o", tmp_path / "out.jsonl", "--ray", "local")
    assert asked.error == f"error: {SAID}" and len(asked.err) == 1
