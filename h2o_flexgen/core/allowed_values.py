"""What is allowed for an option. Each kind reads values of Python and JSON, and words of the command line, within the same
bounds, and refuses others in one line that names the value and says what is allowed.

Numbers are written as people write them: ASCII digits, a sign, a decimal point and an exponent. Python also reads underscores
between digits and the digits of every other script; in what a person types these are mistakes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeVar

from h2o_flexgen.core.hints import did_you_mean, shown

AUTO = "auto"  # the caller leaves the choice to us
TRUE, FALSE = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")
WHOLE = re.compile(r"[+-]?[0-9]+")
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
MOST_DIGITS = 1000  # Python itself refuses to read a few thousand

T = TypeVar("T")
Key = TypeVar("Key")
Read = Callable[[object], T]  # raises TypeError, ValueError or OverflowError for a value that is not allowed


def whole_number(text: str) -> int:
    """Reads a whole number; raises a ValueError for anything else."""
    if not WHOLE.fullmatch(text.strip()) or len(text) > MOST_DIGITS:
        raise ValueError("not a whole number")
    return int(text)


def decimal_number(text: str) -> float:
    """Reads a decimal number; raises a ValueError for anything else, `nan` and `inf` included."""
    if not DECIMAL.fullmatch(text.strip()):
        raise ValueError("not a number")
    return float(text)


# -- kinds -----------------------------------------------------------------------------------------------------------------


class Allowed:
    """A kind of value. As text it says what is allowed."""

    def read(self, value: object) -> Any:
        """A value of Python or JSON, as it is kept. Raises TypeError, ValueError or OverflowError if it is not allowed."""
        return value

    def typed(self, word: str) -> Any:
        """The value of a word of the command line. A ValueError says what is wrong with it."""
        return word

    def written(self, value: Any) -> str:
        """The value as a word of the command line."""
        return str(value)

    def value(self, name: str, given: object, note: str = "") -> Any:
        """Reads the value of the option that has this name. `note` says more of what is allowed."""
        try:
            return self.read(given)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{name} is {shown(given)}; allowed is {self}{note}") from None


@dataclass(frozen=True)
class Bounds(Allowed):
    """Numbers within bounds, also those of numpy. True is no number, and 2.0 is no whole one."""

    least: int | float
    most: int | float
    is_whole: bool = True
    without_least: bool = False
    note: str = ""

    def read(self, value: object) -> int | float:
        if isinstance(value, bool) or not isinstance(value, Integral if self.is_whole else Real):
            raise TypeError(value)
        found = int(value) if self.is_whole else float(value)  # type: ignore[call-overload]
        if not math.isfinite(found) or not self.least <= found <= self.most or (self.without_least and found == self.least):
            raise ValueError(value)
        return found

    def typed(self, word: str) -> int | float:
        try:
            return self.read(whole_number(word) if self.is_whole else decimal_number(word))
        except (ValueError, OverflowError):
            raise ValueError(f"{shown(word)} is not allowed; give {self}") from None

    def __str__(self) -> str:
        number = "a whole number" if self.is_whole else "a number"
        if self.without_least:
            return f"{number} above {self.least:g} and at most {self.most:g}{self.note}"
        least, most = (self.least, self.most) if self.is_whole else (f"{self.least:g}", f"{self.most:g}")
        return f"{number} from {least} to {most}{self.note}"


@dataclass(frozen=True)
class Choice(Allowed):
    """One of several names."""

    names: Collection[str]

    def read(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.names:
            raise ValueError(value)
        return value

    def __str__(self) -> str:
        return ", ".join(self.names)

    def value(self, name: str, given: object, note: str = "") -> str:
        try:
            return self.read(given)
        except ValueError:
            near = did_you_mean(given, self.names) if isinstance(given, str) else ""
            raise ValueError(f"{name} {shown(given)} is unknown; known: {self}{near}") from None


class Truth(Allowed):
    def read(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise TypeError(value)
        return value

    def typed(self, word: str) -> bool:
        if word.lower() not in (*TRUE, *FALSE):
            raise ValueError(f"{shown(word)} is neither 0 nor 1")
        return word.lower() in TRUE

    def written(self, value: Any) -> str:
        return str(int(value))

    def __str__(self) -> str:
        return "true or false"


TRUTH = Truth()


@dataclass(frozen=True)
class Several(Allowed):
    """A list of values, each of which is typed by itself."""

    each: Allowed
    words: str

    def read(self, value: object) -> tuple[Any, ...]:
        return several(self.each.read)(value)

    def typed(self, word: str) -> Any:
        return self.each.typed(word)

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class Rule(Allowed):
    """Values that a function reads."""

    reader: Read[Any]
    words: str

    def read(self, value: object) -> Any:
        return self.reader(value)

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class Instance(Allowed):
    """Objects of a class. On the command line a file is named that has one."""

    of: type
    how: str  # says what to give

    def value(self, name: str, given: object, note: str = "") -> Any:
        if not isinstance(given, self.of):
            raise ValueError(f"{name} is a {type(given).__name__}; give {self.how}")
        return given


# -- functions that read ---------------------------------------------------------------------------------------------------


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


EOS = "eos_token_id"  # as configs of models call it
LARGEST_ID = 2**31 - 1  # upper bound of token ids: no vocabulary is larger


def check_tokens(what: str, ids: Iterable[int], vocab: int, model: str) -> None:
    """Refuses token ids that the model does not have. `what` begins the error: "prompt 3 has"."""
    wrong = next((token for token in ids if not 0 <= token < vocab), None)
    if wrong is not None:
        raise ValueError(f"{what} the token id {wrong}; {model} knows 0 to {vocab - 1}")


def eos_ids_of(value: object) -> frozenset[int]:
    """The tokens that end a text: an id, a list of them, or none at all."""
    ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if wrong := [one for one in ids if type(one) is not int]:
        raise ValueError(f"{EOS} is {shown(value)}: {shown(wrong[0])} is no token id; give a whole number or a list of them")
    return frozenset(ids)
