"""The metadata of a GGUF file: keys with values of a few types, read from the beginning of an untrusted file.

Every length and count is held against what the file still has before anything is made of it.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar

from h2o_flexgen.checkpoints.model_files import AGAIN
from h2o_flexgen.core.hints import shown

Value: TypeAlias = "str | bool | int | float | tuple[str, ...] | array[Any]"  # an array holds numbers, all of one type
Kind = TypeVar("Kind", bound=Value)

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # as struct names them
TEXT, LIST = 8, 9
LENGTH_BYTES = 8
FIRST_BYTES = 1 << 20

# far more than any model has, yet what is made of so many is held without harm
MAX_HEADER_BYTES, MOST_ENTRIES, MOST_TEXTS = 1 << 27, 1 << 16, 1 << 22


@dataclass(frozen=True)
class Metadata:
    """What a file says of its model. Each method returns the value of a key, and `otherwise` where the file has no such key;
    without that, and for a value of another type, there is an error that names the key."""

    path: Path
    values: Mapping[str, Value]

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
    for _ in range(count):
        key = header.text()
        if key in values:
            raise header.corrupt(f"the key {shown(key)} stands there twice")
        values[key] = header.value(header.number("I"))
    return Metadata(header.path, values)
