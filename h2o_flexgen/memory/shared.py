"""Weights in host memory that several processes share: a file in memory without a name, so that it is freed when the last of
them has ended, however it ends."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from h2o_flexgen.memory.host import HostTier, PageLocker, Pages

NAME = "h2o_flexgen weights"  # shown only in /proc


@dataclass(frozen=True)
class SharedWeights:
    """The weights that processes share. One of them reads the weights from disk, and the others find them in memory."""

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
