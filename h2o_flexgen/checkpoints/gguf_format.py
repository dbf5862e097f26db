"""The GGUF format, versions 2 and 3: what a file says of its model, and where its tensors lie, be they in one file or in parts.

A file is a header of metadata (keys with values of a few types) and tensors, and the data behind it. Files are not trusted.
Every length and count of a header is held against what the file still has before anything is made of it. Headers are checked to
the last byte, because later the data are read by offset alone, without a look at the content.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar

from h2o_flexgen.checkpoints.model_files import AGAIN, refuse_pointer
from h2o_flexgen.core.buffer_layout import aligned
from h2o_flexgen.core.hints import reason, shown
from h2o_flexgen.core.model_spec import DTYPE_BYTES
from h2o_flexgen.formats.blocked import Blocked
from h2o_flexgen.formats.table import BLOCKED

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_DIMENSIONS = 4
USUAL_ALIGNMENT, MOST_ALIGNMENT = 32, 1 << 20
ALIGNMENT_KEY = "general.alignment"
PART_NUMBER, PARTS, TENSORS_IN_ALL = "split.no", "split.count", "split.tensors.count"
NAME_OF_PART = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

# ggml's numbers of its types; of many only the name is needed, to say that they are not read
TYPES: Mapping[int, str] = {
    0: "float32",
    1: "float16",
    9: "q8_1",
    10: "q2_K",
    11: "q3_K",
    15: "q8_K",
    **dict(enumerate(("iq2_xxs", "iq2_xs", "iq3_xxs", "iq1_s", "iq4_nl", "iq3_s", "iq2_s", "iq4_xs"), start=16)),
    **dict(enumerate(("int8", "int16", "int32", "int64", "float64", "iq1_m", "bfloat16"), start=24)),
    34: "tq1_0",
    35: "tq2_0",
    40: "nvfp4",
    41: "q1_0",
    **{format.gguf_type: format.name for format in BLOCKED},
}
BLOCKS: Mapping[str, Blocked] = {format.name: format for format in BLOCKED}
READ = (*DTYPE_BYTES, *BLOCKS)

Value: TypeAlias = "str | bool | int | float | tuple[str, ...] | array[Any]"  # an array holds numbers, all of one type
Kind = TypeVar("Kind", bound=Value)

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # as struct names them
TEXT, LIST = 8, 9
LENGTH_BYTES, LIST_HEAD_BYTES = 8, 12
FIRST_BYTES = 1 << 20

# far more than any model has, yet what is made of so many is held without harm
MAX_HEADER_BYTES, MOST_ENTRIES, MOST_TEXTS = 1 << 27, 1 << 16, 1 << 22


# -- metadata ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metadata:
    """What a file says of its model. Each method returns the value of a key, and `otherwise` where the file has no such key;
    without that, and for a value of another type, there is an error that names the key."""

    path: Path
    values: Mapping[str, Value]
    places: Mapping[str, int] = field(default_factory=dict)  # of lists: where the file has the first entry of each

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def text(self, key: str, otherwise: str | None = None) -> str:
        return self._value(key, otherwise, (str,), "text")

    def flag(self, key: str, otherwise: bool | None = None) -> bool:
        return self._value(key, otherwise, (bool,), "yes or no")

    def whole(self, key: str, otherwise: int | None = None) -> int:
        return self._value(key, otherwise, (int,), "whole number")

    def number(self, key: str, otherwise: float | None = None) -> float:
        found = float(self._value(key, otherwise, (int, float), "number"))
        if not math.isfinite(found):
            raise self.wrong(key, "finite number")
        return found

    def texts(self, key: str, otherwise: tuple[str, ...] | None = None) -> tuple[str, ...]:
        return self._value(key, otherwise, (tuple,), "list of texts")

    def wholes(self, key: str, otherwise: array[int] | None = None) -> array[int]:
        return self._numbers(key, otherwise, of_wholes=True)

    def numbers(self, key: str, otherwise: array[float] | None = None) -> array[float]:
        return self._numbers(key, otherwise, of_wholes=False)

    def wrong(self, key: str, wanted: str) -> ValueError:
        """The error for a value that is not what its key promises."""
        return ValueError(f"{self.path} has {shown(self.values.get(key))} as {shown(key)}, which is no {wanted}; {AGAIN}")

    def _numbers(self, key: str, otherwise: array[Any] | None, of_wholes: bool) -> array[Any]:
        wanted = "list of whole numbers" if of_wholes else "list of numbers with a point"
        found = self._value(key, otherwise, (array,), wanted)
        if (found.typecode in "fd") == of_wholes:
            raise self.wrong(key, wanted)
        return found

    def _value(self, key: str, otherwise: Kind | None, kinds: tuple[type, ...], wanted: str) -> Kind:
        found = self.values.get(key, otherwise)
        if found is None:
            raise ValueError(f"{self.path} does not say {shown(key)}; {AGAIN}")
        if type(found) not in kinds:  # which a bool is no int by
            raise self.wrong(key, wanted)
        return found  # type: ignore[return-value]


class HeaderBytes:
    """The beginning of a file, which is read as far as it is asked for."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.position = 0
        self._file = file
        self._size = size
        self._data = b""

    def take(self, length: int) -> bytes:
        end = self.position + length
        if end > len(self._data):
            self._read_on(end)
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def first(self, length: int) -> bytes:
        """Up to so many bytes of the very beginning. None of them is taken."""
        found = self.take(min(length, self._size))
        self.position = 0
        return found

    def number(self, code: str) -> Any:
        """One number of the type that `struct` has this letter for."""
        (found,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))
        return found

    def text(self) -> str:
        """A text behind its length. There are hundreds of thousands of them, so nothing is cut out but the text itself."""
        begin = self.position + LENGTH_BYTES
        if begin > len(self._data):
            self._read_on(begin)
        end = begin + int.from_bytes(self._data[self.position : begin], "little")
        if end > len(self._data):
            self._read_on(end)
        self.position = end
        try:
            return self._data[begin:end].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt(f"{shown(self._data[begin:end])} is no text in UTF-8") from error

    def value(self, kind: int) -> Value:
        if kind == TEXT:
            return self.text()
        if kind == LIST:
            return self._list()
        if kind in NUMBERS:
            found: Value = self.number(NUMBERS[kind])
            return found
        raise self.corrupt(f"a value has the type {kind}, which the format does not have")

    def require(self, length: int) -> None:
        """Refuses what is longer than the rest of the file, before anything is made of it."""
        if self.position + length > self._size:
            need = self.position + length
            raise ValueError(f"{self.path} is truncated: its header needs at least {need} bytes, it has {self._size}; {AGAIN}")

    def limit(self, count: int, most: int, what: str) -> None:
        if count > most:
            raise self.corrupt(f"{count} {what} are more than the {most} that are read")

    def corrupt(self, what: str) -> ValueError:
        return ValueError(f"{self.path} has a corrupt header: {what}; {AGAIN}")

    def _list(self) -> Value:
        kind, count = self.number("I"), self.number("Q")
        if kind == TEXT:
            self.require(count * LENGTH_BYTES)
            self.limit(count, MOST_TEXTS, "texts in a list")
            return tuple([self.text() for _ in range(count)])
        if kind not in NUMBERS:
            raise self.corrupt(f"a list holds values of the type {kind}, of which there are no lists")
        found: array[Any] = array("B" if NUMBERS[kind] == "?" else NUMBERS[kind])
        found.frombytes(self.take(count * found.itemsize))
        if sys.byteorder == "big":
            found.byteswap()
        return found

    def _read_on(self, end: int) -> None:
        self.require(end - self.position)
        if end > MAX_HEADER_BYTES:
            raise self.corrupt(f"it would take more than {MAX_HEADER_BYTES} bytes")
        wanted = min(max(end, 2 * len(self._data), FIRST_BYTES), self._size, MAX_HEADER_BYTES)
        self._data += self._file.read(wanted - len(self._data))
        if len(self._data) < end:  # it has become shorter since its size was asked
            raise ValueError(f"{self.path} is truncated; {AGAIN}")


