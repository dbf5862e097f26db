"""The benchmark of steps: systems in turns, lines of rows that were measured before, and the process that keeps a model open.

llama.cpp's program is stood in for by a script."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.baselines.llama_build import BENCH, QUANTIZE
from benchmarks.comparison.engine_process import EngineProcess, Way
from benchmarks.comparison.one_file import IN_MEMORY, OURS, THEIRS
from benchmarks.limits import Limits, PassLimit
from benchmarks.peaks import Peaks
from h2o_flexgen.formats.kernel_table import INT8
from tests.helpers.gguf_files import save_gguf
from tests.scripts.loading import load_script

steps = load_script("steps.py", "benchmarks")
readme_results = load_script("readme_results.py")
LIMITS = Limits(10e9, Peaks(fp32=100e9, integer=400e9, bf16=200e9, integer_of_4_bits=None))
LLAMA = """#!/bin/sh
echo "$@" >> {folder}/asked
echo '{{"pp": 8, "tg": 3, "t_pp": 0.5, "t_tg": 0.6}}'
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    save_gguf("llama-gqa", tmp_path / "tiny.gguf", "q4_1")
    for program in (BENCH, QUANTIZE):
        (tmp_path / program).write_text(LLAMA.format(folder=tmp_path))
        (tmp_path / program).chmod(0o755)
    monkeypatch.setattr(Limits, "measured", classmethod(lambda _: LIMITS))
    monkeypatch.setattr(PassLimit, "step_tokens_per_s", lambda self, rows, load: 100.0 * rows)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return ["--model", str(tmp_path / "tiny.gguf"), "--llama-cpp", str(tmp_path), "--load", "8+4", "--repeats", "2"]


def written(asked: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["steps.py", *asked, "--systems", THEIRS, "--output", str(folder), *more])
    assert steps.main() == 0
    (file,) = folder.iterdir()
    assert readme_results.read_result(file).kind == "steps"
    return dict(json.loads(file.read_text()))


def test_a_table_is_measured_in_pieces(asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(asked, tmp_path / "results", monkeypatch, "--rows", "1", "4")
    result = written(asked, tmp_path / "results", monkeypatch, "--rows", "2", "4")
    assert [line["rows"] for line in result["lines"]] == [1, 2, 4]
    assert sum("-npl" in line for line in (tmp_path / "asked").read_text().splitlines()) == 8
    first = dict(zip(result["columns"], result["cells"][0]))  # of equal names the last counts: the steps
    shown = ("prompts tokens/s", "steps tokens/s", "of limit", "times llama.cpp")
    assert [first[name] for name in shown] == ["16", "5", "5%", "1.00"]
    written([*asked, "--load", "8+5"], tmp_path / "results", monkeypatch, "--rows", "2")
    (file,) = (tmp_path / "results").iterdir()
    assert [line["rows"] for line in json.loads(file.read_text())["lines"]] == [2]


def test_systems_take_turns(asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer = steps.Answer({}, "", 0.0, 0.5, (0.2,) * 3, 1, 0.0)
    monkeypatch.setattr(steps, "OurRuns", lambda *_: steps.TheirRuns(*_))
    monkeypatch.setattr(steps.TheirRuns, "answer", lambda self, rows: answer)
    args = steps.parse([*asked, "--rows", "1", "--systems", THEIRS, f"{OURS}, int8"])
    (lines,) = steps.measured(args)
    told = [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()]
    assert told == [f"{THEIRS}, 1 rows", f"{OURS}, int8, 1 rows"] * 2
    assert [line["steps"] for line in lines] == pytest.approx([5.0, 5.0]) and len(lines[0]["runs"]) == 2


def test_a_process_keeps_the_model_open(asked: list[str]) -> None:
    options = {"percent": IN_MEMORY, "compute": INT8, "dtype": "float32"}
    with closing(EngineProcess(Way(asked[1], 4, 3, 1, options))) as process:
        runs = [process.took(rows) for rows in (1, 1, 2)]
    assert all(len(took.steps) == 2 and took.seconds > took.prefill > 0 and took.peak_bytes > 0 for took in runs)


def test_a_process_that_ends_is_no_answer(tmp_path: Path) -> None:
    with closing(EngineProcess(Way(str(tmp_path / "none.gguf"), 4, 3, 1, {}))) as process, pytest.raises(SystemExit):
        process.took(1)
