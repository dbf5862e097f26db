"""The benchmark of graphs, on pretended devices: what they take is measured, and memory that grows is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from h2o_flexgen.session import loaded_model
from tests.helpers.contract import Checkpoints
from tests.helpers.pretended import PretendedDevice
from tests.scripts.loading import load_script

gpu_graphs = load_script("gpu_graphs.py", "benchmarks")
OF_A_GRAPH = 50_000


class WithMemory(PretendedDevice):
    """It loses memory by each capture, and has it again when what was freed is given back, but for a part."""

    def __init__(self, leaks: int) -> None:
        super().__init__()
        self._leaks, self._free, self._captures = leaks, 10**10, count()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self._free -= OF_A_GRAPH
        next(self._captures)
        return super().capture(work)

    def give_back_freed(self) -> None:
        self._free = 10**10 - self._leaks * next(self._captures)

    def free_bytes(self) -> int | None:
        return self._free


@pytest.mark.parametrize(("leaks", "status"), [(0, 0), (10**7, 1)])
def test_memory_that_grows_is_found(
    leaks: int, status: int, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loaded_model, "open_device", lambda name: WithMemory(leaks))
    for name, value in {"ROWS": 2, "MOST_TOKENS": 9}.items():
        monkeypatch.setattr(gpu_graphs, name, value)
    flags = ("--model", str(checkpoints.folder("opt")), "--device", "pretended", "--seconds", "0", "--strict")
    assert gpu_graphs.main(flags) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["captures"] > 10 and found["graph_bytes"] == OF_A_GRAPH and found["rounds"] == gpu_graphs.WARM_ROUNDS + 2
    assert found["holds"] == (not status) and (found["growth_bytes"] > 0) == bool(status)