def read_values(header: HeaderBytes, count: int) -> Metadata:
    """The keys and values that come next in a header."""
    header.limit(count, MOST_ENTRIES, "keys")
    values: dict[str, Value] = {}
    places: dict[str, int] = {}
    for _ in range(count):
        key = header.text()
        if key in values:
            raise header.corrupt(f"the key {shown(key)} stands there twice")
        if (kind := header.number("I")) == LIST:
            places[key] = header.position + LIST_HEAD_BYTES
        values[key] = header.value(kind)
    return Metadata(header.path, values, places)


# -- tensors -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GgufTensor:
    """The place of one tensor's bytes, under its name in the file."""

    name: str
    file: Path
    offset: int  # from the start of the file
    nbytes: int
    format: str  # one of READ
    shape: tuple[int, ...]  # the values of a row come last, as in torch


@dataclass(frozen=True)
class Gguf:
    """A model in one file, or in several parts, of which the first has the metadata."""

    metadata: Metadata
    tensors: tuple[GgufTensor, ...]


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and not path.is_dir()


def has_magic(path: Path) -> bool:
    """Whether a file begins as GGUF files do, whatever its name is."""
    if not path.is_file():  # reading a pipe would wait
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:  # the reader of the file will report it
        return False


def first_part(path: Path) -> Path:
    """The file with the metadata, for any part of a model."""
    found = NAME_OF_PART.fullmatch(path.name)
    return path.with_name(_name_of_part(found["prefix"], 1, int(found["count"]))) if found else path


