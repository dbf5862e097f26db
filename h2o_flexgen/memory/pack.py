"""Pack: one flat buffer with named views, the only thing that is ever moved. A Layout says where in it each tensor lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from h2o_flexgen.memory.tier import ALIGNMENT, aligned
from h2o_flexgen.quant.codec import CODECS

VIEW_ALIGNMENT = 64  # of every tensor: with less, the same product may come out with other last bits (measured with one row)
PAGE_ALIGNED_FROM = 16 * ALIGNMENT  # larger tensors start at a page, so that disk reads can go straight to their place
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Entry:
    offset: int  # of the first byte
    shape: tuple[int, ...]
    dtype: torch.dtype
    codec: str = "plain"

    @property
    def nbytes(self) -> int:
        return CODECS[self.codec].nbytes(self.shape, self.dtype.itemsize)


@dataclass(frozen=True)
class Layout:
    entries: dict[str, Entry]
    nbytes: int

    @classmethod
    def pack(cls, tensors: Mapping[str, Entry]) -> Layout:
        """One tensor behind the other, wherever the entries said that they lie."""
        entries, end = {}, 0
        for name, entry in tensors.items():
            start = aligned(end, ALIGNMENT if entry.nbytes >= PAGE_ALIGNED_FROM else VIEW_ALIGNMENT)
            entries[name] = replace(entry, offset=start)
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
        data = self.buffer[entry.offset : entry.offset + entry.nbytes]
        return CODECS[entry.codec].decode(data, entry.shape, entry.dtype)

    def range(self, part: Range) -> Tensor:
        return self.view(part.name).view(-1)[part.start : part.stop]

    def views(self) -> dict[str, Tensor]:
        return {name: self.view(name) for name in self.layout.entries}
