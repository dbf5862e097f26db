"""ByteLayout: how the bytes of a checkpoint's own format lie. Decoders in torch and in Triton are made of it. Those in C say it
in their own words (kernels/stored_values.h), and tests hold them together.

The codes of a row are seen as words of 32 bits, eight codes of 4 bits or four of 8. What codes share (a scale, a minimum, a
zero) lies in the block of the word, or in sections of its own. Matrices in sections (`Sectioned`) are those of quantised
safetensors: the codes of all rows, then the scales that they share, and what else there is. Such bytes come from a checkpoint
and are kept as they are: nothing here encodes. A section begins at a multiple of 64 bytes of the tensor. Such a matrix is
moved and multiplied whole: no row has bytes of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

INTEGER, FLOAT4, FLOAT8 = "integer", "float4", "float8"  # kinds of codes
SCALE, SCALE_AND_MINIMUM = "scale", "scale and minimum"  # of a block, as float16
SIX_BITS = "six bits"  # scales and minima of 32 values in 6 bits, times those of their block
SIGNED_SIX_BITS = "signed six bits"  # scales of 32 values, times that of their block; the upper 2 bits lie before the lower 4
SIXTEENS = "sixteens"  # scales of 16 values in 8 bits, times that of their block
EXPONENT = "exponent"  # of a block: half a power of two
SECTIONS = "sections"
FIFTH_BITS = "fifth bits"  # in one word for 32 values
PLANES_OF_ONE, PLANES_OF_TWO = "planes of one bit", "planes of two bits"
WORD_BYTES = 4


@dataclass(frozen=True)
class ByteLayout:
    block_values: int = 0  # 0: there are no blocks
    block_bytes: int = WORD_BYTES
    codes: str = INTEGER
    bits: int = 4  # of a code in its word
    table: tuple[int, ...] = ()  # what codes of 4 bits stand for, with the zero; nothing: themselves
    zero: int = 0  # is taken off each code, where it is the same for all
    is_signed: bool = False  # with its uppermost bit turned a code has no sign
    span: int = 0  # the lower codes of so many bytes come before their upper ones; 0: they take turns
    codes_at: int = 0  # in a block
    upper: str = ""  # how bits above the fourth lie
    upper_at: int = 0
    shared: str = SECTIONS
    shared_at: int = 0
    shared_rows: int = 1  # rows and inputs that share a scale of a section; 0: all
    shared_inputs: int = 0
    has_zeros: bool = False  # in a section
    is_ordered: bool = False  # column j belongs to input order[j]

    @property
    def block_words(self) -> int:
        return max(1, self.block_values * self.bits // 32)

    @property
    def has_table(self) -> bool:
        return bool(self.table)

    @property
    def table_words(self) -> tuple[int, ...]:
        """The table in words of four."""
        return tuple(int.from_bytes(self.table[at : at + 4], "little") for at in range(0, len(self.table), 4))

    @property
    def takes_turns(self) -> bool:
        """Whether the lower and the upper code of a byte belong to neighbours."""
        return self.bits == 4 and self.span == 0

    def row_bytes(self, inputs: int) -> int:
        """The bytes of the codes, or blocks, of a row."""
        if self.shared == SECTIONS:
            return inputs * self.bits // 8
        return inputs * self.bits // 32 // self.block_words * self.block_bytes

    @property
    def has_minimum(self) -> bool:
        return self.shared in (SCALE_AND_MINIMUM, SIX_BITS)

    @property
    def sharing_inputs(self) -> int:
        """Inputs of a whole number that share a scale."""
        return 16 if self.shared == SIXTEENS else self.shared_inputs or 32

    @property
    def has_halves(self) -> bool:
        """Whether the lower and the upper codes of a word have scales of their own, which are costly to find."""
        return self.shared in (SIX_BITS, SIXTEENS)

    @property
    def words_together(self) -> int:
        """Words that a thread takes because they share their scales."""
        return 2 if self.has_halves else 1

    @property
    def apart(self) -> int:
        """How far these are apart."""
        return 4 if self.shared == SIX_BITS else 2


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
