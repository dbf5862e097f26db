"""Memories: what the stores of a run need of the machine, opened once."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from h2o_flexgen.memory.device import Device, DeviceTier
from h2o_flexgen.memory.disk import DiskTier, Files, OffloadFolder
from h2o_flexgen.memory.host import HostTier


class Memories:
    """The device, the tiers and the disk threads of an engine: closed whatever happens."""

    def __init__(self, device: Device, offload_folder: Path, pin_host: bool = True) -> None:
        self.device = device
        self.host = HostTier(pinned=pin_host and device.accelerator)
        self.compute: HostTier | DeviceTier = device.memory(self.host)  # where things are computed with
        self._folder = OffloadFolder(offload_folder)
        self.files = Files()
        self.disk = DiskTier(self.files, offload_folder)

    def close(self) -> None:
        with ExitStack() as closing:  # each of them, also when one fails
            for close in (self._folder.close, self.disk.close, self.files.close, self.host.close, self.device.settle):
                closing.callback(close)  # the last is the first to be called
