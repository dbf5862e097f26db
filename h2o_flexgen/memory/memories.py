"""What the stores of a run need of the machine: Memories, opened once, and Rings, buffers that are used in turn as the schedule
says."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from h2o_flexgen.memory.device import Device, DeviceTier
from h2o_flexgen.memory.disk import DiskTier, Files, OffloadFolder
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.memory.shared import SharedTier, SharedWeights


class Memories:
    """The device, the tiers and the disk threads of an engine: closed whatever happens.

    Weights of host memory have a tier of their own there: KV and hidden states are always page-locked, weights only if that is
    asked for, since they may be more than a system lets a process lock."""

    def __init__(
        self, device: Device, offload_folder: Path, pin_weight: bool = True, shared: SharedWeights | None = None
    ) -> None:
        self.device = device
        self.host = HostTier(device)
        locker = device if pin_weight else None
        self.weights = HostTier(locker)
        own = self.weights if device.accelerator else self.host
        self.at_rest = own if shared is None else SharedTier(shared, locker)  # where weights of host memory lie all the time
        self.finds_weights = shared is not None and not shared.reads  # another process brings those
        self.compute: HostTier | DeviceTier = device.memory(self.host)  # where things are computed with
        self.files = Files()  # first: its threads may find no room, and then nothing is left behind
        self._folder = self._opened(offload_folder)
        self.disk = DiskTier(self.files, offload_folder)

    def _opened(self, folder: Path) -> OffloadFolder:
        try:
            return OffloadFolder(folder)
        except BaseException:
            self.files.close()
            raise

    def close(self) -> None:
        with ExitStack() as closing:  # each of them, also when one fails
            for tier in (self._folder, self.disk, self.files, self.host, self.weights, self.at_rest):
                closing.callback(tier.close)
            closing.callback(self.device.settle)  # the last is the first to be called


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

    def __getitem__(self, buffer: int) -> Tensor:
        return self._regions[buffer]

    def zero(self) -> None:
        for region in self._regions:
            region.zero_()

    def free(self) -> None:
        while self._regions:
            self._memory.free(self._regions.pop())
