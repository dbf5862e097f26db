"""The clocked device: the engine takes an accelerator's way on it, and every wait and every access is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from h2o_flexgen.memory.device import Device, DeviceTier, Marker
from h2o_flexgen.memory.host import HostTier
from tests.clocked.backend import registered
from tests.clocked.checker import current
from tests.clocked.clock import Clock
from tests.clocked.handover import ClockedHandover
from tests.clocked.tensor import NAME, ClockedTensor, own_block
from tests.helpers.recorded import repeated


class ClockedMarker:
    """A point in a stream's work. It is passed when somebody has waited for it, and not before: luck proves nothing."""

    def __init__(self, clock: Clock, is_timed: bool) -> None:
        self.clock = Clock(clock)
        self.is_timed = is_timed

    def synchronize(self) -> None:
        checker = current()
        with checker.lock:
            checker.wait_for(self.clock, "a marker")

    def query(self) -> bool:
        checker = current()
        with checker.lock:
            return checker.host.knows_all({who: at for who, at in self.clock.items() if who.startswith("stream ")})


class ClockedDevice(Device):
    accelerator = True
    captures = True
    chains = False
    steps_before_capture = 2
    kind = NAME

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

    def mark(self, timed: bool = False, blocking: bool = False) -> ClockedMarker:
        checker = current()
        with checker.lock:
            return ClockedMarker(checker.launch("a marker")[1], timed)

    def wait(self, marker: Marker | None) -> None:
        checker = current()
        with checker.lock:
            if isinstance(marker, ClockedMarker):
                checker.issued.join(marker.clock)

    def seconds_between(self, start: Marker, end: Marker) -> float:
        assert isinstance(start, ClockedMarker) and isinstance(end, ClockedMarker)
        if not (start.is_timed and end.is_timed):
            raise RuntimeError("seconds are asked for between markers that have no times")
        if not (start.query() and end.query()):
            current().faults.append("seconds are asked for between markers that may not be passed")
        return 0.0

    def upload(self, values: Tensor, device: torch.device) -> Tensor:
        """The copy that streams read goes when they have read it, and nobody has it but they."""
        checker = current()
        with checker.lock:
            copied = ClockedTensor(values.clone(), own_block(values, checker))
            checker.launched[checker.task, "upload"] += 1
            checker.access(copied.block, copied.inner, True, *checker.launch("upload"))
        return copied

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return repeated(work)

    def page_lock(self, address: int, nbytes: int) -> None:
        current().page_lock(address, nbytes)

    def page_unlock(self, address: int) -> None:
        current().page_unlock(address)

    def memory(self, host: HostTier) -> DeviceTier:
        return DeviceTier(self.torch_device)

    def settle(self) -> None:
        checker = current()
        with checker.lock:
            checker.settle()
