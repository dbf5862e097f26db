"""The format that stores values as they are."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class PlainFormat:
    name: str = "plain"
    rows_together: int = 1

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return prod(shape) * itemsize
