"""Formats: how a tensor's values are stored and moved: as they are, or packed into fewer bits.

A format is names and sizes. Encoding, decoding and multiplication are in kernels/. People choose some formats (plain values,
groups of 4 or 8 bits); others are those in which checkpoints are published, and are kept as they were found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

from h2o_flexgen.formats.blocked import IN_GGUF, Blocked
from h2o_flexgen.formats.byte_layout import WHOLE, Sectioned
from h2o_flexgen.formats.fp8 import FP8
from h2o_flexgen.formats.grouped import Grouped, Tiled
from h2o_flexgen.formats.int4 import INT4
from h2o_flexgen.formats.mxfp4 import MXFP4_BLOCKS, MXFP4_SECTIONS


class Format(Protocol):
    """A format of stored values. Rows (along the last dimension) lie one after the other, or some of them together; each such
    unit has the same number of bytes and can be encoded alone."""

    @property
    def name(self) -> str: ...

    @property
    def rows_together(self) -> int:
        """The rows that have their bytes interleaved: 1 where each row can be encoded, moved and decoded alone."""

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Bytes of a tensor with values of `itemsize` bytes before they are encoded."""


@dataclass(frozen=True)
class PlainFormat:
    """Values as they are."""

    name: str = "plain"
    rows_together: int = 1

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return prod(shape) * itemsize


Stored = Blocked | Sectioned  # a format of checkpoints
BLOCKED: tuple[Blocked, ...] = (*IN_GGUF, MXFP4_BLOCKS)
SECTIONED: tuple[Sectioned, ...] = (*FP8, MXFP4_SECTIONS, *INT4)
STORED: tuple[Stored, ...] = (*BLOCKED, *SECTIONED)
GROUPED, TILED = (Grouped(4), Grouped(8)), (Tiled(4), Tiled(8))
CHOSEN: tuple[Format, ...] = (PlainFormat(), *GROUPED, *TILED)  # by people, and what becomes of them in matrices
FORMATS: Mapping[str, Format] = {format.name: format for format in (*CHOSEN, *STORED)}
PLAIN = PlainFormat().name  # its bytes are the values, and are computed with where they lie
ROW_FORMATS, MATRIX_FORMATS = (tuple(format.name for format in formats) for formats in (GROUPED, TILED))
BY_BITS = {format.bits: format.name for format in GROUPED}  # the formats that people choose by their bits
OF_MATRICES = {format.as_rows.name: format.name for format in TILED}  # of a matrix, where it is not that of a row


def of_rows() -> list[str]:
    """The formats that people choose: each row has bytes of its own."""
    return [name for name, format in FORMATS.items() if format.rows_together == 1 and format not in STORED]


def chosen_format(format: str) -> str:
    """The format that people choose, of the format that matrices have in it."""
    return {of_matrix: of_row for of_row, of_matrix in OF_MATRICES.items()}.get(format, format)


def matrix_format(format: str) -> str:
    """The format of matrices in a format that people choose: the same values, in an order that suits products."""
    return OF_MATRICES.get(format, format)


def can_be_parted(format: str) -> bool:
    """Whether some rows of a matrix can be decoded without the others."""
    return FORMATS[format].rows_together < WHOLE
