"""CUDA's book of page-locked ranges without CUDA, and an accelerator that page-locks in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest.mock import patch

from torch import Tensor

from h2o_flexgen.memory import host
from h2o_flexgen.memory.device import CudaPageLocks
from h2o_flexgen.memory.host import PageLocker, Pages
from tests.helpers.pretended import PretendedDevice

REFUSED, LOCKED_ALREADY, NOT_LOCKED = 2, 712, 713  # CUDA's numbers


class PretendedCudart:
    """What the driver believes: ranges stay until they are taken out, whatever becomes of their pages."""

    def __init__(self, room: int | None = None) -> None:
        self.locked: dict[int, int] = {}  # by address
        self.most_locked = 0
        self.last_error = 0
        self.room = room  # bytes that the system lets a process lock

    @property
    def nbytes(self) -> int:
        return sum(self.locked.values())

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        assert flags == 3, "page-locked for every device, and for its kernels"
        if any(pointer < start + nbytes and start < pointer + size for start, nbytes in self.locked.items()):
            return self._failed(LOCKED_ALREADY)
        if self.room is not None and self.nbytes + size > self.room:
            return self._failed(REFUSED)
        self.locked[pointer] = size
        self.most_locked = max(self.most_locked, self.nbytes)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        return 0 if self.locked.pop(pointer, None) else self._failed(NOT_LOCKED)

    def _failed(self, status: int) -> int:
        self.last_error = status
        return status

    def launch(self) -> None:
        """Launches a kernel: it is told of an error that was not its own."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error} of an earlier call is shown to a kernel")


class LockingDevice(PretendedDevice):
    """Page-locks as CUDA does. Whatever is issued on a stream is told of errors that were not cleared."""

    def __init__(self, cudart: PretendedCudart) -> None:
        super().__init__()
        self._cudart = cudart
        self._locks = CudaPageLocks(cudart, cudart.launch)

    def page_lock(self, address: int, nbytes: int) -> None:
        self._locks.lock(address, nbytes)

    def page_unlock(self, address: int) -> None:
        self._locks.unlock(address)

    def stream(self, lane: str) -> AbstractContextManager[object]:
        self._cudart.launch()
        return nullcontext()


@contextmanager
def watched_pages(cudart: PretendedCudart, pages: type[Pages] = Pages) -> Iterator[list[int]]:
    """Pages that say when they go. The list that is yielded has the addresses of those that went while the driver believed them
    locked, which must never be."""
    stale = list[int]()

    class Watched(pages):  # type: ignore[misc, valid-type]
        address: int | None = None

        def lock(self, locker: PageLocker, address: int) -> None:
            self.address = address
            super().lock(locker, address)

        def __del__(self) -> None:
            super().__del__()
            if self.address in cudart.locked:  # the pages go next
                stale.append(self.address)

    with patch.object(host, "Pages", Watched):
        yield stale


def failing_once(function: Callable[..., Tensor | None], error: type[BaseException]) -> Callable[..., Tensor | None]:
    """The function, whose first call fails before it does anything."""
    calls = iter([error("in between")])

    def call(*given: object) -> Tensor | None:
        for failure in calls:
            raise failure
        return function(*given)

    return call