def refuse_no_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is no file" if path.exists() else f"{path} is missing; give a file that is there")


def read_metadata(path: Path) -> Metadata:
    """What the file says of its model, without its tensors."""
    metadata, _ = _read(first_part(path), with_tensors=False)
    return metadata


def read_gguf(path: Path) -> Gguf:
    """The metadata and all tensors of a model, of all parts."""
    start = first_part(path)
    metadata, tensors = _read(start)
    for number, part in enumerate(_parts(metadata), start=1):
        if number > 1:
            of_part, more = _read(part)
            _check_part(of_part, number, metadata)
            tensors += more
    _check_names(start, tensors)
    if TENSORS_IN_ALL in metadata and len(tensors) != metadata.whole(TENSORS_IN_ALL):
        raise ValueError(f"{start} promises {metadata.whole(TENSORS_IN_ALL)} tensors, its parts have {len(tensors)}; {AGAIN}")
    return Gguf(metadata, tuple(tensors))


def _read(path: Path, with_tensors: bool = True) -> tuple[Metadata, list[GgufTensor]]:
    try:
        refuse_no_file(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            header = HeaderBytes(path, file, size)
            count, keys = _start(header)
            metadata = read_values(header, keys)
            return metadata, _read_tensors(header, count, metadata, size) if with_tensors else []
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {reason(error)}") from error


def _start(header: HeaderBytes) -> tuple[int, int]:
    """The numbers of tensors and of keys, once it is clear that this is a file of the format."""
    start = header.first(64)
    refuse_pointer(header.path, start)
    if not start.startswith(MAGIC):
        why = f"it begins with {shown(start[: len(MAGIC)])}" if start else "it is empty"
        raise ValueError(f"{header.path} is no GGUF file: {why}; {AGAIN}")
    header.take(len(MAGIC))
    version: int = header.number("I")
    if version not in VERSIONS:
        of_other_order = version > 0 and version & 0xFFFF == 0
        what = "is written for processors of the other byte order" if of_other_order else f"has version {version} of GGUF"
        raise ValueError(f"{header.path} {what}; give a little-endian one of version {' or '.join(map(str, VERSIONS))}")
    return header.number("Q"), header.number("Q")


def _read_tensors(header: HeaderBytes, count: int, metadata: Metadata, size: int) -> list[GgufTensor]:
    alignment = metadata.whole(ALIGNMENT_KEY, USUAL_ALIGNMENT)
    if not 0 < alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
        raise metadata.wrong(ALIGNMENT_KEY, f"power of two up to {MOST_ALIGNMENT}")
    header.limit(count, MOST_ENTRIES, "tensors")
    tensors = []
    for _ in range(count):
        tensors.append(_tensor(header, alignment))
    start = aligned(header.position, alignment)
    placed = [replace(tensor, offset=start + tensor.offset) for tensor in tensors]
    _check_places(header, placed, size)
    return placed


def _tensor(header: HeaderBytes, alignment: int) -> GgufTensor:
    """The next tensor of a header; its offset is still that from the start of the data."""
    name, dimensions = header.text(), header.number("I")
    if dimensions > MOST_DIMENSIONS:
        raise header.corrupt(f"tensor {shown(name)} has {dimensions} dimensions")
    shape: tuple[int, ...] = tuple(reversed([header.number("Q") for _ in range(dimensions)]))
    number, offset = header.number("I"), header.number("Q")
    format = TYPES.get(number, f"number {number}")
    if format not in READ:
        raise ValueError(f"{header.path} has the tensor {shown(name)} of the type {format}; {', '.join(READ)} are read")
    if format in BLOCKS and (not shape or shape[-1] % BLOCKS[format].values):
        what = f"no rows of whole blocks of {BLOCKS[format].values} ({format})"
        raise header.corrupt(f"tensor {shown(name)} of shape {list(shape)} has {what}")
    if offset % alignment:
        raise header.corrupt(f"tensor {shown(name)} lies at {offset}, which is no multiple of {alignment}")
    nbytes = BLOCKS[format].nbytes(shape, 1) if format in BLOCKS else prod(shape) * DTYPE_BYTES[format]
    return GgufTensor(name, header.path, offset, nbytes, format, shape)


def _check_places(header: HeaderBytes, tensors: list[GgufTensor], size: int) -> None:
    """Refuses tensors that share bytes, or that have bytes outside of the file."""
    ordered = sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes))
    for before, tensor in pairwise(ordered):
        if before.offset + before.nbytes > tensor.offset:
            raise header.corrupt(f"tensors {shown(before.name)} and {shown(tensor.name)} share bytes")
    end = max((tensor.offset + tensor.nbytes for tensor in ordered), default=0)
    if end > size:
        raise ValueError(f"{header.path} is truncated: by its header it should have {end} bytes, it has {size}; {AGAIN}")


