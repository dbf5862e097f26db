"""The clocked device: the engine takes an accelerator's way on it, and every wait and every access is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from h2o_flexgen.memory.device import Device, DeviceTier
from h2o_flexgen.memory.host import HostTier
from tests.clocked.backend import registered, uploaded
from tests.clocked.checker import current
from tests.clocked.clock import Clock
from tests.clocked.handover import ClockedHandover
from tests.clocked.tensor import NAME, ClockedTensor
from tests.recorded import repeated


class ClockedMarker:
    """A point in a stream's work. It is passed when somebody has waited for it, and not before: luck proves nothing."""

    def __init__(self, clock: Clock) -> None:
        self.clock = Clock(clock)

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
    kind = NAME

    def __init__(self) -> None:
        registered()
        super().__init__()
        self.torch_device = torch.device(NAME, 0)
        self.handover = ClockedHandover()

    @contextmanager
    def stream(self, lane: str) -> Iterator[None]:  # type: ignore[override]
        with current().on(lane):
            yield

    def mark(self, timed: bool = False, blocking: bool = False) -> ClockedMarker:
        checker = current()
        with checker.lock:
            return ClockedMarker(checker.launch("a marker")[1])

    def upload(self, values: Tensor, device: torch.device) -> Tensor:
        """The values are read when the copy is done, from memory that nobody else has: no thread waits."""
        return uploaded(values)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return repeated(work)

    def wait(self, marker: ClockedMarker | None) -> None:  # type: ignore[override]
        checker = current()
        with checker.lock:
            if marker is not None:
                checker.issued.join(marker.clock)

    def keep_for_stream(self, tensor: Tensor) -> None:
        checker = current()
        with checker.lock:
            assert isinstance(tensor, ClockedTensor)
            tensor.block.keep_for(f"stream {checker.stream}")

    def seconds_between(self, start: ClockedMarker, end: ClockedMarker) -> float:  # type: ignore[override]
        if not (start.query() and end.query()):
            current().faults.append("seconds are asked for between markers that may not be passed")
        return 0.0

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
