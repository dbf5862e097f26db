"""The codec that stores values as they are: encoding and decoding are copies, and whoever can do without makes a view."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Plain:
    name: str = "plain"

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return prod(shape) * itemsize

    def encode(self, values: Tensor, out: Tensor) -> None:
        out.view(values.dtype).view(values.shape).copy_(values)

    def decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(data.view(out.dtype).view(out.shape))

    def product(self, x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor | None:
        return None
