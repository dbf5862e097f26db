"""Group-wise quantisation: 64 values along a row share a scale and a minimum. Row by row, or in tiles of outputs."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

GROUP = 64
SHARED_BYTES = 2 + 2  # bytes of a scale and a minimum


@dataclass(frozen=True)
class Grouped:
    """A scale and a minimum have 16 bits each; a value is a code of 4 or 8 bits. A row has bytes of its own (its codes, then
    its scales, then its minima), so it can be encoded, moved and rewritten alone. Four bits take 4.5 bits per value, eight
    take 8.5. The minimum is rounded down and the scale up, so that the codes reach from the least to the largest value: no
    value is off by more than half a scale."""

    bits: int
    rows_together: int = 1

    @property
    def name(self) -> str:
        return f"group{self.bits}"

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of one group."""
        return GROUP * self.bits // 8

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return prod(shape[:-1]) * groups_of(shape[-1]) * (self.code_bytes + SHARED_BYTES)


def groups_of(columns: int) -> int:
    """Groups of a row; the last may be filled up."""
    return -(-columns // GROUP)


TILE = 16


@dataclass(frozen=True)
class Tiled:
    """A matrix in tiles of outputs: codes, scales and minima of `Grouped` in another order. A block is a tile of 16 outputs by
    a group of 64 inputs: its codes in words of 32 bits, then the scales of its outputs, then their minima. Neighbours in
    memory are the same inputs of neighbouring outputs, which is what registers of a product hold. So only whole tiles can be
    encoded alone. The last tile is filled up with zeros."""

    bits: int
    rows_together: int = TILE

    @property
    def name(self) -> str:
        return f"tiles{self.bits}"

    @property
    def as_rows(self) -> Grouped:
        """The format that has the same values row by row."""
        return Grouped(self.bits)

    @property
    def block_bytes(self) -> int:
        return TILE * (self.as_rows.code_bytes + SHARED_BYTES)

    def tile_bytes(self, columns: int) -> int:
        return groups_of(columns) * self.block_bytes

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return -(-prod(shape[:-1]) // TILE) * self.tile_bytes(shape[-1])
