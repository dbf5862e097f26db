"""The clocked device: the engine takes an accelerator's way on it, and every wait and every access is checked.

What an accelerator does with its driver is the engine's own code; the driver is here. It tells of streams and events as CUDA
tells torch's stream sanitizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.cuda import _gpu_trace as traced

from h2o_flexgen.memory.device import Accelerator, StreamEvent
from h2o_flexgen.planning.working_space import GRAPH_BYTES
from tests.clocked.backend import registered
from tests.clocked.checker import Checker, current
from tests.clocked.clock import Clock
from tests.clocked.handover import ClockedHandover
from tests.clocked.tensor import NAME, ClockedTensor
from tests.helpers.taped import taped


class ClockedPoint:
    """An event of a stream. It is passed when something has waited for it, and not before: luck proves nothing. Where streams
    are quick, it is passed whenever it is asked for."""

    def __init__(self, is_timed: bool) -> None:
        self._is_timed = is_timed
        self._clock = Clock()

    @property
    def cuda_event(self) -> int:
        return id(self)

    @property
    def clock(self) -> Clock:
        return self._clock

    def record(self, stream: ClockedStream) -> None:
        checker = current()
        checker.refuse_in_a_graph("an event is recorded")
        with checker.lock:
            self._clock = Clock(checker.launch("a marker")[1])
            traced.EventRecordCallbacks.fire_callbacks(self.cuda_event, stream.name)  # type: ignore[arg-type]

    def synchronize(self) -> None:
        checker = current()
        checker.refuse_in_a_graph("an event is waited for")
        with checker.lock:
            checker.wait_for(self._clock, "a marker")
            traced.EventSynchronizationCallbacks.fire_callbacks(self.cuda_event)

    def query(self) -> bool:
        checker = current()
        checker.refuse_in_a_graph("an event is asked")
        with checker.lock:
            if checker.streams_are_quick:
                checker.host.join(self._clock)
            return checker.host.knows_all({who: at for who, at in self._clock.items() if who.startswith("stream ")})

    def elapsed_time(self, end: ClockedPoint) -> float:
        if not (self._is_timed and end._is_timed):
            raise RuntimeError("seconds are asked for between markers that have no times")
        if not (self.query() and end.query()):
            current().faults.append("seconds are asked for between markers that may not be passed")
        return 0.0


class ClockedStream(NamedTuple):
    name: str

    def wait_event(self, event: ClockedPoint) -> None:
        checker = current()
        checker.refuse_in_a_graph("a stream waits for an event")
        with checker.lock:
            checker.issued.join(event.clock)
            traced.EventWaitCallbacks.fire_callbacks(event.cuda_event, self.name)  # type: ignore[arg-type]


class ClockedDevice(Accelerator):
    kind = NAME
    graph_bytes = GRAPH_BYTES

    def __init__(self, number: int = 0) -> None:
        """`number`: of several, each of which has streams of its own."""
        registered()
        super().__init__()
        self._number = number
        self.torch_device = torch.device(NAME, 0)
        self.handover = ClockedHandover()

    @contextmanager
    def stream(self, lane: str) -> Iterator[None]:  # type: ignore[override]
        with current().on(f"{lane} {self._number}" if self._number else lane):
            yield

    def names_of(self, count: int) -> list[str]:
        return [NAME, *(f"{NAME}:{number}" for number in range(1, count))]

    def _new_event(self, timed: bool, blocking: bool) -> StreamEvent:
        return ClockedPoint(timed)

    def _current_stream(self) -> ClockedStream:
        return ClockedStream(current().stream)

    def _page_locked(self, like: Tensor) -> Tensor:
        """As torch's own allocator has it: memory that was dropped is not had again before the streams have used it."""
        checker = current()
        checker.refuse_in_a_graph("memory is page-locked")
        made = torch.empty(like.shape, dtype=like.dtype)
        if made.numel():
            with checker.lock:
                checker.page_lock(made.data_ptr(), made.nbytes)
            weakref.finalize(made, _forget, checker, made.data_ptr()).atexit = False
        return made

    def read_back(self, values: Tensor) -> Tensor:
        read = super().read_back(values)
        current().touched(read, writes=False)  # as the code that asked for the values is about to do, past torch
        return read

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        with current().capturing():
            return taped(work, lambda one: not isinstance(one, ClockedTensor))

    def page_lock(self, address: int, nbytes: int) -> None:
        current().page_lock(address, nbytes)

    def page_unlock(self, address: int) -> None:
        current().page_unlock(address)

    def over_link(self, region: Tensor) -> Tensor:
        block = current().locked(region)
        assert block is not None, "kernels read page-locked memory alone"
        return ClockedTensor(region, block)

    def settle(self) -> None:
        checker = current()
        with checker.lock:
            checker.settle()
            traced.DeviceSynchronizationCallbacks.fire_callbacks()


def _forget(checker: Checker, address: int) -> None:
    with checker.lock:
        checker.forget_locked(address)
