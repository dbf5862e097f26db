"""Codec: the form in which a tensor's values are stored and moved: as they are, or packed into fewer bits.

A form is names and sizes. Encoding, decoding and multiplication are in kernels/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from h2o_flexgen.quant.grouped import Grouped
from h2o_flexgen.quant.plain import Plain
from h2o_flexgen.quant.tiled import Tiled


class Codec(Protocol):
    """A form of stored values. Rows (along the last dimension) lie one behind the other, or some of them together; each such
    unit has the same number of bytes and can be encoded alone."""

    @property
    def name(self) -> str: ...

    @property
    def rows_together(self) -> int:
        """The rows whose bytes lie among each other: 1 where each row can be encoded, moved and decoded alone."""

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Bytes of a tensor whose values have `itemsize` bytes before they are encoded."""


GROUPED, TILED = (Grouped(4), Grouped(8)), (Tiled(4), Tiled(8))
CODECS: Mapping[str, Codec] = {codec.name: codec for codec in (Plain(), *GROUPED, *TILED)}
PLAIN = Plain().name  # its bytes are the values, and are computed with where they lie
ROW_FORMS, MATRIX_FORMS = (tuple(codec.name for codec in codecs) for codecs in (GROUPED, TILED))
BY_BITS = {codec.bits: codec.name for codec in GROUPED}  # the codecs that people choose by their bits
OF_MATRICES = {codec.as_rows.name: codec.name for codec in TILED}  # the form that a matrix has, where it is not that of a row


def of_rows() -> list[str]:
    """The codecs that people choose: each row has bytes of its own."""
    return [name for name, codec in CODECS.items() if codec.rows_together == 1]


def chosen_codec(form: str) -> str:
    """The codec that people choose, of the form that matrices have in it."""
    return {form: codec for codec, form in OF_MATRICES.items()}.get(form, form)


def matrix_form(codec: str) -> str:
    """The form of matrices in a codec that people choose: the same values, in an order that suits products."""
    return OF_MATRICES.get(codec, codec)
