"""Codec: the form in which the values of a tensor are stored and moved: as they are, or packed into fewer bits.

A form is names and sizes. What turns values into it, out of it, and multiplies with it is in kernels/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from h2o_flexgen.quant.grouped import Grouped
from h2o_flexgen.quant.plain import Plain


class Codec(Protocol):
    """A row, along the last dimension, has bytes of its own, all rows as many: they lie one behind the other, and each can be
    encoded and decoded alone."""

    @property
    def name(self) -> str: ...

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Bytes that a tensor takes, whose values have `itemsize` bytes before they are encoded."""


GROUPED = (Grouped(4), Grouped(8))
CODECS: Mapping[str, Codec] = {codec.name: codec for codec in (Plain(), *GROUPED)}
PLAIN = Plain().name  # of this codec the bytes are the values, and are computed with where they lie
PACKED = tuple(name for name in CODECS if name != PLAIN)
BY_BITS = {codec.bits: codec.name for codec in GROUPED}  # the codecs that people ask for by their bits
