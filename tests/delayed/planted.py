"""Faults that are planted without a GPU, to see what each way says of them, and what the verdict is."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

from torch import Tensor

from h2o_flexgen.engine.executor import Executor
from h2o_flexgen.engine.stores.hidden import HiddenStore
from h2o_flexgen.memory.device import Accelerator, Marker
from h2o_flexgen.schedule.ops import COMPUTE_LANE, LOAD, PASS, Task, kind_of
from tests.delayed.late import LateDevice
from tests.delayed.ways import BY_TORCH, Way

Fault = Callable[[Way], AbstractContextManager[object]]
FOREVER = 3600.0


def no_stream_waits(way: Way) -> AbstractContextManager[object]:
    """What lanes bring is used before it is there."""
    return patch.object(Accelerator, "wait", lambda device, marker: None)


def no_load_waits(way: Way) -> AbstractContextManager[object]:
    """Weights may be written over while they are read: which a device that computes at once does not show."""
    return _without_waits(LOAD, COMPUTE_LANE)


def no_device_waits_for_a_pass() -> AbstractContextManager[object]:
    """A device goes on with states of another before they have arrived. It takes several devices to show."""
    return _without_waits(COMPUTE_LANE, PASS)


def _without_waits(lane: str, other: str) -> AbstractContextManager[object]:
    wait = Executor._wait_on_stream

    def unless(executor: Executor, task: Task, waited_for: str, marker: Marker, number: int) -> None:
        if (task.lane, kind_of(waited_for)) != (lane, other):
            wait(executor, task, waited_for, marker, number)

    return patch.object(Executor, "_wait_on_stream", unless)


def a_kernel_is_wrong(way: Way) -> AbstractContextManager[object]:
    """But where torch does its work."""
    return nullcontext() if dict(way.environment) == BY_TORCH else _hidden_states(lambda hidden: hidden * 1.001)


def the_engine_is_wrong(way: Way) -> AbstractContextManager[object]:
    return _hidden_states(lambda hidden: hidden * 1.001)


def bits_come_of_chance(way: Way) -> AbstractContextManager[object]:
    return _hidden_states(lambda hidden: hidden * (1 + secrets.randbelow(1 << 20) / (1 << 24)))


def graphs_are_wrong(way: Way) -> AbstractContextManager[object]:
    """A replay does nothing."""
    return patch.object(LateDevice, "capture", lambda device, work: lambda: None)


def it_hangs(way: Way) -> AbstractContextManager[object]:
    return _hidden_states(lambda hidden: time.sleep(FOREVER) or hidden) if way.name == "A" else nullcontext()


def it_crashes(way: Way) -> AbstractContextManager[object]:
    return _hidden_states(lambda hidden: os.abort()) if way.late is None else nullcontext()


def it_breaks(way: Way) -> AbstractContextManager[object]:
    def broken(hidden: Tensor) -> Tensor:
        raise RuntimeError("it is Monday")

    return _hidden_states(broken)


def _hidden_states(changed: Callable[[Tensor], Tensor]) -> AbstractContextManager[object]:
    put = HiddenStore.put

    def put_changed(store: HiddenStore, task: Task, hidden: Tensor) -> None:
        put(store, task, changed(hidden))

    return patch.object(HiddenStore, "put", put_changed)


HANGS = "it hangs"
FAULTS: dict[str, Fault] = {
    "nothing": lambda way: nullcontext(),
    "no stream waits": no_stream_waits,
    "no load waits": no_load_waits,
    "a kernel is wrong": a_kernel_is_wrong,
    "the engine is wrong": the_engine_is_wrong,
    "bits come of chance": bits_come_of_chance,
    "graphs are wrong": graphs_are_wrong,
    HANGS: it_hangs,
    "it crashes": it_crashes,
    "it breaks": it_breaks,
}
