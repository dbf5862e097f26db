"""Codec: how the values of a tensor are stored and moved: as they are, or packed into fewer bits.

The arithmetic of sizes is what planning, allocator and engine share, so this file and the codecs do without torch at import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from h2o_flexgen.quant.plain import Plain

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Codec(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def is_view(self) -> bool:
        """Decoding takes neither time nor memory: the values lie in the bytes as they are."""

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Bytes that a tensor takes, whose values have `itemsize` bytes before they are encoded."""

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Values -> bytes of this codec in `out`, which has as many as `nbytes` says."""

    def decode(self, data: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Bytes -> values to compute with: a view of the bytes, or memory of their own."""


CODECS: Mapping[str, Codec] = {codec.name: codec for codec in (Plain(),)}
PLAIN = Plain().name
