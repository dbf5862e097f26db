"""The benchmark of long rows: each way generates behind rows that were not computed, and what it holds is what it keeps."""

from __future__ import annotations

import json
from argparse import Namespace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from h2o_flexgen.schedule.ops import Key, Op
from h2o_flexgen.schedule.trace import Span
from tests.scripts.loading import load_script

long_rows = load_script("long_rows.py", "benchmarks")
SMALL = {"layers": 2, "rows": 2, "tokens": 300, "steps": 3, "turns": 1, "narrow": 32, "threads": 1}
SOME_THERE = {"recall 10 %", "recall 10 %, reuse", "recall 10 %, together, reuse", "h2o 50 %, recall 10 %"}


@pytest.mark.parametrize("kv", ["memory", "disk"])
def test_every_way_generates_behind_made_up_rows(kv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {**SMALL, "kv": kv, "offload-dir": tmp_path, "batches": 2 if kv == "disk" else 1}
    assert long_rows.main([word for name, value in asked.items() for word in (f"--{name}", str(value))]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {*found["runs"]} == {*long_rows.WAYS} and all(row["measured"] > 0 < row["ceiling"] for row in found["rows"])
    lanes = [run["lanes"] for (run,) in found["runs"].values()]
    assert all((each.get("read", 0) > 0) == (kv == "disk") and 0 < max(each.values()) < 1.01 for each in lanes)
    assert found["runs"]["recall 10 %"][0]["floor"] < found["runs"]["all"][0]["floor"] > 0
    assert all(len(runs) == 1 for runs in found["runs"].values()) and found["arguments"]["tokens"] == 300
    with_some_there = {way for way, (run,) in found["runs"].items() if run["chosen_there"] is not None}
    assert with_some_there == (SOME_THERE if kv == "disk" else set())


LAYER = SimpleNamespace(tensors=[("weight", SimpleNamespace(shape=(10, 20)))])  # 400 bytes
SPEC = SimpleNamespace(layers=[LAYER] * 3, kv_heads=2, head_dim=128, itemsize=2, kv_codec="plain")  # the first is a table
WEIGHTS, KV, INDEX = 2 * 2 * 400, 2400 * 2 * 128 * 2, 2400 * 72  # of two batches, and of 2400 slots of a head


@pytest.mark.parametrize(
    "kv, way, there, seconds",
    [
        ("memory", "all", None, (WEIGHTS + KV) / 1000),
        ("memory", "recall 10 %", None, (WEIGHTS + INDEX + KV / 10) / 1000),
        ("memory", "h2o 20 %", None, (WEIGHTS + KV / 5) / 1000),
        ("disk", "all", None, KV / 100),
        ("disk", "recall 10 %", 0.4, KV / 10 / 100),
        ("disk", "recall 10 %, reuse", 0.4, KV / 10 * 0.6 / 100),
        ("disk", "recall 10 %, together, reuse", 1.0, (WEIGHTS + INDEX) / 1000),
    ],
)
def test_a_floor_is_what_a_step_has_to_read(kv: str, way: str, there: float | None, seconds: float) -> None:
    args = Namespace(batches=2, rows=3, tokens=100, layers=2, kv=kv)
    rates = {"memory": 1000, "disk": 100 if kv == "disk" else inf}
    assert long_rows.floor_of(SPEC, long_rows.WAYS[way], args, rates, there) == pytest.approx(seconds)


def test_lanes_work_while_any_of_their_tasks_does() -> None:
    def span(op: Op, step: int, start: float, end: float) -> Span:
        return Span(Key(op, step, 0, 0), op.lane, start, end)

    reads = [span(Op.READ_KV, 1, 0, 2), span(Op.READ_KV, 2, 3, 5), span(Op.READ_KV, 2, 4, 7), span(Op.READ_KV, 3, 10, 12)]
    run = SimpleNamespace(trace=SimpleNamespace(spans=[span(Op.COMPUTE, 2, 2, 6), *reads]))
    assert long_rows.lanes_of(run, first=2) == pytest.approx({"compute": 0.4, "read": 0.6})


@pytest.mark.parametrize("moved, skipped, there", [({"read": 30}, {"read": 10}, 0.25), ({"read": 30}, {}, None)])
def test_what_was_there_is_a_share_of_what_was_chosen(moved: Any, skipped: Any, there: float | None) -> None:
    assert long_rows.there_of(SimpleNamespace(moved_bytes=moved, skipped_bytes=skipped)) == there


def test_lines_say_what_was_there_and_which_lane_is_busiest() -> None:
    lanes = {"read": 0.78, "compute": 0.6}
    one = {"tokens_per_second": 20.3, "seconds_of_a_step": 1.18, "share_of_the_floor": 0.22, "lanes": lanes}
    line = long_rows.told("all", one | {"chosen_there": None})
    assert line.split() == ["all", "20.30", "tokens/s", "1.180", "s", "a", "step", "floor", "22%", "read", "78%"]
    assert long_rows.told("all", one | {"chosen_there": 0.9}) == f"{line}   90% of the chosen was there"
    assert long_rows.name_of("all", [{"chosen_there": None}]) == "all"
    runs = [{"chosen_there": there} for there in (0.7, 0.72, 0.9)]
    assert long_rows.name_of("reuse", runs) == "reuse (72% of the chosen was there)"


@pytest.mark.parametrize("given", [True, False])
def test_the_rate_is_that_of_the_disk_where_kv_lies(given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Path] = []

    def rates(folder: Path, *_: object) -> tuple[float, float]:
        measured.append(folder.parent)
        return 1.0, 2.0

    monkeypatch.setattr(long_rows, "offload_rates", rates)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert long_rows.disk_rate(tmp_path / "own" if given else None) == 2.0
    assert measured == [tmp_path / "own" if given else tmp_path / "cache/h2o_flexgen/offload"]
