"""Rows of blocks, as GGUF files have them: a block has some values of a row, with the numbers that they share among them.

Such bytes come from a checkpoint and are kept as they are: nothing here encodes. Each row has bytes of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Blocked:
    name: str
    values: int  # of a block
    block_bytes: int
    rows_together: int = 1

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        assert shape[-1] % self.values == 0, (self, shape)
        return prod(shape) // self.values * self.block_bytes


SMALL, LARGE = 32, 256  # values of a block; large ones share two numbers, and their groups of 16 or 32 have others
BLOCKED = (
    Blocked("q4_0", SMALL, 18),
    Blocked("q4_1", SMALL, 20),
    Blocked("q5_0", SMALL, 22),
    Blocked("q5_1", SMALL, 24),
    Blocked("q8_0", SMALL, 34),
    Blocked("q4_K", LARGE, 144),
    Blocked("q5_K", LARGE, 176),
    Blocked("q6_K", LARGE, 210),
    Blocked("mxfp4", SMALL, 17),
)
