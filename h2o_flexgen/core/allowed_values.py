"""Checks of values given in Python: each is converted to what is kept, or refused in one line that names it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar

from h2o_flexgen.core.hints import shown

AUTO = "auto"  # the caller leaves the choice to us

T = TypeVar("T")
Key = TypeVar("Key")
Read = Callable[[object], T]  # raises TypeError, ValueError or OverflowError for a value that is not allowed


class Rule(NamedTuple):
    read: Read[Any]
    allowed: str  # what is allowed, in words

    def value(self, name: str, given: object) -> Any:
        try:
            return self.read(given)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{name} is {shown(given)}; allowed is {self.allowed}") from None


def whole(least: int, most: float = math.inf) -> Read[int]:
    """Reads a whole number, also one of numpy; 2.0 and True are refused."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
            raise ValueError(value)
        return int(value)

    return read


def number(least: float, most: float = math.inf, without_least: bool = False) -> Read[float]:
    """Reads any finite number."""

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(value)
        found = float(value)
        if not math.isfinite(found) or not least <= found <= most or (without_least and found == least):
            raise ValueError(value)
        return found

    return read


@dataclass(frozen=True)
class Bounds:
    """The numbers that are allowed, as Python writes them and as text."""

    least: int | float
    most: int | float
    is_whole: bool = True
    without_least: bool = False

    def read(self, value: object) -> int | float:
        if self.is_whole:
            return whole(int(self.least), self.most)(value)
        return number(self.least, self.most, self.without_least)(value)

    def __str__(self) -> str:
        if self.is_whole:
            return f"a whole number, {self.least} to {self.most}"
        return f"above {self.least:g} and at most {self.most:g}" if self.without_least else f"{self.least:g} to {self.most:g}"


def truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(value)
    return value


def text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(value)
    return value


def several(read: Read[T]) -> Read[tuple[T, ...]]:
    """Reads every item of a list, a tuple, a set or an array."""

    def read_all(values: object) -> tuple[T, ...]:
        found = values.tolist() if hasattr(values, "tolist") else values
        if isinstance(found, (str, bytes)) or not isinstance(found, (Sequence, Set)):
            raise TypeError(values)
        return tuple(map(read, found))

    return read_all


def any_of(read: Read[tuple[T, ...]]) -> Read[tuple[T, ...]]:
    """Refuses an empty list."""

    def read_some(values: object) -> tuple[T, ...]:
        found = read(values)
        if not found:
            raise ValueError(values)
        return found

    return read_some


def mapping(key: Read[Key], value: Read[T]) -> Read[dict[Key, T]]:
    def read(given: object) -> dict[Key, T]:
        if not isinstance(given, Mapping):
            raise TypeError(given)
        return {key(name): value(each) for name, each in given.items()}

    return read


def optional(read: Read[T], without: T | None = None) -> Read[T | None]:
    return lambda value: without if value is None else read(value)
