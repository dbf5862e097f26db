"""Plans of the contract on a GPU whose lanes are late at random, watched by torch's stream sanitizer; on the pretended device,
that this is what happens there."""

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
from tests.delayed.device import LEAST, MOST, Delays, delayed, delayed_gpu
from tests.delayed.plans import PLANS
from tests.delayed.sanitizer import StreamSanitizer, on_a_gpu
from tests.helpers.contract import Case, Checkpoints, hold_contract
from tests.helpers.pretended import PretendedDevice
from tests.test_contract import MANY, MIXES


@pytest.mark.cuda
@pytest.mark.parametrize("number", range(len(PLANS)))
def test_nobody_is_early_where_lanes_are_late(
    number: int, checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = StreamSanitizer(on_a_gpu())
    device = delayed_gpu(number, watch)
    monkeypatch.setattr(loaded_model, "open_device", lambda name: device)
    with watch.listening(), watch():
        hold_contract(Case(**PLANS[number], device="cuda"), checkpoints, offload)
    assert not watch.alarms


class Noting(TorchDispatchMode):
    """In the place of torch's sanitizer: notes who launched what."""

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
    assert drawn[0] == drawn[1] != drawn[2] and len(PLANS) == 60
