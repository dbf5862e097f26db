"""Host memory: arenas of exact size on huge pages, page-locked if a device reads them; weights that several processes share;
the meter of what a tier holds, which every kind of memory has; and a shortage of it.

Errors that mean a shortage are recognised. A block is stopped when host memory is so nearly exhausted that the system might
kill the process.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import psutil
import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import region_bytes
from h2o_flexgen.core.site import DEVICE, HOST
from h2o_flexgen.memory.threads import ADVICE, CANNOT_START


class Meter:
    """Counts what a tier holds and the most that it ever held. How data is moved to a tier and from it is defined by its store,
    because each kind of data has a layout of its own."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.peak_bytes = 0

    def add(self, nbytes: int) -> None:
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def remove(self, nbytes: int) -> None:
        self.used_bytes -= nbytes

    def restart_peak(self) -> None:
        self.peak_bytes = self.used_bytes


CODE_BYTES = 16 << 20
# Products in 16 bits are compiled for each number of rows. Two caches keep them, oneDNN's and that of the layer through which
# torch calls it, each with a copy of its own: 0.27 MB, as measured for matrices of many sizes.
KEPT_PRODUCTS, PRODUCT_BYTES = 16, 280_000
FREED_BYTES = 256 << 20  # more than glibc was seen to keep of what was freed (122 MB)
LITTLE_BYTES = 128 << 10  # from here on glibc maps blocks, until it learns
GIVEN_BACK_FROM, MAPPED_FROM = -1, -3  # parameters of `mallopt`: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD


class PageLocker(Protocol):
    """An object that page-locks host memory, so that copies between it and a device need no thread to wait for them."""

    def page_lock(self, address: int, nbytes: int) -> None:
        """Page-locks a range. A MemoryError says that it was refused; then nothing is left locked."""

    def page_unlock(self, address: int) -> None:
        """Undoes the `page_lock` of the range that begins here."""


class Pages(mmap.mmap):
    """Pages that are unlocked before they are freed. Tensors over them keep them alive, so they are freed with the last one."""

    _unlock: Callable[[], None] | None = None

    def lock(self, locker: PageLocker, address: int) -> None:
        locker.page_lock(address, len(self))
        self._unlock = partial(locker.page_unlock, address)

    def unlock(self) -> None:
        unlock, self._unlock = self._unlock, None
        if unlock is not None:
            unlock()

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():  # the driver ends with the process; modules may have gone before
            self.unlock()


class HostTier:
    def __init__(self, locker: PageLocker | None = None) -> None:
        """`locker` page-locks the memory; None: it is not page-locked."""
        self.meter = Meter()
        self._locker = locker
        self._mapped: list[Tensor] = []  # all regions
        self._spare: list[Tensor] = []  # the regions that are not in use
        self._pages: dict[int, Pages] = {}  # of the regions, by address

    @property
    def spare_bytes(self) -> int:
        """Bytes that are held but not in use."""
        return sum(region.nbytes for region in self._spare)

    def alloc(self, nbytes: int) -> Tensor:
        """Page-aligned bytes: the smallest freed region that is large enough, or else a new region."""
        size = region_bytes(nbytes)
        fitting = [region for region in self._spare if region.nbytes >= size]
        if not fitting:
            return self._map(size)
        best = min(fitting, key=lambda region: region.nbytes)
        self._spare = [region for region in self._spare if region is not best]
        return best

    def free(self, region: Tensor) -> None:
        """Keeps the region for the next block: fresh memory was measured ten times slower than reused memory."""
        self._spare.append(region)

    def trim(self) -> None:
        """Returns freed regions to the system."""
        self._let_go(self._spare)

    def close(self) -> None:
        """Frees all regions. Memory that is still referenced is unlocked now, and freed with the last view of it."""
        self._let_go(self._mapped)

    def _let_go(self, regions: list[Tensor]) -> None:
        gone = {id(region) for region in regions}
        for region in regions:
            self._pages.pop(region.data_ptr()).unlock()
            self.meter.remove(region.nbytes)
        self._mapped = [region for region in self._mapped if id(region) not in gone]
        self._spare = [region for region in self._spare if id(region) not in gone]

    def _map(self, size: int) -> Tensor:
        try:
            pages = self._new_pages(size)
        except OSError as error:
            raise MemoryError(
                f"CPU memory: {size / 1e9:.2f} GB could not be allocated ({error}); lower the CPU share"
            ) from error
        with suppress(OSError, AttributeError):  # if the system has huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        region = torch.frombuffer(pages, dtype=torch.uint8)
        if self._locker is not None:
            pages.lock(self._locker, region.data_ptr())
        self._pages[region.data_ptr()] = pages
        self._mapped.append(region)
        self.meter.add(size)
        return region

    def _new_pages(self, size: int) -> Pages:
        """Pages of zeros."""
        try:
            return Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except ValueError as error:  # more than the address space
            raise OSError(str(error)) from error


def available_bytes() -> int:
    """Memory available without swapping, within the limit of every control group of this process, such as a container's."""
    free = psutil.virtual_memory().available
    for folder, limit, used in _control_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")):
        with suppress(OSError, ValueError):  # no such file, or "max"
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            free = min(free, left + _reclaimable_bytes(folder / "memory.stat"))
    return int(max(0, free))


def whole_bytes() -> int:
    """Memory that there is, free or not, within the same limits."""
    whole = psutil.virtual_memory().total
    for folder, limit, _ in _control_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")):
        with suppress(OSError, ValueError):
            whole = min(whole, int((folder / limit).read_text()))
    return int(whole)


