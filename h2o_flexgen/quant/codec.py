"""Codec: how the values of a tensor are stored and moved: as they are, or packed into fewer bits.

The arithmetic of sizes is what planning, allocator and engine share, so this file and the codecs do without torch at import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from h2o_flexgen.quant.grouped import Grouped
from h2o_flexgen.quant.plain import Plain

if TYPE_CHECKING:
    from torch import Tensor


class Codec(Protocol):
    """A row, along the last dimension, has bytes of its own, all rows as many: they lie one behind the other, and each can be
    encoded and decoded alone."""

    @property
    def name(self) -> str: ...

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Bytes that a tensor takes, whose values have `itemsize` bytes before they are encoded."""

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Values -> bytes of this codec in `out`, which has as many as `nbytes` says."""

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Bytes -> values in `out`, which has their shape and the type that is computed with."""

    def product(self, x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor | None:
        """x (..., inputs) times the transposed of the matrix whose bytes are data (outputs, bytes of a row), plus bias, without
        decoding it; None where it is to be decoded instead."""


CODECS: Mapping[str, Codec] = {codec.name: codec for codec in (Plain(), Grouped(4), Grouped(8))}
PLAIN = Plain().name  # of this codec the bytes are the values, and are computed with where they lie
PACKED = {codec.bits: codec.name for codec in (Grouped(4), Grouped(8))}
