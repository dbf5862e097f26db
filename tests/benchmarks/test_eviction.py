"""The benchmark of eviction: one run on a tiny model, and what is made of many."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from h2o_flexgen.planning.workload_plan import largest
from h2o_flexgen.profiling.measure import measure, memory_read_rate
from tests.helpers.tiny import tiny_config
from tests.scripts.loading import load_script

eviction = load_script("eviction.py", "benchmarks")
read_result = load_script("readme_results.py").read_result


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shapes")
    tiny_config("llama-gqa").save_pretrained(folder)
    return str(folder)


def asked(model: str, offload: Path, *flags: str) -> Any:
    given = ["--model", model, "--offload-dir", str(offload), "--prompt-len", "20", "--gen-len", "12", "--dtype", "float32"]
    return eviction.parse([*given, "--gpu-batch-size", "2", *flags])


def test_a_run_generates_all_that_was_asked_and_keeps_what_it_should(
    model: str, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is measured for a moment, as what is found is no matter here."""
    monkeypatch.setattr(eviction, "measure", lambda device, needs, **_: measure(device, needs, seconds=0.01))
    monkeypatch.setattr(eviction, "memory_read_rate", partial(memory_read_rate, 1 << 20))
    run = eviction.run_one(asked(model, offload, "--budgets", "0.5", "--one", "1", "--equal-rows", "3"))
    assert (run["kept"], run["rows"]) == (0.5, 3)
    assert run["tokens_per_second"] == pytest.approx(3 * 12 / (run["prefill_seconds"] + run["decode_seconds"]))
    assert run["bound_seconds"] > 0 and run["share_of_ceiling"] == pytest.approx(run["bound_seconds"] / run["step_seconds"])
    assert run["busiest_lane"] in ("read", "compute", "memory")


def test_more_rows_fit_when_less_is_kept(model: str, offload: Path) -> None:
    """By the planner's own footprint: nothing is loaded. What this process holds already is not to be had."""
    memory = f"{psutil.Process().memory_info().rss / 1e6 + 300:.0f}MB"
    rows = {}
    for one in ("0", "1"):
        args = asked(model, offload, "--budgets", "0.2", "--one", one, "--prompt-len", "100", "--cpu-mem", memory)
        with eviction.opened(args) as llm:
            rows[one] = largest(partial(eviction.fits, llm, args), 4096)
    assert rows["1"] >= rows["0"] > 0


