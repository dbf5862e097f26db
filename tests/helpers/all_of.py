"""Many small cases in one test: where a case takes less than what surrounds a test, one for each would take twice the time."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from tests.helpers.pairwise import Name, each_apart


def all_of(choices: Mapping[Name, Sequence[Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Calls a test with every combination of these values, and says with which one it failed."""
    cases = [each_apart(dict(zip(choices, values))) for values in itertools.product(*choices.values())]

    def in_one(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def each_in_turn(**given: object) -> None:
            for case in cases:
                try:
                    test(**given, **case)
                except Exception as error:
                    raise AssertionError(f"with {', '.join(f'{name}={value!r}' for name, value in case.items())}") from error

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in cases[0]]
        each_in_turn.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return each_in_turn

    return in_one
