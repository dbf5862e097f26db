"""Pack: one flat buffer of named tensors, the only thing that is ever moved. A Layout says where in it each tensor lies.

What is moved are bytes, whatever the format; only computation reads them as values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import ALIGNMENT, Arena, aligned
from h2o_flexgen.formats.table import FORMATS, PLAIN
from h2o_flexgen.kernels.matrix import DecodeBuffer, PackedMatrix
from h2o_flexgen.kernels.operations import decode_rows

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class PackEntry:
    offset: int  # of the first byte
    shape: tuple[int, ...]
    dtype: torch.dtype
    format: str = PLAIN

    @property
    def nbytes(self) -> int:
        return FORMATS[self.format].nbytes(self.shape, self.dtype.itemsize)


@dataclass(frozen=True)
class Layout:
    entries: dict[str, PackEntry]
    nbytes: int

    @classmethod
    def pack(cls, tensors: Mapping[str, PackEntry]) -> Layout:
        """A layout with one tensor after the other; the offsets in the entries are replaced."""
        return cls.placed(tensors, Arena.of(entry.nbytes for entry in tensors.values()))

    @classmethod
    def placed(cls, tensors: Mapping[str, PackEntry], arena: Arena) -> Layout:
        """A layout with the tensors at the places of an arena."""
        placed = zip(tensors.items(), arena.starts, strict=True)
        return cls({name: replace(entry, offset=start) for (name, entry), start in placed}, arena.nbytes)


@dataclass(frozen=True)
class Range:
    """Bytes [start, stop) of a tensor."""

    name: str
    start: int
    stop: int


def slices(tensors: Mapping[str, int], parts: int, places: Mapping[str, int]) -> list[list[Range]]:
    """Cuts tensors, given as name -> bytes, into parts of nearly equal size. Cuts inside a tensor are between pages: so direct
    reads of the parts are aligned if that of the whole is, and no value is divided. `places`: where in a page tensors begin, by
    name; others begin with a page."""
    total = sum(tensors.values())
    cut: list[list[Range]] = [[] for _ in range(parts)]
    offset = latest = 0  # the latest part that has something: no tensor begins in an earlier one than that before it
    for name, nbytes in tensors.items():
        before = places.get(name, 0)
        bounds = [(total * part // parts - offset) // ALIGNMENT * ALIGNMENT - before for part in range(parts)] + [nbytes]
        bounds = [0 if part <= latest else min(max(bound, 0), nbytes) for part, bound in enumerate(bounds)]
        for part in range(parts):
            if bounds[part] < bounds[part + 1]:
                cut[part].append(Range(name, bounds[part], bounds[part + 1]))
                latest = part
        offset += nbytes
    return cut


@dataclass(frozen=True)
class Pack:
    buffer: Tensor  # (bytes,)
    layout: Layout

    def bytes(self, name: str) -> Tensor:
        """The bytes of a tensor, which are read, loaded and encoded into."""
        entry = self.layout.entries[name]
        return self.buffer[entry.offset : entry.offset + entry.nbytes]

    def range(self, part: Range) -> Tensor:
        return self.bytes(part.name)[part.start : part.stop]

    def pages(self, part: Range) -> Tensor:
        """The whole pages that a part lies in."""
        start = self.start(part)
        return self.buffer[start // ALIGNMENT * ALIGNMENT : aligned(start + part.stop - part.start)]

    def start(self, part: Range) -> int:
        """The place in the buffer at which the part begins."""
        return self.layout.entries[part.name].offset + part.start

    def view(self, name: str) -> Tensor:
        """The values of a plain tensor, where they lie."""
        entry = self.layout.entries[name]
        assert entry.format == PLAIN, entry
        return self.bytes(name).view(entry.dtype).view(entry.shape)

    def matrix(self, name: str, room: DecodeBuffer | None, product: str) -> PackedMatrix:
        """`product`: the op by which the matrix is multiplied."""
        entry = self.layout.entries[name]
        return PackedMatrix(self._units(name), entry.format, entry.shape[0], room, product)

    def decode_rows(self, name: str, rows: Tensor, out: Tensor) -> None:
        """The values of some rows of a tensor: the same as if all were decoded and these taken."""
        decode_rows(self.layout.entries[name].format, self._units(name), rows, out)

    def _units(self, name: str) -> Tensor:
        """The bytes of any tensor by the rows that lie together: (units, bytes of a unit)."""
        entry = self.layout.entries[name]
        return self.bytes(name).view(-(-entry.shape[0] // FORMATS[entry.format].rows_together), -1)


def copies_between(source: Pack, target: Pack, parts: Iterable[Range]) -> list[tuple[Tensor, Tensor]]:
    """The copies (to, from) that bring parts of tensors to another pack. Parts that lie alike in both are one copy, with the
    few bytes between them. Each copy costs a call of the driver, and small ones do not use the link well."""
    order = {name: place for place, name in enumerate(target.layout.entries)}
    runs: list[tuple[int, int, int]] = []  # start in the target, start in the source, bytes
    place = -1  # of the tensor before, in the target
    for part in parts:
        to, origin, nbytes = target.start(part), source.start(part), part.stop - part.start
        follows, place = order[part.name] - place <= 1, order[part.name]
        if runs and follows:
            begun_to, begun_origin, before = runs[-1]
            gap = to - (begun_to + before)
            if to - begun_to == origin - begun_origin and 0 <= gap < ALIGNMENT:
                runs[-1] = begun_to, begun_origin, before + gap + nbytes
                continue
        runs.append((to, origin, nbytes))
    return [(target.buffer[to : to + nbytes], source.buffer[origin : origin + nbytes]) for to, origin, nbytes in runs]