def _name_of_part(prefix: str, number: int, count: int) -> str:
    return f"{prefix}-{number:05d}-of-{count:05d}{SUFFIX}"


def _parts(metadata: Metadata) -> list[Path]:
    """The files of a model, of which the first has this metadata; none is missing."""
    count, path = metadata.whole(PARTS, 1), metadata.path
    if count <= 1:
        return [path]
    found = NAME_OF_PART.fullmatch(path.name)
    if found is None or (int(found["number"]), int(found["count"])) != (1, count):
        wanted = _name_of_part("...", 1, count)
        raise ValueError(f"{path} is the first of {count} parts, but not named {wanted}; give the parts their names again")
    _check_part(metadata, 1, metadata)
    parts = [path.with_name(_name_of_part(found["prefix"], number, count)) for number in range(1, count + 1)]
    missing = [part for part in parts if not part.is_file()]
    if missing:
        raise ValueError(f"{missing[0]} is missing ({len(missing)} of the {count} parts of the model); {AGAIN}")
    return parts


def _check_part(part: Metadata, number: int, first: Metadata) -> None:
    """Refuses a file that stands in the place of another part."""
    said = part.whole(PART_NUMBER) + 1, part.whole(PARTS)
    if said != (number, first.whole(PARTS)):
        raise ValueError(f"{part.path} says that it is part {said[0]} of {said[1]}, contrary to its name; {AGAIN}")


def _check_names(path: Path, tensors: list[GgufTensor]) -> None:
    counted = Counter(tensor.name for tensor in tensors)
    for name, times in counted.most_common(1):
        if times > 1:
            raise ValueError(f"{path} has {times} tensors of the name {shown(name)}; {AGAIN}")
