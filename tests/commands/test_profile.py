"""The profile command: a table, where it is kept, JSON; and what is said where it cannot be had."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from h2o_flexgen import profile
from h2o_flexgen.cli import profile_work
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.profiling import busy_cores
from tests.profiling.profiles import TINY


@pytest.fixture
def measure(offload: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs the command: status, lines, errors."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(profile_work, "QUICK", TINY)
    for name in ("_busy_seconds", "_own_seconds", "_moved_bytes"):  # nothing works and nothing moves, at whatever moment
        monkeypatch.setattr(busy_cores, name, lambda *_: 0)

    def run(*flags: str) -> tuple[int, list[str], str]:
        status = profile.main(["--quick", "--offload-dir", str(offload), *flags])
        out, err = capfd.readouterr()
        return status, out.splitlines(), err

    return run


def test_a_table_comes_first_and_json_last(measure: Any, tmp_path: Path) -> None:
    status, lines, err = measure("-o", str(tmp_path / "mine.yaml"))
    told = json.loads(lines[-1])
    assert (
        status == 0
        and err.startswith("profile: ")
        and "measuring this machine takes 1000000 s at most" in err
        and err.rstrip().endswith("done")
    )
    machine = Machine.load(tmp_path / "mine.yaml")
    assert machine.name == "mine" and told["profile"]["disk_read_per_s"] == machine.disk_read_per_s
    kept = Machine.load(told["kept"])
    assert Path(told["kept"]).is_relative_to(tmp_path / "cache") and kept.flops_per_s == machine.flops_per_s
    table = "\n".join(lines[:-2])
    for words in (
        "disk, reads ....",
        "GB/s",
        "GFLOP/s",
        "billion values/s",
        "µs",
        "bfloat16",
        "attention of prompts, all kept",
    ):
        assert words in table, words
    assert lines[-2].endswith(f"and kept in {told['kept']}, and written to {tmp_path / 'mine.yaml'}")


def test_it_says_when_others_were_busy(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def pass_a_second(_: Path) -> int:
        """Called behind what is read at the beginning, and again behind what is read at the end."""
        now[0] += 1.0
        return 0

    monkeypatch.setattr(busy_cores, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda seconds: None))
    monkeypatch.setattr(busy_cores, "_busy_seconds", lambda: 0.8 * now[0])
    monkeypatch.setattr(busy_cores, "_moved_bytes", pass_a_second)
    _, lines, _ = measure()
    assert lines[-2].endswith("; `python -m h2o_flexgen.profile` measures again, and the better figures count")
    kept = Machine.load(json.loads(lines[-1])["kept"])
    assert "other processes kept 0.8 cores busy meanwhile" in kept.disturbed and " and ".join(kept.disturbed) in lines[-2]


def test_what_is_in_the_table_is_what_was_found(measure: Any) -> None:
    _, lines, _ = measure("--dtype", "float32")
    found = json.loads(lines[-1])["profile"]
    table = dict(
        line.split(" ", 1) if ".." not in line else (line.split(" .")[0], line.rsplit("... ")[-1])
        for line in lines[:-2]
        if line
    )
    assert table["disk, reads"].endswith(f"{found['disk_read_per_s'] / 1e9:.2f} GB/s")
    rows = next(line for line in lines if line.strip().startswith("8 rows")).split()
    assert rows[2] == f"{dict(map(tuple, found['flops_per_s']['float32']))[8] / 1e9:.1f}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("-o", "/not/there/mine.yaml"), "-o /not/there/mine.yaml cannot be written: give a file in a folder that exists"),
        (("-o", "mine.json"), "-o mine.json does not end in .yaml or .yml; give it such a name"),
        (("--device", "tpu"), "--device tpu is unknown; known are auto, cpu, cuda and cuda:N"),
    ],
)
def test_what_cannot_be_done_is_one_line_before_anything_is_measured(
    measure: Any, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(profile_work, "profile", lambda *_: pytest.fail("measured"))
    status, lines, err = measure(*flags)
    assert (status, lines) == (2, []) and err.splitlines()[-1] == f"error: {message}"


def test_an_unknown_flag_is_refused(measure: Any, capfd: pytest.CaptureFixture[str]) -> None:
    status, _, err = measure("--quik")
    assert status == 2 and "--quick" in err
