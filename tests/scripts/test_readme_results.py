"""Results come into documents only with machine, command and ceiling, and only between the two marks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.loading import load_script

SCRIPT = load_script("readme_results.py")
(START, END), (SKETCH, SKETCHED) = SCRIPT.marks("results"), SCRIPT.marks("timeline")
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
    file.write_text(f"above\n{START}\nold figures\n{END}\nbetween\n{SKETCH}\nold picture\n{SKETCHED}\nbelow\n")
    return file


OVERLAP: dict[str, Any] = {
    "benchmark": "overlap",
    "machine": {"cpu": "a processor", "cores": 2, "torch": "2.13.0", "device": "cpu"},
    "command": "python benchmarks/overlap.py",
    "ceiling": "bytes over bandwidth",
    "model": "facebook/opt-1.3b",
    "workload": {
        "percent": [0.0, 0.0, 0.0, 100.0, 0.0, 100.0],
        "gpu_batch_size": 16,
        "num_gpu_batches": 4,
        "prompt_len": 64,
        "gen_len": 16,
        "dtype": "bfloat16",
    },
    "budget_host_bytes": 2_000_000_000,
    "schedules": {
        "zigzag": {
            "step_seconds": 1.25,
            "bound_seconds": 1.0,
            "predicted_step_seconds": 1.125,
            "peak_host_bytes": 1_900_000_000,
            "runs": [{"timeline": "|first|"}, {"timeline": "|W1.0--|"}],
        },
        "row_by_row": {"step_seconds": 4.0, "bound_seconds": 3.0, "predicted_step_seconds": None, "peak_host_bytes": 2e9},
    },
}


def run(readme: Path, *results: object, check: bool = False) -> int:
    folder = readme.parent / "results"
    folder.mkdir(exist_ok=True)
    for number, result in enumerate(results):
        (folder / f"{number}.json").write_text(json.dumps(result))
    return SCRIPT.main(["--documents", str(readme), "--results", str(folder), *["--check"] * check])


def test_only_the_part_between_the_marks_is_rewritten(readme: Path) -> None:
    assert run(readme, RESULT) == 0
    text = readme.read_text()
    assert text.startswith(f"above\n{START}\n") and f"{END}\nbetween\n{SKETCH}\nold picture\n{SKETCHED}\nbelow\n" in text
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


def test_predicted_figures_have_a_column_of_their_own(readme: Path) -> None:
    rows = [{**RESULT["rows"][0], "predicted": 1.125}, RESULT["rows"][1]]
    run(readme, {**RESULT, "rows": rows})
    text = readme.read_text()
    assert "predicted (seconds)" in text and "| 80% | 1.12 |" in text and "| 25% |  |" in text


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


def test_the_documents_of_the_project_are_what_their_results_say() -> None:
    assert SCRIPT.main(["--check"]) == 0


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


def test_what_the_overlap_benchmark_writes_is_a_table_and_a_picture(readme: Path) -> None:
    assert run(readme, OVERLAP) == 0
    text = readme.read_text()
    assert "| zigzag | 1.25 | 1.00 | 80% | 1.12 |" in text and "| row_by_row | 4.00 | 3.00 | 75% |  |" in text
    assert "a processor, 2 cores, torch 2.13.0" in text and "4 x 16 rows" in text and "`--percent 0 0 0 100 0 100`" in text
    assert "zigzag 1.90 GB, row_by_row 2.00 GB; the limit is 2.00 GB" in text
    assert f"{SKETCH}\n\n```\n|W1.0--|\n```\n" in text and "old picture" not in text


def test_steps_are_a_line_for_each_file_and_number_of_rows(readme: Path) -> None:
    readme.write_text(f"{readme.read_text()}{SCRIPT.marks('steps')[0]}\n{SCRIPT.marks('steps')[1]}\n")
    columns = [
        "rows",
        "system",
        *("prompts tokens/s", "of limit", "times llama.cpp", "steps tokens/s", "of limit", "times llama.cpp"),
    ]
    cells = [
        [rows, system, *"123", "40", "80%", times]
        for rows in ("1", "8")
        for system, times in (("llama.cpp", "1.0"), ("own", "2.0"))
    ]
    said = {"title": "a.gguf, steps by rows, 8+4 tokens (avx2, emulated)", "date": "today", "commit": "c"}
    measured = {**RESULT, **said, "benchmark": "steps", "columns": columns, "cells": cells}
    assert run(readme, measured, OVERLAP) == 0
    assert "| file and instructions | rows | llama.cpp | own |" in readme.read_text()
    assert "| a.gguf (avx2, emulated) | 8 | 40 (1.0 x, 80%) | 40 (2.0 x, 80%) |" in readme.read_text()


def test_mixtures_are_a_line_each_in_one_table_besides(readme: Path) -> None:
    readme.write_text(f"{readme.read_text()}{SCRIPT.marks('mixtures')[0]}\n{SCRIPT.marks('mixtures')[1]}\n")
    origin: dict[str, Any] = dict.fromkeys(("title", "machine", "command", "ceiling", "unit", "date", "commit"), "told")
    origin |= {"benchmark": "moe", "columns": ["system"], "cells": [["ours"]]}
    assert run(readme, *({**origin, "headline": {"model": name, "rows": "128"}} for name in ("one", "other"))) == 0
    assert "| model | rows |\n| --- | ---: |\n| one | 128 |\n| other | 128 |\n" in readme.read_text()
    before = readme.read_text()
    assert run(readme, {**origin, "headline": 5}) == 2 and readme.read_text() == before


def test_each_part_has_its_place_in_one_of_several_documents(tmp_path: Path) -> None:
    """Of the comparison the README has the columns that matter most, and the other document has all."""
    readme, tables, results = tmp_path / "README.md", tmp_path / "results.md", tmp_path / "results"
    readme.write_text("\n".join(mark for part in ("headline", "comparisons", "timeline") for mark in SCRIPT.marks(part)))
    tables.write_text("\n".join(SCRIPT.marks("results")))
    results.mkdir()
    head, row = ["system", "version", "tokens/s", "of ceiling"], ["this *", "0.1.0", "159", "55%"]
    origin = {**RESULT, "date": "2026-11-21", "commit": "abc"}
    compared = {**origin, "benchmark": "compare", "columns": head, "cells": [row], "notes": "With a star: few steps."}
    (results / "compare.json").write_text(json.dumps(compared))
    (results / "overlap.json").write_text(json.dumps(OVERLAP))
    arguments = ["--documents", str(readme), str(tables), "--results", str(results)]
    assert SCRIPT.main(arguments) == 0 and SCRIPT.main([*arguments, "--check"]) == 0
    assert "| this | 159 | 55% |" in readme.read_text() and "\n\nfew steps." in readme.read_text()
    assert "|W1.0--|" in readme.read_text() and "|W1.0--|" not in tables.read_text()
    assert "| this * | 0.1.0 | 159 | 55% |" in tables.read_text() and "few steps" in tables.read_text()


def test_a_headline_has_the_same_work_first_and_then_what_less_work_adds(tmp_path: Path) -> None:
    readme, results = tmp_path / "README.md", tmp_path / "results"
    readme.write_text("\n".join(mark for part in ("headline", "comparisons", "results") for mark in SCRIPT.marks(part)))
    results.mkdir()
    cells = [
        ["ours *", "4 bits", "80", "55%"],
        ["16 bits *", SCRIPT.EXACTLY, "20", "9%"],
        ["accelerate *", SCRIPT.EXACTLY, "5", "4%"],
    ]
    origin = {**RESULT, "date": "2026-11-21", "commit": "abc", "columns": ["system", "computes", "tokens/s", "of ceiling"]}
    notes = "With a star: few steps. flexgen: skipped, it wants a GPU. deepspeed, 3 rows: killed"
    (results / "compare.json").write_text(json.dumps({**origin, "benchmark": "compare", "cells": cells, "notes": notes}))
    assert SCRIPT.main(["--documents", str(readme), "--results", str(results)]) == 0
    text = readme.read_text().partition("headline: end")[0]
    same, less = text.split("With less work")
    assert "| 16 bits | exactly, in 16 bits | 20 | 9% | 4.0 |" in same and "| accelerate |" in same and "ours" not in same
    assert "| ours | 4 bits | 80 | 55% | 16.0 |" in less and "times accelerate" in less
    assert "\n\nfew steps." in less and "skipped" not in less and "killed" not in less


def test_all_comparisons_are_one_table_with_the_same_work_first(readme: Path) -> None:
    """A system that one comparison lacks has an empty cell there; a comparison without the base has no factors."""
    readme.write_text("\n".join((readme.read_text(), *SCRIPT.marks("headline"), *SCRIPT.marks("comparisons"))))
    head = ["system", "version", "computes", "tokens/s"]
    peer, ours = ["accelerate *", "1.15", SCRIPT.EXACTLY, "5"], ["h2o_flexgen *", "0.1", "4 bits", "80"]
    exact = ["16 bits *", "0.1", SCRIPT.EXACTLY, "20"]
    origin = {**RESULT, "date": "2026-11-21", "commit": "abc", "benchmark": "compare", "columns": head}
    small = {**origin, "title": "opt-1.3b shapes, 64+256 tokens, in 1.5 GiB", "cells": [ours, exact, peer]}
    large = {**origin, "title": "opt-6.7b shapes, 64+256 tokens, in 4 GiB", "cells": [ours]}
    assert run(readme, small, large) == 0
    table = readme.read_text().partition(SCRIPT.marks("comparisons")[0])[2].strip().splitlines()
    small_head, large_head = (f"{title}: tokens/s | times accelerate" for title in ("opt-1.3b in 1.5 GiB", "opt-6.7b in 4 GiB"))
    assert table[:5] == [
        f"| system | computes | {small_head} | {large_head} |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        f"| h2o_flexgen, 16 bits | {SCRIPT.EXACTLY} | 20 | 4.0 |  |  |",
        f"| accelerate | {SCRIPT.EXACTLY} | 5 | 1.0 |  |  |",
        "| h2o_flexgen | 4 bits | 80 | 16.0 | 80 |  |",
    ]


@pytest.mark.parametrize("key", ["machine", "command", "ceiling", "model", "workload", "schedules"])
def test_an_overlap_result_without_its_origin_is_refused(readme: Path, key: str) -> None:
    before = readme.read_text()
    assert run(readme, {name: value for name, value in OVERLAP.items() if name != key}) == 2
    assert readme.read_text() == before
