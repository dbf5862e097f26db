"""Ring: buffers of one size that are used in turn, as the schedule says."""

from __future__ import annotations

from torch import Tensor

from h2o_flexgen.memory.device import DeviceTier
from h2o_flexgen.memory.host import HostTier


class Ring:
    """Buffers in one tier. A ring of zero bytes has no buffers, and is false."""

    def __init__(self, memory: HostTier | DeviceTier, buffers: int, nbytes: int) -> None:
        self._memory = memory
        self._regions: list[Tensor] = []
        try:
            for _ in range(buffers if nbytes else 0):
                self._regions.append(memory.alloc(nbytes))
        except BaseException:
            self.free()
            raise

    def __len__(self) -> int:
        return len(self._regions)

    def __getitem__(self, number: int) -> Tensor:
        return self._regions[number]

    def zero(self) -> None:
        for region in self._regions:
            region.zero_()

    def free(self) -> None:
        while self._regions:
            self._memory.free(self._regions.pop())
