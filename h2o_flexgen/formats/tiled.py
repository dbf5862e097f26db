"""Group-wise quantisation of a matrix in tiles of outputs: the codes, scales and minima of formats/grouped.py in another order.

A block is a tile of 16 outputs by a group of 64 inputs: its codes in words of 32 bits, then the scales of its outputs, then
their minima. Neighbours in memory are the same inputs of neighbouring outputs, which is what registers of a product
hold. So only whole tiles can be encoded alone. The last tile is filled up with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from h2o_flexgen.formats.grouped import SHARED_BYTES, Grouped, groups_of

TILE = 16


@dataclass(frozen=True)
class Tiled:
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
