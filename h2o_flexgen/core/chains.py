"""The errors that led to an error. A chain may end in a circle: `raise error from error` makes one."""

from __future__ import annotations

from collections.abc import Callable, Iterator


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it was raised from."""
    return _chain(error, lambda one: one.__cause__)


def contexts(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that were handled when it was raised."""
    return _chain(error, lambda one: one.__context__)


def _chain(error: BaseException | None, behind: Callable[[BaseException], BaseException | None]) -> Iterator[BaseException]:
    """Each error once."""
    met: list[BaseException] = []
    while error is not None and not any(error is one for one in met):
        met.append(error)
        yield error
        error = behind(error)
