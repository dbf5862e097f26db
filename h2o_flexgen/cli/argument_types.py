"""The types of flags that take numbers and sizes. Every one has bounds, and its message names the value and what is allowed;
argparse puts the name of the flag before it."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable

from h2o_flexgen.core.cores import cores
from h2o_flexgen.core.hints import shown
from h2o_flexgen.core.numbers import decimal_number, whole_number
from h2o_flexgen.core.units import parse_bytes
from h2o_flexgen.core.workload import MOST_TOKENS
from h2o_flexgen.sampling.params import SEED_LIMIT

MOST = 1e9  # of numbers that nothing else bounds


def whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            number = whole_number(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise ArgumentTypeError(f"{shown(text)} is not allowed; give a whole number from {least} to {most}")
        return number

    return read


def number(least: float, most: float = MOST, above: bool = False) -> Callable[[str], float]:
    """`above`: more than `least`, which is not allowed itself."""

    def read(text: str) -> float:
        try:
            value = decimal_number(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most or (above and value == least):
            allowed = f"above {least:g} and at most {most:g}" if above else f"from {least:g} to {most:g}"
            raise ArgumentTypeError(f"{shown(text)} is not allowed; give a number {allowed}")
        return value

    return read


def memory_size(text: str) -> str:
    """A size in bytes, as it was written: it is repeated in messages and in flags that are printed."""
    try:
        parse_bytes(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error
    return text


def threads(text: str) -> int:
    try:
        return whole(1, cores())(text)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}, the cores that this process may use") from None


SHARE = number(0, 1, above=True)
SEED = whole(0, SEED_LIMIT - 1)
TOKENS = whole(1, MOST_TOKENS)  # of a text
SLOTS = whole(0, MOST_TOKENS)  # of a KV cache, which never holds more than the tokens of a text
