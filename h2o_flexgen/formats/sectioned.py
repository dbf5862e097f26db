"""Matrices in sections, as quantised safetensors have them: the codes of all rows, then the scales that they share, and what
else there is. Such bytes come from a checkpoint and are kept as they are: nothing here encodes.

A section begins at a multiple of 64 bytes of the tensor. A matrix is moved and multiplied whole: no row has bytes of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Protocol

SECTION_ALIGNMENT = 64
WHOLE = 1 << 40  # rows that lie together: more than any matrix has
SCALE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "e8m0": 1}  # e8m0: a byte b means 2 ** (b - 127)


class Sectioned(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def rows_together(self) -> int: ...

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int: ...

    def sections(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The bytes of each section of a matrix (outputs, inputs)."""

    def outputs_together(self) -> tuple[int, ...]:
        """The outputs that each section has bytes for, together; 0 where they are for all."""


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


def _nbytes(sections: Iterable[int]) -> int:
    return sum(map(_filled, sections))


def _filled(nbytes: int) -> int:
    return -(-nbytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT


@dataclass(frozen=True)
class Fp8:
    """Floats of 8 bits (e4m3), with a scale for each block of outputs and inputs: w = code * scale."""

    block_rows: int  # 0: all
    block_columns: int  # 0: all
    scale: str  # type of the scales
    rows_together: int = WHOLE

    @property
    def name(self) -> str:
        return f"fp8-{self.block_rows}x{self.block_columns}-{self.scale}"

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        rows, columns = shape
        return -(-rows // (self.block_rows or rows)), -(-columns // (self.block_columns or columns))

    def sections(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rows, columns = self.scales_shape(shape)
        return shape[0] * shape[1], rows * columns * SCALE_BYTES[self.scale]

    def outputs_together(self) -> tuple[int, ...]:
        return 1, self.block_rows

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return _nbytes(self.sections(shape))


@dataclass(frozen=True)
class Fp4:
    """Floats of 4 bits (e2m1), two to a byte, the lower half first; 32 inputs of an output share a scale of one byte, a power
    of two: MXFP4."""

    group: int = 32
    rows_together: int = WHOLE

    @property
    def name(self) -> str:
        return f"fp4-{self.group}"

    def sections(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rows, columns = shape
        assert columns % self.group == 0, (self, shape)
        return rows * columns // 2, rows * columns // self.group

    def outputs_together(self) -> tuple[int, ...]:
        return 1, 1

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return _nbytes(self.sections(shape))


@dataclass(frozen=True)
class Int4:
    """Whole numbers of 4 bits, two to a byte, the lower half first; a group of inputs of an output shares a scale and a zero:
    w = (code - zero) * scale. Codes may lie in another order than the inputs, which is then the last section."""

    group: int
    scale: str  # type of the scales
    zeros: bool  # a byte for each group; otherwise every zero is MIDDLE
    ordered: bool  # column j is input order[j] of the matrix
    rows_together: int = WHOLE

    @property
    def name(self) -> str:
        return "-".join(["int4", str(self.group), self.scale, *["zeros"] * self.zeros, *["ordered"] * self.ordered])

    def sections(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rows, columns = shape
        assert columns % self.group == 0, (self, shape)
        groups = rows * columns // self.group
        zeros, order = (groups,) if self.zeros else (), (4 * columns,) if self.ordered else ()
        return rows * columns // 2, groups * SCALE_BYTES[self.scale], *zeros, *order

    def outputs_together(self) -> tuple[int, ...]:
        return 1, 1, *[1] * self.zeros, *[0] * self.ordered

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return _nbytes(self.sections(shape))


MIDDLE = 8  # the zero of codes of 4 bits that have no other
FP8_BLOCKS = ((128, 128), (1, 32), (1, 0), (0, 0))  # a scale for each square, each group, each output, or the whole matrix
FP8 = tuple(Fp8(*block, scale) for block, scale in product(FP8_BLOCKS, SCALE_BYTES))
FP4 = (Fp4(),)
INT4 = tuple(
    Int4(group, scale, zeros, ordered)
    for group, scale, zeros, ordered in product((32, 64, 128), ("float16", "bfloat16"), (False, True), (False, True))
)
