"""The benchmark of checkpoints: what is asked of both systems, what counts, and what becomes of a system that fails.

llama.cpp's programs are stood in for by scripts, and answers about tokens per second are given."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.baselines.llama_build import BENCH, COMPLETION, QUANTIZE
from benchmarks.baselines.llama_cpp import System
from benchmarks.baselines.request import Answer, Request
from benchmarks.comparison.cap import NoCap
from benchmarks.comparison.launch import Failed, Launcher
from benchmarks.limits import Limits, PassLimit
from benchmarks.peaks import Peaks
from tests.helpers.gguf_files import save_gguf
from tests.scripts.loading import load_script

checkpoints = load_script("checkpoints.py", "benchmarks")
readme_results = load_script("readme_results.py")
ANSWER = Answer({"llama.cpp": "7"}, "in memory", 1.0, 0.5, (0.1, 0.3, 0.2), 10**9, 0.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_gguf("llama-gqa", tmp_path / "tiny.gguf", "q4_1")
    return tmp_path / "tiny.gguf"


@pytest.fixture
def asked(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for program in (COMPLETION, BENCH, QUANTIZE):
        (tmp_path / program).write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/{program}.asked\n')
        (tmp_path / program).chmod(0o755)
    limits = Limits(10e9, Peaks(fp32=100e9, integer=400e9, bf16=200e9, integer_of_4_bits=None))
    monkeypatch.setattr(Limits, "measured", classmethod(lambda _: limits))
    monkeypatch.setattr(PassLimit, "step_tokens_per_s", lambda self, rows, load: 100.0 * rows)
    monkeypatch.setattr(checkpoints, "open_cap", NoCap)
    return [str(file), "--llama-cpp", str(tmp_path), "--rows", "1", "4", "--load", "8+4", "--systems", "llama.cpp"]


def test_every_number_of_rows_is_a_line_that_a_document_takes(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Request] = []
    monkeypatch.setattr(Launcher, "run", lambda self, request, loads_within_cap: told.append(request) or ANSWER)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["checkpoints.py", *asked, "--repeats", "2", "--output", str(tmp_path / "results")])
    assert checkpoints.main() == 0
    assert [request.rows for request in told] == [1, 4, 1, 4] and {request.host_bytes for request in told} == {1 << 30}
    (written,) = (tmp_path / "results").iterdir()
    head, *rows = readme_results.read_result(written).cells
    first, second = (dict(zip(head, row)) for row in rows)
    assert (first["rows"], first["prompts tokens/s"], first["steps tokens/s"]) == ("1", "16", "5")
    assert (second["rows"], second["steps tokens/s"], second["without a model"]) == ("4", "20", "-")
    assert first["steps beside llama.cpp"] == "1.00" and first["steps of ceiling"] == "5%"
    lines = (tmp_path / f"{COMPLETION}.asked").read_text().splitlines()
    assert len(lines) == 6 and sum("-n 1" in line and str(asked[0]) in line for line in lines) == 4


def test_a_system_that_fails_is_left_out(asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fails(*_: object, **__: object) -> Answer:
        raise Failed("killed, most likely because it went beyond its memory")

    monkeypatch.setattr(Launcher, "run", fails)
    assert checkpoints.measured(checkpoints.parse([*asked, "--repeats", "1"])) == []
    assert "llama.cpp: killed, most likely" in capsys.readouterr().err


def test_the_engine_is_asked_for_one_token_of_the_same_file(asked: list[str]) -> None:
    args = checkpoints.parse(asked[:-2])
    ours = next(one for one in args.contenders if one.name == "h2o_flexgen, int8")
    command = checkpoints.first_token_command(args, ours)
    assert command[command.index("--model") + 1] == asked[0] and command[command.index("--gen-len") + 1] == "1"
    assert command[command.index("--compute") + 1] == "int8"


def test_a_command_that_fails_says_why(asked: list[str]) -> None:
    with pytest.raises(Failed, match="ended with status 3: no room"):
        checkpoints.seconds_of(checkpoints.parse(asked), ["sh", "-c", "echo no room >&2; exit 3"])


def test_llama_cpp_runs_a_file_that_is_given(file: Path, tmp_path: Path) -> None:
    line = json.dumps({"pp": 8, "tg": 3, "t_pp": 0.8, "t_tg": 0.3})
    for program in (BENCH, QUANTIZE):
        (tmp_path / program).write_text(f"#!/bin/sh\necho '{line}'\n")
        (tmp_path / program).chmod(0o755)
    options = {"folder": str(tmp_path)}
    request = Request("llama.cpp", str(file), "float16", "cpu", 1, 8, 4, None, None, None, str(tmp_path), options)
    assert System().missing(request) is None and System().missing(replace(request, options={"folder": "/nowhere"})) is not None
    System().prepare(request)
    answer = System().run(request, lambda: None)
    assert answer.prefill_seconds == 0.8 and "tiny.gguf" in answer.placement and not (tmp_path / "gguf").exists()
