"""Matrices that a file has in another order, or among others: how they are made of the values that lie there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # architectures name these, and what they name is read before torch is
    from torch import Tensor


class Rearranged(Protocol):
    """How a matrix is made of values that its file has in another order, or among others."""

    def of(self, values: Tensor) -> Tensor:
        """Its rows (rows, columns), of all values that lie there."""


@dataclass(frozen=True)
class Turned:
    """The file has the transposed matrix: its columns lie one behind the other. It may have other rows, too."""

    rows: int  # in the file
    own: range | None = None  # None: all

    def of(self, values: Tensor) -> Tensor:
        every = values.view(-1, self.rows).T
        return every if self.own is None else every[self.own.start : self.own.stop]


@dataclass(frozen=True)
class OfHeads:
    """Some rows of each head in a matrix of all heads. The matrix of a head may be transposed."""

    heads: int
    rows: range  # of a head
    columns: int
    is_turned: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = (self.columns, len(self.rows)) if self.is_turned else (len(self.rows), self.columns)
        return self.heads * rows, columns

    def of(self, values: Tensor) -> Tensor:
        own = values.view(self.heads, -1, self.columns)[:, self.rows.start : self.rows.stop]
        return (own.transpose(1, 2) if self.is_turned else own).reshape(self.shape)
