"""Pool: the memory that everything is measured with. It is filled once, with bytes that are sound values of every type and of
every packed format, and each measurement takes them for what it needs. Memory that a process touches for the first time is ten
times as slow as any other, so a part of its own for each measurement would take longer than all measurements."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import ALIGNMENT
from h2o_flexgen.memory.device import DeviceTier
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.profiling.time_limit import TimeLimit

LEAST_BYTES = 1 << 20
SMALLEST, LARGEST = 0.02, 0.5  # of the values: far from what a type with few bits takes for zero or for infinity


@dataclass(frozen=True, eq=False)
class BytePool:
    data: Tensor  # (bytes,)

    @classmethod
    def filled(cls, memory: HostTier | DeviceTier, nbytes: int, limit: TimeLimit) -> BytePool:
        """As many bytes as can be filled in the limit, `nbytes` at most."""
        data, done = memory.alloc(nbytes)[:nbytes], min(nbytes, LEAST_BYTES)
        data[:done].copy_(sound_bytes(done))
        while done < nbytes:
            before, step = limit.left, min(done, nbytes - done)
            data[done : done + step].copy_(data[:step])
            done, after = done + step, limit.left
            if 2 * (before - after) > after:
                break
        return cls(data[:done])

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The first bytes as values."""
        return self.data[: prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def in_turn(self, nbytes: int) -> Iterator[Tensor]:
        """An endless series of ranges of so many bytes, each after the last; together they are more than a cache holds."""
        step = -(-nbytes // ALIGNMENT) * ALIGNMENT
        starts = range(0, max(step, self.nbytes - nbytes + 1), step)
        return itertools.cycle([self.data[start : start + nbytes] for start in starts])

    def halves(self) -> tuple[Tensor, Tensor]:
        half = self.nbytes // 2 // ALIGNMENT * ALIGNMENT
        return self.data[:half], self.data[half : 2 * half]


def sound_bytes(nbytes: int) -> Tensor:
    """Random values in bfloat16. Two neighbours are a value in float32 with the size of the second, and in float16 they
    are values about 1."""
    count = -(-nbytes // 2)
    sizes = torch.rand(count).mul_(LARGEST - SMALLEST).add_(SMALLEST)
    signs = torch.randint(0, 2, (count,)).mul_(2).sub_(1)
    return (sizes * signs).to(torch.bfloat16).view(torch.uint8)[:nbytes]
