"""The benchmark of eviction: one run on a tiny model, and what is made of many."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from h2o_flexgen.core.fit import largest
from tests.scripts.loading import load_script
from tests.tiny import tiny_config

eviction = load_script("eviction.py", "benchmarks")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shapes")
    tiny_config("llama-gqa").save_pretrained(folder)
    return str(folder)


def asked(model: str, offload: Path, *flags: str) -> Any:
    given = ["--model", model, "--offload-dir", str(offload), "--prompt-len", "20", "--gen-len", "12", "--dtype", "float32"]
    return eviction.parse([*given, "--gpu-batch-size", "2", *flags])


def test_a_run_generates_all_that_was_asked_and_keeps_what_it_should(model: str, offload: Path) -> None:
    run = eviction.run_one(asked(model, offload, "--one", "0.5", "--equal-rows", "3"))
    assert (run["kept"], run["rows"]) == (0.5, 3)
    assert run["tokens_per_second"] == pytest.approx(3 * 12 / (run["prefill_seconds"] + run["decode_seconds"]))
    assert run["bound_seconds"] > 0 and run["share_of_ceiling"] == pytest.approx(run["bound_seconds"] / run["step_seconds"])
    assert run["busiest_lane"] in ("read", "compute", "memory")


def test_more_rows_fit_when_less_is_kept(model: str, offload: Path) -> None:
    """By the planner's own footprint: nothing is loaded. What this process holds already is not to be had."""
    memory = f"{psutil.Process().memory_info().rss / 1e6 + 300:.0f}MB"
    rows = {}
    for one in ("1.0", "0.2"):
        args = asked(model, offload, "--one", one, "--prompt-len", "100", "--cpu-mem", memory)
        rows[one] = largest(lambda count, args=args: eviction.fits(args, count), 4096)
    assert rows["0.2"] >= rows["1.0"] > 0


def one_run(share: float) -> Mapping[str, Any]:
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
