"""Tier: a kind of memory. Host memory is the hub: a tier knows how to bring bytes into a host view and how to take them from
one, so that n tiers are n files and not n * n copy paths.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from torch import Tensor

Region = TypeVar("Region")

ALIGNMENT = 4096  # of everything that is allocated or lies in a file of ours: what direct disk access asks for


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment


class Tier(Protocol[Region]):
    """Regions are tensors of bytes on device and host, ranges of a file on disk."""

    meter: Meter[Region]

    def alloc(self, nbytes: int) -> Region: ...

    def free(self, region: Region) -> None: ...

    def read_into(self, region: Region, start: int, out: Tensor) -> None:
        """Bytes [start, start + out.nbytes) of the region -> a host view."""

    def write_from(self, region: Region, start: int, source: Tensor) -> None:
        """A host view -> bytes [start, ...) of the region."""


class Meter(Generic[Region]):
    """Counts what a tier holds and the most that it ever held."""

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
