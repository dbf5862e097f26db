"""Pack: one flat buffer with named views, the only thing that is ever moved. A Layout says where in it each tensor lies."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from h2o_flexgen.memory.tier import ALIGNMENT, aligned

VIEW_ALIGNMENT = 64  # of every tensor: with less, the same product may come out with other last bits (measured with one row)
PAGE_ALIGNED_FROM = 16 * ALIGNMENT  # larger tensors start at a page, so that disk reads can go straight to their place
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Entry:
    offset: int  # of the first value
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    entries: dict[str, Entry]
    nbytes: int

    @classmethod
    def pack(cls, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> Layout:
        """One tensor behind the other."""
        entries, end = {}, 0
        for name, (shape, dtype) in tensors.items():
            entry = Entry(0, shape, dtype)
            start = aligned(end, ALIGNMENT if entry.nbytes >= PAGE_ALIGNED_FROM else VIEW_ALIGNMENT)
            entries[name] = Entry(start, shape, dtype)
            end = start + entry.nbytes
        return cls(entries, aligned(end, ALIGNMENT))


@dataclass(frozen=True)
class Range:
    """Values [start, stop) of a tensor."""

    name: str
    start: int
    stop: int


def slices(tensors: dict[str, tuple[int, int]], parts: int) -> list[list[Range]]:
    """Cuts tensors, given as name -> (values, bytes per value), into parts of nearly the same bytes. Cuts inside a tensor are
    at whole pages from its start, so that direct reads of the parts stay aligned when that of the whole is."""
    total = sum(values * itemsize for values, itemsize in tensors.values())
    cut: list[list[Range]] = [[] for _ in range(parts)]
    offset = 0
    for name, (values, itemsize) in tensors.items():
        page = ALIGNMENT // itemsize
        bounds = [(total * part // parts - offset) // itemsize // page * page for part in range(parts)] + [values]
        bounds = [min(max(bound, 0), values) for bound in bounds]
        for part in range(parts):
            stop = values if part == parts - 1 else bounds[part + 1]
            if bounds[part] < stop:
                cut[part].append(Range(name, bounds[part], stop))
        offset += values * itemsize
    return cut


@dataclass(frozen=True)
class Pack:
    buffer: Tensor  # (bytes,)
    layout: Layout

    def view(self, name: str) -> Tensor:
        entry = self.layout.entries[name]
        return self.buffer[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).view(entry.shape)

    def range(self, part: Range) -> Tensor:
        return self.view(part.name).view(-1)[part.start : part.stop]

    def views(self) -> dict[str, Tensor]:
        return {name: self.view(name) for name in self.layout.entries}
