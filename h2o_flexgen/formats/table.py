"""Codec: the form in which a tensor's values are stored and moved: as they are, or packed into fewer bits.

A form is names and sizes. Encoding, decoding and multiplication are in kernels/. People choose some forms (plain values, groups
of 4 or 8 bits); others are those in which checkpoints are published, and are kept as they were found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from h2o_flexgen.formats.blocked import BLOCKED
from h2o_flexgen.formats.grouped import Grouped
from h2o_flexgen.formats.plain import PlainForm
from h2o_flexgen.formats.sectioned import FP4, FP8, INT4, WHOLE, Sectioned
from h2o_flexgen.formats.tiled import Tiled


class Codec(Protocol):
    """A form of stored values. Rows (along the last dimension) lie one after the other, or some of them together; each such
    unit has the same number of bytes and can be encoded alone."""

    @property
    def name(self) -> str: ...

    @property
    def rows_together(self) -> int:
        """The rows that have their bytes interleaved: 1 where each row can be encoded, moved and decoded alone."""

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Bytes of a tensor with values of `itemsize` bytes before they are encoded."""


GROUPED, TILED = (Grouped(4), Grouped(8)), (Tiled(4), Tiled(8))
SECTIONED: tuple[Sectioned, ...] = (*FP8, *FP4, *INT4)
STORED: tuple[Codec, ...] = (*BLOCKED, *SECTIONED)  # forms of checkpoints
CHOSEN: tuple[Codec, ...] = (PlainForm(), *GROUPED, *TILED)  # forms that people choose, and what becomes of them in matrices
CODECS: Mapping[str, Codec] = {codec.name: codec for codec in (*CHOSEN, *STORED)}
PLAIN = PlainForm().name  # its bytes are the values, and are computed with where they lie
ROW_FORMS, MATRIX_FORMS = (tuple(codec.name for codec in codecs) for codecs in (GROUPED, TILED))
BY_BITS = {codec.bits: codec.name for codec in GROUPED}  # the codecs that people choose by their bits
OF_MATRICES = {codec.as_rows.name: codec.name for codec in TILED}  # the form that a matrix has, where it is not that of a row


def of_rows() -> list[str]:
    """The codecs that people choose: each row has bytes of its own."""
    return [name for name, codec in CODECS.items() if codec.rows_together == 1 and codec not in STORED]


def chosen_codec(form: str) -> str:
    """The codec that people choose, of the form that matrices have in it."""
    return {form: codec for codec, form in OF_MATRICES.items()}.get(form, form)


def matrix_form(codec: str) -> str:
    """The form of matrices in a codec that people choose: the same values, in an order that suits products."""
    return OF_MATRICES.get(codec, codec)


def can_be_parted(form: str) -> bool:
    """Whether some rows of a matrix can be decoded without the others."""
    return CODECS[form].rows_together < WHOLE
