"""Benchmarks of data wrangling: FlexGen's table, as published and as priced, and the measurement of what is shared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import data_wrangling as measured
from benchmarks import published_data_wrangling as published
from benchmarks.published import MACHINE
from h2o_flexgen.planning.machine import Machine
from tests.scripts.loading import PROJECT

RESULTS = json.loads((PROJECT / "benchmarks" / "results" / "published-data-wrangling.json").read_text(encoding="utf-8"))
ROWS = list(published.rows())


def test_the_published_figures_count_whole_blocks_of_padded_tokens() -> None:
    """What FlexGen counts can be read off its columns: seconds times tokens per second. One row counts another's prompts."""
    others = {}
    for row in ROWS:
        _, seconds, figure = published.FIGURES[row.model][row.name]
        counted = published.blocks_of(row) * published.counted(row)
        if seconds * figure != pytest.approx(counted, rel=2e-3):
            others[row.model, row.name] = round(seconds * figure / published.SHAPES[row.name][0])
    prompt, answer = published.SHAPES["DBLP-ACM"][1:]
    assert others == {("opt-6.7b", "DBLP-GoogleScholar"): prompt + answer}


def test_prices_are_within_the_tolerance_or_it_is_said_how_far_off() -> None:
    kept = RESULTS["rows"]
    assert [(one["model"], one["data_set"], one["published"]) for one in kept] == [
        (row.model, row.name, row.tokens_per_second) for row in ROWS
    ]
    for row, one in zip(ROWS, kept):
        low, high = row.band
        assert low <= one["ratio"] <= high and one["missed"] == (row.outside[1] if row.outside else "")
    assert sum(bool(one["missed"]) for one in kept) == 6 and RESULTS["title"].startswith("PROJECTED")
    assert RESULTS["cells"] == [published.cells_of(one) for one in kept] and RESULTS["notes"] == published.notes_of(kept)


def test_a_row_is_priced_as_it_was_kept_and_sharing_pays() -> None:
    machine = Machine.load(MACHINE)
    row, one = next((row, one) for row, one in zip(ROWS, RESULTS["rows"]) if row.name == "Restaurant")
    assert published.as_published(row, machine) == pytest.approx(one["priced"], rel=0.05)
    few = replace(row, batches=(8, 1))
    apart, shared = (published.in_this_engine(few, machine, shares) for shares in (False, True))
    assert shared > 1.5 * apart


def test_both_ways_are_run_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """The application is stood in for: what is measured is another test's."""

    def run(args: object, folder: Path, way: str, turn: int) -> dict[str, object]:
        assert (folder / "entity_matching" / "structured" / "Amazon-Google" / "test.csv").is_file()
        seconds = (4.0 if way == measured.APART else 0.5) * (1 + turn)
        of_way = {"computed_tokens": 3500 if way == measured.APART else 700, "seconds": seconds}
        common = {"rows": 4, "prompt_tokens": 3492, "longest_prompt": 880, "flexgen_tokens_per_second": 3532 / seconds}
        return {"way": way, "machine": "none", "answers": ["No"], **common, **of_way, "rows_per_second": 4 / seconds}

    monkeypatch.setattr(measured, "run", run)
    output = tmp_path / "result.json"
    assert measured.main(["--rows", "4", "--repeats", "3", "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert (result["times"], result["saved_times"], result["same_answers"]) == (8.0, 5.0, True)
    assert [row["measured"] for row in result["rows"]] == [0.5, 4.0] and result["lines"][1]["rates"] == [8.0, 4.0, 8 / 3]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result


def test_what_is_kept_names_no_place_of_a_machine() -> None:
    for file in (PROJECT / "benchmarks" / "results").glob("*data-wrangling*.json"):
        result = json.loads(file.read_text(encoding="utf-8"))
        assert result["machine"] and result["command"].startswith("python benchmarks/") and "/tmp" not in file.read_text()