def one_run(place: int, variant: Any) -> Mapping[str, Any]:
    share = variant.kept
    rows = round(8 / share)
    return {
        "kept": share, "rows": rows, "prefill_seconds": 1.0, "decode_seconds": 9.0, "step_seconds": 0.9 * share,
        "bound_seconds": 0.8 * share, "busiest_lane": "read", "share_of_ceiling": 0.8 / 0.9, "tokens_per_second": rows * 1.0,
        "decode_tokens_per_second": rows * 1.1, "peak_host_bytes": 3e9, "disk_gb_per_s": 2.5, "machine": "a machine",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "unit", "measured"),
    [((), "tokens/s in decode", [8.8, 17.6, 44]), (("--equal-rows", "8"), "seconds per decode step", [0.9, 0.45, 0.18])],
)
def test_what_is_reported_are_ratios_to_full_and_a_table_for_the_readme(
    flags: tuple[str, ...],
    unit: str,
    measured: list[float],
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "eviction.json"
    argv = ["eviction.py", "--model", model, "--budgets", "0.5", "0.2", "--output", str(output), *flags]
    monkeypatch.setattr("sys.argv", argv)
    with patch.object(eviction, "run_in_process", one_run):
        assert eviction.main() == 0
    shown = capsys.readouterr().out
    result = eviction.json.loads(output.read_text())
    assert [line["times_full"] for line in result["lines"]] == [1, 2, 5]
    assert eviction.json.loads(shown.splitlines()[-1]) == result
    assert [row["name"] for row in result["rows"]] == ["full", "h2o 50%", "h2o 20%"]
    assert result["unit"] == unit and [row["measured"] for row in result["rows"]] == pytest.approx(measured)


def test_there_is_a_line_for_each_policy_and_kind_of_heads_at_each_budget() -> None:
    words = ["--budgets", "1", "0.5", "0.2", "--policies", "h2o", "kvzip", "--head-budgets", "equal", "own", "some/heads.json"]
    names = [variant.name for variant in eviction.variants(eviction.parse(words))]
    kinds = ("", ", own head budgets", ", head budgets heads.json")
    assert names == [
        "full",
        *(f"{policy} {kept}{kind}" for kept in ("50%", "20%") for policy in ("h2o", "kvzip") for kind in kinds),
    ]


def cell(policy: str, kept: str, right: float, **others: object) -> dict[str, object]:
    figures = [
        {"name": "accuracy", "panel": "visible questions", "value": 0.25, "error": 0.0, "by": "task", "at": "copy"},
        {"name": "accuracy", "panel": "visible questions", "value": right, "error": 0.05},
        {"name": "accuracy", "panel": "hidden questions", "value": right / 2, "error": 0.07},
    ]
    same = {"kv_codec": "plain", "weight_codec": "plain", "compute": "exact", "head_budgets": None, "probe": None}
    return {"policy": policy, "kept": kept, **same, "options": {"kv_budget": 0.2}, "figures": figures, **others}


def results_of(model: str, file: Path, weights: str | None = None, questions: str = "these") -> Path:
    """Results as `evaluate` writes them, of the model's own weights unless others are named."""
    with eviction.LLM(model, dummy_weights=True, dtype="float32") as llm:
        identity = eviction.model_identity(llm)
    cells = [
        cell("full", "100 %", 0.8),
        cell("h2o", "20 %", 0.6),
        cell("h2o", "50 %", 0.1, kv_codec="group4"),
        cell("h2o", "50 %", 0.2, options={"kv_budget": 0.5, "sinks": 4}),
        cell("h2o", "50 %", 0.3, head_budgets={"checksum": "other"}),
        cell("h2o", "50 %", 0.4, probe={"checksum": "other"}),
    ]
    command = ["python", "-m", "h2o_flexgen.evaluate", "--output", str(file.parent)]
    identity = identity if weights is None else {**identity, "weights": weights}
    document = {
        "command": command,
        "identity": identity,
        "tasks": {"recall": {"asked": {"examples": questions}, "cells": cells}},
    }
    file.write_text(eviction.json.dumps(document))
    return file


def run_with(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["eviction.py", *words])
    with patch.object(eviction, "run_in_process", one_run):
        assert eviction.main() == 0


def test_recall_stands_beside_speed_where_it_was_measured_under_the_same_setting(
    model: str, offload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quality, output = results_of(model, tmp_path / "results.json"), tmp_path / "eviction.json"
    asked = ("--model", model, "--dtype", "float32", "--offload-dir", str(offload), "--budgets", "0.5", "0.2")
    run_with(monkeypatch, *asked, "--quality", str(quality), "--output", str(output))
    result = read_result(output)
    assert result.cells[0] == (
        "",
        "rows",
        "tokens/s",
        "decode tokens/s",
        "decode of ceiling",
        "recall visible",
        "recall hidden",
    )
    assert result.cells[1:] == (
        ("full", "8", "8", "9", "89%", "0.80 ± 0.05", "0.40 ± 0.07"),
        ("h2o 50%", "16", "16", "18", "89%", "-", "-"),
        ("h2o 20%", "40", "40", "44", "89%", "0.60 ± 0.05", "0.30 ± 0.07"),
    )
    assert str(tmp_path) not in output.read_text() and "0.60 ± 0.05" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("weights", "text", "said"), [("others", None, "with weights others"), (None, "{}", "no results of recall")]
)
def test_quality_that_says_nothing_about_this_model_is_refused_before_anything_runs(
    weights: str | None, text: str | None, said: str, model: str, offload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quality = results_of(model, tmp_path / "results.json", weights)
    if text is not None:
        quality.write_text(text)
    with pytest.raises(SystemExit, match=f"^error: {quality} .*{said}.*"):
        run_with(monkeypatch, "--model", model, "--dtype", "float32", "--offload-dir", str(offload), "--quality", str(quality))


def test_results_of_other_questions_do_not_stand_in_one_table(model: str, tmp_path: Path) -> None:
    with eviction.LLM(model, dummy_weights=True, dtype="float32") as llm:
        identity = eviction.model_identity(llm)
    files = [results_of(model, tmp_path / f"{questions}.json", questions=questions) for questions in ("these", "those")]
    one, both = (eviction.Recalled.of(those, identity) for those in (files[:1], [files[0], files[0]]))
    assert one.cells == both.cells and both.command == f"{one.command}; {one.command}"
    with pytest.raises(ValueError, match="are about different questions"):
        eviction.Recalled.of(files, identity)
