"""Group-wise quantisation: 64 values along a row share a scale and a minimum of 16 bits each; a value is a code of 4 or 8 bits.

A row has bytes of its own (its codes, then its scales, then its minima), so it can be encoded, moved and rewritten alone. Four
bits take 4.5 bits per value, eight take 8.5. The minimum is rounded down and the scale up, so that the codes reach from the
least to the largest value: no value is off by more than half a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

GROUP = 64
SHARED_BYTES = 2 + 2  # bytes of a scale and a minimum


@dataclass(frozen=True)
class Grouped:
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
