"""The examples run as they stand, offline, and show what their first line says."""

from __future__ import annotations

import ast
from pathlib import Path
from runpy import run_path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples"
SHOWN = {
    "batch": "read from disk: ",
    "keep_less": "h2o, ",
    "score": "group4 ",
    "stream": "row 1, token",
    "talk": " tokens were said, 40 are held",
}
LONGEST = 40


def test_every_example_is_run_here() -> None:
    assert sorted(file.stem for file in FOLDER.glob("*.py")) == sorted(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_is_short_and_shows_what_it_is_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = FOLDER / f"{name}.py"
    source = file.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= LONGEST and ast.get_docstring(ast.parse(source))
    run_path(str(file), run_name="__main__")
    assert SHOWN[name] in capsys.readouterr().out
