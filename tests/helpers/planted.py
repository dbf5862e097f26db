"""What is planted in a command: a peak of host memory, and a crowd of other processes. No machine can be made to have these."""

from __future__ import annotations

import pytest

BUDGET = 100 * 10**9
OVER = 7_000_000
CPU_MEM = ("--cpu-mem", str(BUDGET))
SAID = "memory: 100.01 GB of CPU memory were held, and the limit was 100.00 GB: 7.00 MB more than promised. "


def plant_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the process of a command hold nothing when a model is opened, and more than `CPU_MEM` from then on."""
    told = iter((0,))
    monkeypatch.setattr("h2o_flexgen.session.loaded_model.peak_resident_bytes", lambda: next(told, BUDGET + OVER))


CROWDED = "slow: a crowd"


def plant_a_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has other processes slow a command at its beginning and at each look."""
    monkeypatch.setattr("h2o_flexgen.cli.watch.make_room_for_others", lambda *_: None)
    monkeypatch.setattr("h2o_flexgen.cli.watch.crowding", lambda *_: "a crowd")
    monkeypatch.setattr("h2o_flexgen.cli.watch.LOOK_SECONDS", 0.0)
