"""The bytes that may be held on each tier: as given by the user, or as many as are free when a model is opened."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from h2o_flexgen.core.environment import existing_folder
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.units import format_bytes, parse_bytes
from h2o_flexgen.memory.device import Device
from h2o_flexgen.memory.host import available_bytes, bytes_to_begin_with, give_back_freed
from h2o_flexgen.planning.memory_limits import MemoryLimits
from h2o_flexgen.schedule.ops import COMPUTE_LANE


class Packing(NamedTuple):
    """The folder of packed weights, and what has to be written there first."""

    folder: Path
    nbytes: int  # to write
    freed: int = 0  # of a copy in an older layout, which is deleted first

    def __str__(self) -> str:
        instead = f", in place of {format_bytes(self.freed)} of an older layout" if self.freed else ""
        return f"{format_bytes(self.nbytes)} in {self.folder}{instead}"


def refuse_memory_of_no_gpu(device: Device, gpu_mem: int | str | None) -> None:
    """Refuses a limit on GPU memory where no GPU computes: it would limit nothing, and the caller expects otherwise."""
    if gpu_mem is not None and not device.accelerator:
        raise ValueError(f"gpu_mem {shown(gpu_mem)} is for a GPU, and this model computes on the CPU; leave it out")


def open_limits(devices: Sequence[Device], gpu_mem: int | str | None, cpu_mem: int | str | None) -> MemoryLimits:
    """The limits except the disk's. With several devices, the limit is that of the one with the least free memory."""
    for device in devices:
        device.warm_up(COMPUTE_LANE)
    host_base = bytes_to_begin_with()
    asked = None if gpu_mem is None else parse_bytes(gpu_mem)
    for device in devices:
        device.limit(asked)
    known = [nbytes for nbytes in (asked, *(device.free_bytes() for device in devices)) if nbytes is not None]
    return MemoryLimits(
        device=min(known) if known and devices[0].accelerator else None,
        host=available_bytes() + host_base if cpu_mem is None else parse_bytes(cpu_mem),
        host_base=host_base,
    )


def weighed_anew(limits: MemoryLimits) -> MemoryLimits:
    """The limits with the bytes measured again that the process holds besides the plan: a plan search leaves some behind."""
    give_back_freed()
    return replace(limits, host_base=bytes_to_begin_with())


def disk_limit(offload_folder: Path, packing: Packing | None) -> int:
    """The bytes that are free where KV and activations go, less what packed weights will take."""
    place = existing_folder(offload_folder)
    free = shutil.disk_usage(place).free
    if packing is None:
        return free
    shared = existing_folder(packing.folder).stat().st_dev == place.stat().st_dev
    return max(0, free + packing.freed - packing.nbytes) if shared else free
