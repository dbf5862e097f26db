"""Group-wise quantisation: 64 values along a row share a scale and a minimum of 16 bits each; a value is a code of 4 or 8 bits.

A row has bytes of its own (its codes, then its scales, then its minima), so it can be encoded, moved and rewritten alone. Four
bits take 4.5 bits per value, eight take 8.5. The minimum is rounded down and the scale up, so that the codes reach from the
least to the largest value: no value is off by more than half a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 64
SHARED_BYTES = 2 + 2  # of a scale and a minimum


@dataclass(frozen=True)
class Grouped:
    bits: int

    @property
    def name(self) -> str:
        return f"group{self.bits}"

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        groups = -(-shape[-1] // GROUP)
        return prod(shape[:-1]) * groups * (GROUP * self.bits // 8 + SHARED_BYTES)

    def encode(self, values: Tensor, out: Tensor) -> None:
        from h2o_flexgen.kernels.group_encode import group_encode

        rows = prod(values.shape[:-1])
        group_encode(values.reshape(rows, -1), out.view(rows, -1), self.bits)

    def decode(self, data: Tensor, out: Tensor) -> None:
        from h2o_flexgen.kernels.group_decode import group_decode

        rows = prod(out.shape[:-1])
        group_decode(data.view(rows, -1), out.view(rows, -1), self.bits)

    def product(self, x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor | None:
        from h2o_flexgen.kernels.group_product import group_product

        return group_product(x, data, bias, self.bits)
