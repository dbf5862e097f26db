"""Coding: how the values of a slot are stored: in the dtype of computation, or as a format's bytes. Each head's values of one
token are encoded separately, so that a slot can be rewritten by itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from h2o_flexgen.formats.table import FORMATS, PLAIN
from h2o_flexgen.kernels import operations


@dataclass(frozen=True)
class Coding:
    format: str
    dtype: torch.dtype  # used in computation
    head_dim: int

    @cached_property
    def is_plain(self) -> bool:
        return self.format == PLAIN

    @cached_property
    def kept_dtype(self) -> torch.dtype:
        return self.dtype if self.is_plain else torch.uint8

    @cached_property
    def width(self) -> int:
        """The stored length of a head's values for one token, in elements of `kept_dtype`."""
        return FORMATS[self.format].nbytes((self.head_dim,), self.dtype.itemsize) // self.kept_dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        """Encodes (..., head_dim) to (..., width)."""
        if self.is_plain:
            return values
        kept = torch.empty(*values.shape[:-1], self.width, dtype=torch.uint8, device=values.device)
        operations.encode(self.format, values, kept)
        return kept

    def decode(self, kept: Tensor) -> Tensor:
        """Decodes (..., width) to (..., head_dim)."""
        if self.is_plain:
            return kept
        values = torch.empty(*kept.shape[:-1], self.head_dim, dtype=self.dtype, device=kept.device)
        operations.decode(self.format, kept.contiguous(), values)
        return values
