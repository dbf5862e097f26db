"""Host memory: arenas of exact size on huge pages, page-locked where a device reads them.

Arenas come from mmap and not from torch, because torch's pinned allocator rounds up to powers of two, because direct disk reads
want page alignment, and because reads into small pages were measured three times slower than into huge ones.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from h2o_flexgen.memory.tier import Meter, aligned


class HostTier:
    def __init__(self, pinned: bool = False) -> None:
        self.meter: Meter[Tensor] = Meter()
        self._pinned = pinned
        self._spare: list[Tensor] = []

    def alloc(self, nbytes: int) -> Tensor:
        """Page-aligned bytes: of what was freed the smallest that is large enough, else new ones."""
        size = max(aligned(nbytes), mmap.PAGESIZE)
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
        for region in self._spare:
            if self._pinned:
                torch.cuda.cudart().cudaHostUnregister(region.data_ptr())
            self.meter.remove(region.nbytes)
        self._spare = []

    def _map(self, size: int) -> Tensor:
        try:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise MemoryError(f"host memory: {size / 1e9:.2f} GB could not be had ({error}); lower the CPU share") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        region = torch.frombuffer(pages, dtype=torch.uint8)
        if self._pinned:
            _page_lock(region)
        self.meter.add(size)
        return region

    def read_into(self, region: Tensor, start: int, out: Tensor) -> None:
        out.view(-1).view(torch.uint8).copy_(region[start : start + out.nbytes])

    def write_from(self, region: Tensor, start: int, source: Tensor) -> None:
        region[start : start + source.nbytes].copy_(source.contiguous().view(-1).view(torch.uint8))


def _page_lock(region: Tensor) -> None:
    status = int(torch.cuda.cudart().cudaHostRegister(region.data_ptr(), region.nbytes, 0))
    if status != 0:
        raise MemoryError(
            f"page-locking {region.nbytes / 1e9:.2f} GB of host memory failed (CUDA error {status}); "
            "try --pin-weight 0 or raise the limit on locked memory (ulimit -l)"
        )
