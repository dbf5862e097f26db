"""What an engine takes of its machine: the bytes that may be held on each tier, as given by the user or as many as are free
when a model is opened, and the threads that compute.

Each step of a model waits for the slowest thread, so more threads than free cores make it slower.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import get_num_threads as get_num_threads  # commands ask here
from torch import set_num_threads

from h2o_flexgen.core.environment import cores, existing_folder, threads
from h2o_flexgen.core.units import format_bytes, parse_bytes
from h2o_flexgen.memory.device import Device
from h2o_flexgen.memory.host import KEPT_PRODUCTS, available_bytes, bytes_to_begin_with, give_back_freed
from h2o_flexgen.planning.footprint import MemoryLimits
from h2o_flexgen.schedule.ops import COMPUTE_LANE


class Packing(NamedTuple):
    """The folder of packed weights, and what has to be written there first."""

    folder: Path
    nbytes: int  # to write
    freed: int = 0  # of a copy in an older layout, which is deleted first

    def __str__(self) -> str:
        instead = f", in place of {format_bytes(self.freed)} of an older layout" if self.freed else ""
        return f"{format_bytes(self.nbytes)} in {self.folder}{instead}"


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


def on_disk(limits: MemoryLimits, offload_folder: Path, packing: Packing | None, disk_mem: int | str | None) -> MemoryLimits:
    """The limits with that of the disk. A user's own is not the folder's, and a larger disk would not raise it."""
    free, asked = _free_on_disk(offload_folder, packing), math.inf if disk_mem is None else parse_bytes(disk_mem)
    return replace(limits, disk=int(min(free, asked)), folder=offload_folder if free <= asked else None)


def _free_on_disk(offload_folder: Path, packing: Packing | None) -> int:
    """The bytes that are free where KV and activations go, less what packed weights will take."""
    place = existing_folder(offload_folder)
    free = shutil.disk_usage(place).free
    if packing is None:
        return free
    shared = existing_folder(packing.folder).stat().st_dev == place.stat().st_dev
    return max(0, free + packing.freed - packing.nbytes) if shared else free


CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # if the user sets one of them, it stays
COMPILED_PRODUCTS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"  # oneDNN reads one, torch the other
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # quota of a container: microseconds per period, or "max"


def set_threads(asked: int | None) -> None:
    """Sets the number of computing threads of this process. None leaves it as it is."""
    if asked is not None:
        set_num_threads(threads(cores()).value("threads", asked))


def keep_few_compiled_products() -> None:
    """Limits the compiled products that torch's library caches, one for each number of rows, unless a user has chosen a limit.
    Where rows come and go, or each expert gets some of them, there are very many such numbers. A thousand of them would take
    hundreds of MB that no plan counts. Both limits are read when the first product is made."""
    for name in COMPILED_PRODUCTS:
        os.environ.setdefault(name, str(KEPT_PRODUCTS))


def make_room_for_others(busy_cores: float, asked: int | None) -> str | None:
    """Uses fewer threads if other processes keep cores busy, or if a container may use less than all cores, unless the user has
    chosen how many. Returns a line that says what was done."""
    if asked is not None or any(os.environ.get(name) for name in CHOSEN):
        return None
    now = get_num_threads()
    quota = quota_cores()
    threads, alone = threads_beside(busy_cores, cores(), quota, now), threads_beside(0.0, cores(), quota, now)
    if threads == now:
        return None
    set_num_threads(threads)
    busy = f"other processes keep {busy_cores:.1f} cores busy, and without them it is faster"
    why = busy if threads < alone else "no more may be used here at a time"
    return f"{threads} of {now}: {why}; --threads chooses otherwise"


def crowding(busy_cores: float, threads: int, own_cores: int, had: float | None = None) -> str | None:
    """A line with advice if there are more threads than cores that other processes leave free. `had`: the cores that this
    process had meanwhile, which is counted more finely than what others had: together they have no more than there are."""
    left = None if had is None else round(max(had, own_cores - busy_cores), 1)
    busy_cores = busy_cores if left is None else own_cores - left
    free = own_cores - math.floor(busy_cores + 0.5)
    if threads <= free:
        return None
    fewer = f"stop them, start them with `nice`, or give --threads {free}"
    advice = fewer if free > 0 else "stop them, or start them with `nice`"
    word = "1 thread computes" if threads == 1 else f"{threads} threads compute"
    cost = "" if left is None else f", which leaves {left:.1f} to this one"
    return f"{word} on {own_cores} cores, and other processes keep {busy_cores:.1f} of them busy{cost}; {advice}"


def threads_beside(busy_cores: float, own_cores: int, quota: float, most: int) -> int:
    free = min(own_cores - math.floor(busy_cores + 0.5), math.ceil(quota) if quota < own_cores else own_cores)
    return max(1, min(most, free))


def quota_cores(file: Path = QUOTA) -> float:
    """The number of cores in a container's quota; infinite if there is none."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        used, period = file.read_text(encoding="ascii").split()
        return int(used) / int(period)
    return math.inf
