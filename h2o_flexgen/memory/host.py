"""Host memory: arenas of exact size on huge pages, page-locked where a device reads them.

Arenas come from mmap and not from torch, because torch's pinned allocator rounds up to powers of two, because direct disk reads
want page alignment, and because reads into small pages were measured three times slower than into huge ones.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor

from h2o_flexgen.core.layout import region_bytes
from h2o_flexgen.memory.tier import Meter

CODE_BYTES = 16 << 20


class HostTier:
    def __init__(self, pinned: bool = False) -> None:
        self.meter = Meter()
        self._pinned = pinned
        self._mapped: list[Tensor] = []  # all that is held
        self._spare: list[Tensor] = []  # of it what nobody uses

    @property
    def spare_bytes(self) -> int:
        """Held, but used by nobody."""
        return sum(region.nbytes for region in self._spare)

    def alloc(self, nbytes: int) -> Tensor:
        """Page-aligned bytes: of what was freed the smallest that is large enough, else new ones."""
        size = region_bytes(nbytes)
        fitting = [region for region in self._spare if region.nbytes >= size]
        if not fitting:
            return self._map(size)
        best = min(fitting, key=lambda region: region.nbytes)
        self._spare = [region for region in self._spare if region is not best]
        return best

    def free(self, region: Tensor) -> None:
        """Kept for the next block: touching fresh memory was measured ten times slower than reusing what is there."""
        self._spare.append(region)

    def trim(self) -> None:
        """Gives what was freed back to the system."""
        self._let_go(self._spare)

    def close(self) -> None:
        """Gives everything back; memory that somebody still looks at goes with the last view of it."""
        self._let_go(self._mapped)

    def _let_go(self, regions: list[Tensor]) -> None:
        gone = {id(region) for region in regions}
        for region in regions:
            if self._pinned:  # before the pages go: the driver would keep them, and refuse their address to others
                torch.cuda.cudart().cudaHostUnregister(region.data_ptr())
            self.meter.remove(region.nbytes)
        self._mapped = [region for region in self._mapped if id(region) not in gone]
        self._spare = [region for region in self._spare if id(region) not in gone]

    def _map(self, size: int) -> Tensor:
        try:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise MemoryError(f"host memory: {size / 1e9:.2f} GB could not be had ({error}); lower the CPU share") from error
        with suppress(OSError, AttributeError):  # where there are huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        region = torch.frombuffer(pages, dtype=torch.uint8)
        if self._pinned:
            _page_lock(region)
        self._mapped.append(region)
        self.meter.add(size)
        return region


def _page_lock(region: Tensor) -> None:
    portable = 1  # page-locked for every device
    status = int(torch.cuda.cudart().cudaHostRegister(region.data_ptr(), region.nbytes, portable))
    if status != 0:
        raise MemoryError(
            f"page-locking {region.nbytes / 1e9:.2f} GB of host memory failed (CUDA error {status}); "
            "try --pin-weight 0 or raise the limit on locked memory (ulimit -l)"
        )


def available_bytes() -> int:
    """Memory that can be had without swapping, within the limit of every control group that this process is in: a container's,
    or a scope that was opened for it."""
    free = psutil.virtual_memory().available
    for folder, limit, used in _control_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")):
        with suppress(OSError, ValueError):  # no such file, or "max"
            room = int((folder / limit).read_text()) - int((folder / used).read_text())
            free = min(free, room + _reclaimable_bytes(folder / "memory.stat"))
    return int(max(0, free))


def _control_groups(own: Path, root: Path) -> Iterator[tuple[Path, str, str]]:
    """Each with the names of its limit and use, and those above it. In a container the path may be that of the host, which is
    not there; the root then is the container's."""
    lines = own.read_text(encoding="utf-8").splitlines() if own.exists() else []
    for _, controllers, place in (line.split(":", 2) for line in lines):
        if controllers == "":
            top, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = top / place.strip("/")
        for above in (folder, *folder.parents):
            yield (above, *names)
            if above == top:
                break


def _reclaimable_bytes(statistics: Path) -> int:
    """Page cache of a control group, and what the kernel remembers of files: counted as used, but given up for whoever needs
    memory."""
    try:
        pairs = dict(line.split() for line in statistics.read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return 0
    # version 1 counts a group alone by these names, and with all below it, as its use does, with "total_" before them
    names = ("active_file", "inactive_file", "slab_reclaimable")
    return sum(int(pairs.get(f"total_{name}", pairs.get(name, 0))) for name in names)


def bytes_to_begin_with() -> int:
    """What the process holds before anything is loaded, and what its libraries will hold once they compute: their code comes
    into memory as it is run for the first time (14.5 MB of it was measured in a run of OPT on a CPU)."""
    return int(psutil.Process().memory_info().rss) + CODE_BYTES


def give_back_freed() -> None:
    """What the C library keeps of freed memory goes to the system, where that library is glibc: behind tensors of many sizes it
    may be as much as they took."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def peak_resident_bytes() -> int:
    """The most memory that this process has ever held. What getrusage says of it may be what its
    parent held before it started."""
    import resource
    import sys

    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
