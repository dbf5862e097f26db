"""Which of many cases of one check the default run has: some that stand for all, and the others are slow.

What is slow finds little that is not found without it. `pytest -m "not fuzz"` runs both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def slow(*case: Any) -> Any:
    """A case, or the arguments of one, that the default run leaves out. What else it is marked with stays."""
    if isinstance(case[0], ParameterSet):
        return pytest.param(*case[0].values, marks=[*case[0].marks, pytest.mark.slow], id=case[0].id)
    return pytest.param(*case, marks=pytest.mark.slow)


def first_of(cases: Iterable[Any], number: int) -> list[Any]:
    """A default run has the first ones."""
    return [case if place < number else slow(case) for place, case in enumerate(cases)]


def every_nth(cases: Iterable[Any], number: int) -> list[Any]:
    """A default run has the first one, and each that stands so many places behind the last."""
    return [case if place % number == 0 else slow(case) for place, case in enumerate(cases)]


def spread(rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Cases of several arguments as the functions above take them."""
    return [pytest.param(*row) for row in rows]
