"""What a checkpoint's headers say of its tensors: where their bytes lie, and in which format."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from h2o_flexgen.checkpoints.stored_architecture import Rearranged
from h2o_flexgen.core.files import Check
from h2o_flexgen.formats.blocked import Blocked
from h2o_flexgen.formats.sectioned import Sectioned, section_starts
from h2o_flexgen.formats.table import FORMATS, PLAIN

DECODED = "float32"  # the type of values that are decoded to be written in another form


class StoredAs(NamedTuple):
    """The format of a tensor's values in its file."""

    itemsize: int  # bytes of a value, where the format is plain
    format: str = PLAIN
    is_merged: bool = False  # a copy has the values of the file with something added, in the type that is computed with


class Segment(NamedTuple):
    """Bytes of a tensor that lie together in a file."""

    start: int  # the place of the first of them in the tensor
    stored: StoredTensor


class Located(Protocol):
    """A tensor with its bytes in files, in the format that its spec names."""

    @property
    def segments(self) -> tuple[Segment, ...]: ...


@dataclass(frozen=True)
class InSegments:
    segments: tuple[Segment, ...]


def unchecked(located: Located) -> Located:
    """The same places, without the checks of what is read there."""
    return InSegments(tuple(Segment(start, replace(stored, check=None)) for start, stored in located.segments))


class Added(Protocol):
    """What is added to the values that a file has of a matrix."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix in its file."""

    @property
    def description(self) -> str:
        """All that it depends on."""

    def to(self, first: int, rows: Tensor) -> Tensor:
        """Rows of the matrix, from this one on, with what is added to them, in float32."""


@dataclass(frozen=True)
class StoredTensor:
    """The place of one tensor's bytes."""

    name: str
    file: Path
    offset: int  # from the start of the file
    nbytes: int
    dtype: str  # "float32", "float16" or "bfloat16"; any other type keeps the code of its format ("I8")
    shape: tuple[int, ...]
    check: Check | None = field(default=None, compare=False)  # None if it is not known what was written
    arranged: Rearranged | None = None  # how it is made of the file's values; None: they are what lies there
    matrix: StoredMatrix | None = None  # it is made of the values of this one, where they are not plain
    added: Added | None = field(default=None, compare=False)

    @property
    def merged(self) -> Added | None:
        """What is added to the values that it is made of."""
        return self.added if self.matrix is None else self.matrix.added

    @property
    def segments(self) -> tuple[Segment, ...]:
        return (Segment(0, self),)

    @property
    def description(self) -> tuple[str, ...]:
        """The type of its values, where a copy is made of packed ones and has another than these are decoded to."""
        return () if self.matrix is None or self.dtype == DECODED else (self.dtype,)


class Make(Protocol):
    """Makes the bytes of a format that no file has so."""

    @property
    def description(self) -> str:
        """All that they depend on beside the files and the format."""

    def __call__(self, out: Tensor) -> None: ...


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix in a format of its checkpoint's own."""

    name: str
    format: str
    shape: tuple[int, ...]
    sections: tuple[StoredTensor, ...]  # its bytes, in the order of the format's; or what they are made of, if `make` is there
    make: Make | None = field(default=None, compare=False)
    added: Added | None = field(default=None, compare=False)

    @property
    def merged(self) -> Added | None:
        return self.added

    @property
    def description(self) -> tuple[str, ...]:
        """The format of its values in the file."""
        return (self.format,) if self.make is None else (self.format, self.make.description)

    @property
    def file(self) -> Path:
        """The file of its codes."""
        return self.sections[0].file

    @property
    def is_in_place(self) -> bool:
        return self.make is None

    @property
    def segments(self) -> tuple[Segment, ...]:
        assert self.is_in_place, self
        format = FORMATS[self.format]
        if isinstance(format, Blocked):
            (whole,) = self.sections
            return (Segment(0, whole),)
        assert isinstance(format, Sectioned), self
        return tuple(map(Segment, section_starts(format, self.shape), self.sections))
