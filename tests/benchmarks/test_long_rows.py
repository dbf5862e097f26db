"""The benchmark of long rows: each way generates behind rows that were not computed, and what it holds is what it keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.scripts.loading import load_script

long_rows = load_script("long_rows.py", "benchmarks")
SMALL = {"layers": 2, "rows": 2, "tokens": 300, "steps": 3, "turns": 1, "narrow": 32, "threads": 1}


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
