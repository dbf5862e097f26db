"""Working memory that recorded programs share. Tensors get parts of it and give them back when nothing refers to them any more.

Programs run one after the other, also those of several threads, and none needs what another has left in it. So it is as large
as the largest of them wants.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import insort
from contextlib import suppress
from threading import Lock
from weakref import finalize

import torch
from torch import Tensor

from h2o_flexgen.formats.kernel_sizes import ROOM_CHUNK
from h2o_flexgen.kernels.raw_memory import address_of

PART = 64  # bytes: a line of the cache, at which all parts begin


class WorkingRoom:
    def __init__(self) -> None:
        self.in_use = Lock()  # by a program that runs or is recorded
        self._chunks: list[mmap.mmap] = []
        self._free: list[tuple[int, int]] = []  # address and bytes of each gap, by address
        self._returned: list[tuple[int, int]] = []  # parts that are free again, and are not among the gaps yet

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._chunks))

    def empty(self) -> None:
        """Returns all pages to the system until they are written again. Addresses stay."""
        with self.in_use:
            for chunk in self._chunks:
                with suppress(OSError, AttributeError):  # if the system can
                    chunk.madvise(mmap.MADV_DONTNEED)

    def take(self, nbytes: int) -> Tensor:
        """Memory of this many bytes. It is free again when the tensor and all its views are gone."""
        whole = max(1, -(-nbytes // PART)) * PART
        address = self._address_of(whole)
        part = (ctypes.c_uint8 * max(1, nbytes)).from_address(address)
        finalize(part, self._give_back, address, whole).atexit = False
        return torch.frombuffer(part, dtype=torch.uint8)[:nbytes]

    def _give_back(self, address: int, nbytes: int) -> None:
        """Called by the collector of garbage, at any moment and in any thread."""
        self._returned.append((address, nbytes))

    def _address_of(self, nbytes: int) -> int:
        while self._returned:
            self._add_gap(*self._returned.pop())
        for place, (address, gap) in enumerate(self._free):
            if gap >= nbytes:
                self._free[place : place + 1] = [(address + nbytes, gap - nbytes)] if gap > nbytes else []
                return address
        chunk = mmap.mmap(-1, max(ROOM_CHUNK, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # begins at a page
        self._chunks.append(chunk)
        self._add_gap(address_of(torch.frombuffer(chunk, dtype=torch.uint8)), len(chunk) // PART * PART)
        return self._address_of(nbytes)

    def _add_gap(self, address: int, nbytes: int) -> None:
        insort(self._free, (address, nbytes))
        joined: list[tuple[int, int]] = []
        for begin, gap in self._free:
            if joined and sum(joined[-1]) == begin:
                joined[-1] = joined[-1][0], joined[-1][1] + gap
            else:
                joined.append((begin, gap))
        self._free = joined
