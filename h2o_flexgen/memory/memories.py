"""The machine's memory as a run's stores need it: Memories, opened once, and Rings, buffers that are used in the
scheduled order; and the site that this process is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy
from pathlib import Path

import torch
from torch import Tensor

from h2o_flexgen.core.site import Site
from h2o_flexgen.formats.kernel_table import CPU, Processor
from h2o_flexgen.kernels.native import processor
from h2o_flexgen.memory.device import Device, DeviceTier
from h2o_flexgen.memory.disk import DiskFiles, DiskTier, OffloadFolder
from h2o_flexgen.memory.host import HostTier, SharedTier, SharedWeights


def own_site(device: str, accelerator: bool, writes_weights: bool = False, graph_bytes: int | None = None) -> Site:
    """The site that this process is: its kind of device, its library of kernels, its threads.

    `device`: its kind. An accelerator that computes as a CPU has none of the kernels in C. `graph_bytes`: as a device says."""
    own = Processor(device) if accelerator and device == CPU else processor(device)
    return Site(accelerator, writes_weights, own, torch.get_num_threads(), graph_bytes)


class Memories:
    """The device, the tiers and the disk threads of an engine: closed whatever happens.

    Weights in host memory have a tier of their own: KV and hidden states are always page-locked, weights only on request, since
    they may be more than a system lets a process lock."""

    def __init__(
        self,
        device: Device,
        offload_folder: Path,
        pin_weight: bool = True,
        shared: SharedWeights | None = None,
        others: Sequence[Device] = (),
    ) -> None:
        """`others`: devices that compute beside the first, each with its own memory, and all with the same host and disk."""
        self.device = device
        self.host = HostTier(device)
        locker = device if pin_weight else None
        self.weights = HostTier(locker)
        own = self.weights if device.accelerator else self.host
        self.at_rest = own if shared is None else SharedTier(shared, locker)  # where weights in host memory stay
        self.finds_weights = shared is not None and not shared.reads  # another process reads those
        self.compute: HostTier | DeviceTier = device.memory(self.host)  # the memory that computation reads
        self.files = DiskFiles()  # first: there may be no memory for its threads, and then nothing is left behind
        self._folder = self._opened(offload_folder)
        self.disk = DiskTier(self.files, offload_folder)
        self.of_devices = (self, *(self._beside(other) for other in others))

    def _beside(self, device: Device) -> Memories:
        """The same memories as another device sees them."""
        memories = copy(self)
        memories.device, memories.compute = device, device.memory(self.host)
        return memories

    def _opened(self, folder: Path) -> OffloadFolder:
        try:
            return OffloadFolder(folder)
        except BaseException:
            self.files.close()
            raise

    def close(self) -> None:
        with ExitStack() as closing:  # closes each of them, even if one fails
            for tier in (self._folder, self.disk, self.files, self.host, self.weights, self.at_rest):
                closing.callback(tier.close)
            for memories in self.of_devices:
                closing.callback(memories.device.settle)  # the last is the first to be called


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