def _control_groups(own: Path, root: Path) -> Iterator[tuple[Path, str, str]]:
    """The process's control groups and those above them, each with the names of its limit and use. In a container the path may
    be that of the host, which does not exist there; the root is then the container's."""
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
    """A control group's page cache and the kernel's memory of files, which count as used but are given up when needed."""
    try:
        pairs = dict(line.split() for line in statistics.read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return 0
    # version 1 counts a group alone by these names; with "total_" before them it includes all groups below, as its use does
    names = ("active_file", "inactive_file", "slab_reclaimable")
    return sum(int(pairs.get(f"total_{name}", pairs.get(name, 0))) for name in names)


def bytes_to_begin_with() -> int:
    """The bytes that the process holds before anything is loaded, and those that its libraries will hold once they compute:
    code is loaded when it first runs (14.5 MB were measured in a run of OPT on a CPU), and some is compiled for products."""
    return int(psutil.Process().memory_info().rss) + CODE_BYTES + 2 * KEPT_PRODUCTS * PRODUCT_BYTES


def keep_little_freed() -> None:
    """Makes glibc give back at once what tensors have freed, to the end of the process. By itself it learns from the sizes of
    tensors, up to 32 MB, to keep such blocks in its heap, and gives back nothing but its end, and that only from twice as much
    on: in prompts of some models half of the heap was free. Fresh memory costs prompts some percent of their time."""
    with suppress(OSError, AttributeError):
        for parameter in (MAPPED_FROM, GIVEN_BACK_FROM):
            ctypes.CDLL(None).mallopt(parameter, LITTLE_BYTES)


def give_back_freed() -> None:
    """Returns freed memory to the system if the C library is glibc, which may keep it: after tensors of many sizes, as much as
    they took."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def peak_resident_bytes() -> int:
    """The most memory that this process has ever held. The value of getrusage may include what its parent held before."""
    import resource  # not everywhere

    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


NAME = "h2o_flexgen weights"  # shown only in /proc


@dataclass(frozen=True)
class SharedWeights:
    """The weights that processes share. One of them reads the weights from disk, and the others find them in memory: in a file
    there without a name, so that it is freed when the last of them has ended, however it ends."""

    descriptor: int  # of the file, which each process maps
    take: Callable[[Tensor], None] | None = None  # receives bytes that stay on a device; None for the process that reads

    @property
    def reads(self) -> bool:
        return self.take is None


def file_in_memory() -> int:
    """The descriptor of an empty file without a name."""
    if not hasattr(os, "memfd_create"):
        raise ValueError("processes can share their weights only on Linux; run one process here")
    return os.memfd_create(NAME)


class SharedTier(HostTier):
    """Host memory for one region: the weights that stay there, which are the same in every process."""

    def __init__(self, shared: SharedWeights, locker: PageLocker | None = None) -> None:
        super().__init__(locker)
        self._shared = shared

    def _new_pages(self, size: int) -> Pages:
        descriptor = self._shared.descriptor
        if self._shared.reads:
            os.ftruncate(descriptor, size)
        elif os.fstat(descriptor).st_size != size:
            held = os.fstat(descriptor).st_size
            raise ValueError(f"the shared weights have {held} bytes, but this process's plan has {size} in memory")
        return Pages(descriptor, size, flags=mmap.MAP_SHARED)


# -- shortage --------------------------------------------------------------------------------------------------------------

# More than decode allocates between two checks, and less than is left by a plan that fills its memory: a plan that just fits
# must not be stopped.
FLOOR_BYTES = 32 << 20
SECONDS_BETWEEN_LOOKS = 0.2  # a check takes a quarter of a millisecond

ON_HOST = ("can't allocate memory", "not enough memory")  # in torch's RuntimeErrors
ON_DEVICE = ("out of memory", "ALLOC_FAILED")  # from the driver, and from libraries that need working memory


@dataclass(frozen=True)
class Shortage:
    tier: str  # host or device
    reason: str  # one line


def shortage_of(error: BaseException | None) -> Shortage | None:
    """The lack of memory behind an error; None if it is of another kind."""
    if error is None:
        return None
    text = str(error)
    of_device = isinstance(error, torch.OutOfMemoryError) or isinstance(error.__cause__, torch.OutOfMemoryError)
    if of_device or (isinstance(error, RuntimeError) and any(words in text for words in ON_DEVICE)):
        return Shortage(DEVICE, _line(error))
    of_system = isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN)
    if isinstance(error, RuntimeError) and CANNOT_START in text:
        return Shortage(HOST, ADVICE)
    of_torch = isinstance(error, RuntimeError) and any(words in text for words in ON_HOST)
    return Shortage(HOST, _line(error)) if isinstance(error, MemoryError) or of_system or of_torch else None


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


class HostGuard:
    """Checks from time to time, while a block runs, that host memory is not nearly exhausted.

    Only memory that is available without swapping counts, within every control group: without it, the system swaps or kills
    processes. Page cache counts as free. The process's own size is not compared with its budget: it includes more than the run,
    and a budget that is exceeded a little does no harm while there is memory. A block is only stopped if it holds at least as
    much as should be left: if other processes took the memory, a smaller block would not free enough."""

    def __init__(self, spare_bytes: int = 0) -> None:
        """`spare_bytes` were left by earlier blocks, for this one to use."""
        self._process = psutil.Process()
        self._before = self._process.memory_info().rss - spare_bytes
        self._next_look = 0.0

    def look(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + SECONDS_BETWEEN_LOOKS
        left = available_bytes()
        if left < FLOOR_BYTES and self._process.memory_info().rss - self._before >= FLOOR_BYTES:
            raise MemoryError(f"CPU memory: only {left / 1e6:.0f} MB are left before the system swaps or kills processes")
