"""Lanes that are late at random, and threads that are watched: on the pretended device, that this is what happens there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from h2o_flexgen.schedule.ops import LANES
from h2o_flexgen.session import loaded_model
from tests.delayed.device import LEAST, MOST, Delays, delayed
from tests.helpers.contract import Case, Checkpoints, hold_contract
from tests.helpers.pretended import PretendedDevice
from tests.whole.test_contract import MANY, MIXES


class Noting(TorchDispatchMode):
    """In the place of torch's sanitizer: notes which code launched what."""

    def __init__(self, threads: set[str]) -> None:
        super().__init__()
        self._threads = threads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._threads.add(threading.current_thread().name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [0, 1])
def test_every_lane_is_late_and_its_thread_is_watched(
    number: int, checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept, threads = list[int](), set[str]()

    @contextmanager
    def noting() -> Iterator[None]:
        with Noting(threads):
            yield

    delays = Delays(number, slept.append)
    device = delayed(PretendedDevice, delays, noting)
    monkeypatch.setattr(loaded_model, "open_device", lambda name: device)
    case = Case("llama-gqa", MIXES[3 + number], MANY, num_gpu_batches=3, device="pretended")
    hold_contract(case, checkpoints, offload)
    late = {lane for lane, count in delays.drawn.items() if count > 10}
    assert {"load", "store", "compute"} <= late <= {*LANES, ""}
    assert len(slept) > sum(delays.drawn.values()) / 4 and all(LEAST <= cycles <= MOST for cycles in slept)
    assert any("load" in name for name in threads) and any("store" in name for name in threads)


def test_delays_come_of_the_seed_and_the_lane_alone() -> None:
    drawn = []
    for seed in (1, 1, 2):
        slept = list[int]()
        delays = Delays(seed, slept.append)
        for lane in ("load", "store", "load"):
            with delays.on(lane):
                for _ in range(5):
                    delays.some()
        drawn.append(slept)
    assert drawn[0] == drawn[1] != drawn[2]


def test_one_lane_can_be_late_alone() -> None:
    slept = list[int]()
    delays = Delays(1, slept.append, late=("load",))
    with delays.on("store"):
        for _ in range(20):
            delays.some()
    assert not slept
    with delays.on("load"):
        for _ in range(20):
            delays.some()
    assert slept
