"""The benchmark of overlap: what it says of a run is never below the bound that stands beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_flexgen.planning.machine import find_machine
from h2o_flexgen.schedule import SCHEDULES
from tests.helpers.tiny import tiny_config
from tests.scripts.loading import load_script

overlap = load_script("overlap.py", "benchmarks")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_predicted_is_no_less_than_the_busiest_lane_alone(
    schedule: str, tmp_path: Path, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = find_machine("cpu-2core")
    monkeypatch.setattr(overlap, "profile_of", lambda args: profile)
    monkeypatch.setattr(overlap, "MEASURING", {"repetitions": 1, "seconds": 0.01})
    tiny_config("llama-gqa").save_pretrained(tmp_path / "shapes")
    shape = ("--prompt-len", "8", "--gen-len", "4", "--gpu-batch-size", "2", "--num-gpu-batches", "2", "--cpu-mem", "8GB")
    flags = ("--model", str(tmp_path / "shapes"), "--offload-dir", str(offload), "--dtype", "float32", "--one", schedule)
    run = overlap.run_one(overlap.parse([*flags, *shape]))
    assert run["bound_seconds"] == max(run["bounds"].values()) > 0
    assert run["predicted_step_seconds"] >= run["bound_seconds"]
    assert run["to_bound"] == pytest.approx(run["step_seconds"] / run["bound_seconds"])
