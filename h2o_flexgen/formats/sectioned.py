"""Matrices in sections, as quantised safetensors have them: the codes of all rows, then the scales that they share, and what
else there is. Such bytes come from a checkpoint and are kept as they are: nothing here encodes.

A section begins at a multiple of 64 bytes of the tensor. A matrix is moved and multiplied whole: no row has bytes of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import accumulate
from typing import ClassVar

from h2o_flexgen.formats.byte_layout import ByteLayout

SECTION_ALIGNMENT = 64
WHOLE = 1 << 40  # rows that lie together: more than any matrix has
E8M0 = "e8m0"
SCALE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, E8M0: 1}  # e8m0: a byte b means 2 ** (b - 127)


class Sectioned(ABC):
    """A format of checkpoints in sections."""

    rows_together: ClassVar[int] = WHOLE
    name_in_c: ClassVar[str]
    scale: str  # the type of its scales, one of SCALE_BYTES

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def layout(self) -> ByteLayout: ...

    @property
    def sharing(self) -> str:
        """What shares a scale, for reports."""
        return f"groups of {self.layout.shared_inputs}"

    @abstractmethod
    def sections(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The bytes of each section of a matrix (outputs, inputs)."""

    @abstractmethod
    def outputs_together(self) -> tuple[int, ...]:
        """The outputs that each section has bytes for, together; 0 where they are for all."""

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return sum(map(_filled, self.sections(shape)))


def section_starts(format: Sectioned, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The places at which sections begin."""
    return tuple(accumulate(map(_filled, format.sections(shape)[:-1]), initial=0))


def parts_of_sections(format: Sectioned, shape: tuple[int, ...], first: int, last: int) -> tuple[tuple[int, int], ...]:
    """The ranges of bytes of each section that make the matrix of the outputs from `first` to `last` alone, which begin where
    every section can be cut."""
    ranges = []
    for nbytes, together in zip(format.sections(shape), format.outputs_together()):
        unit = nbytes // -(-shape[0] // together) if together else nbytes
        assert not together or first % together == 0, (format, first)
        ranges.append((first // together * unit, -(-last // together) * unit) if together else (0, nbytes))
    return tuple(ranges)


def _filled(nbytes: int) -> int:
    return -(-nbytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
