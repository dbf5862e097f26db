"""Codec: the form in which a tensor's values are stored and moved: as they are, or packed into fewer bits.

A form is names and sizes. Encoding, decoding and multiplication are in kernels/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from h2o_flexgen.quant.grouped import Grouped
from h2o_flexgen.quant.plain import Plain


class Codec(Protocol):
    """A form of stored values. Each row (along the last dimension) has the same number of bytes, one row behind the other, so
    each can be encoded and decoded alone."""

    @property
    def name(self) -> str: ...

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Bytes of a tensor whose values have `itemsize` bytes before they are encoded."""


GROUPED = (Grouped(4), Grouped(8))
CODECS: Mapping[str, Codec] = {codec.name: codec for codec in (Plain(), *GROUPED)}
PLAIN = Plain().name  # its bytes are the values, and are computed with where they lie
PACKED = tuple(name for name in CODECS if name != PLAIN)
BY_BITS = {codec.bits: codec.name for codec in GROUPED}  # the codecs that people choose by their bits
