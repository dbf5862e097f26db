"""Results come into the README only with machine, command and ceiling, and only between the two marks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.loading import load_script

SCRIPT = load_script("readme_results.py")
RESULT: dict[str, Any] = {
    "title": "one decode step",
    "machine": "a laptop",
    "command": "python benchmarks/overlap.py",
    "ceiling": "bytes over bandwidth",
    "unit": "seconds",
    "rows": [{"name": "zigzag", "measured": 1.25, "ceiling": 1.0}, {"name": "row_by_row", "measured": 4.0, "ceiling": 1.0}],
}


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    file = tmp_path / "README.md"
    file.write_text(f"above\n{SCRIPT.START}\nold figures\n{SCRIPT.END}\nbelow\n")
    return file


def run(readme: Path, *results: object, check: bool = False) -> int:
    folder = readme.parent / "results"
    folder.mkdir(exist_ok=True)
    for number, result in enumerate(results):
        (folder / f"{number}.json").write_text(json.dumps(result))
    return SCRIPT.main(["--readme", str(readme), "--results", str(folder), *["--check"] * check])


def test_only_the_part_between_the_marks_is_rewritten(readme: Path) -> None:
    assert run(readme, RESULT) == 0
    text = readme.read_text()
    assert text.startswith(f"above\n{SCRIPT.START}\n") and text.endswith(f"{SCRIPT.END}\nbelow\n")
    assert "old figures" not in text


def test_a_figure_stands_beside_its_ceiling_its_machine_and_its_command(readme: Path) -> None:
    run(readme, RESULT)
    text = readme.read_text()
    assert "| zigzag | 1.25 | 1.00 | 80% |" in text and "| row_by_row | 4.00 | 1.00 | 25% |" in text
    assert "a laptop" in text and "`python benchmarks/overlap.py`" in text and "bytes over bandwidth" in text


def test_where_more_is_better_the_share_is_turned_round(readme: Path) -> None:
    rows = [{"name": "zigzag", "measured": 3000, "ceiling": 4000}]
    run(readme, {**RESULT, "unit": "tokens/s", "higher_is_better": True, "rows": rows})
    assert "| zigzag | 3,000 | 4,000 | 75% |" in readme.read_text()


def test_simulated_figures_have_a_column_of_their_own(readme: Path) -> None:
    rows = [{**RESULT["rows"][0], "simulated": 1.125}, RESULT["rows"][1]]
    run(readme, {**RESULT, "rows": rows})
    text = readme.read_text()
    assert "simulated (seconds)" in text and "| 80% | 1.12 |" in text and "| 25% |  |" in text


@pytest.mark.parametrize("key", ["title", "machine", "command", "ceiling", "unit", "rows"])
def test_a_result_without_its_origin_is_refused_and_nothing_is_written(
    readme: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = readme.read_text()
    assert run(readme, {name: value for name, value in RESULT.items() if name != key}) == 2
    said = capsys.readouterr().err
    assert key in said and "0.json" in said and said.count("\n") == 1
    assert readme.read_text() == before


@pytest.mark.parametrize(
    "row", [{"name": "a", "measured": 1.0}, {"name": "a", "ceiling": 1.0, "measured": "fast"}, {"measured": 1, "ceiling": 1}, 7]
)
def test_a_row_without_name_measurement_or_ceiling_is_refused(readme: Path, row: object) -> None:
    assert run(readme, {**RESULT, "rows": [row]}) == 2


def test_check_tells_a_readme_that_is_behind_from_one_that_is_not(readme: Path) -> None:
    before = readme.read_text()
    assert run(readme, RESULT, check=True) == 1
    assert readme.read_text() == before
    run(readme, RESULT)
    assert run(readme, RESULT, check=True) == 0


def test_a_readme_without_marks_is_refused(readme: Path) -> None:
    readme.write_text("no place here")
    assert run(readme, RESULT) == 2
    assert readme.read_text() == "no place here"
