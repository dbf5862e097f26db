"""Interrupts that Python drops, and the errors that led to an error. A signal is raised as an error in whatever code runs at
that moment. If that is a `__del__`, or a callback of a weak reference, of the garbage collector or of ctypes, Python prints the
error and continues as if there had been no signal. Here it is raised again, in the code that continues."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it was raised from."""
    return _chain(error, lambda one: one.__cause__)


def contexts(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that were handled when it was raised."""
    return _chain(error, lambda one: one.__context__)


def _chain(error: BaseException | None, behind: Callable[[BaseException], BaseException | None]) -> Iterator[BaseException]:
    """Each error once: a chain may end in a circle, as `raise error from error` makes one."""
    met: list[BaseException] = []
    while error is not None and not any(error is one for one in met):
        met.append(error)
        yield error
        error = behind(error)


SOON_SECONDS = 0.001  # by then the code that dropped it has mostly ended; if not, it is dropped and raised once more


@contextmanager
def raised_again() -> Iterator[None]:
    """A context in which an interrupt that is dropped is raised again: soon, or else at the end."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread is interrupted
        yield
        return
    dropped = _Dropped(sys.unraisablehook)
    dropped.begin()
    try:
        yield
    finally:
        dropped.end()
    dropped.raise_it()


class _Dropped:
    """The interrupt that was dropped last, until it is raised again. Python tells a hook what it drops. An error that the hook
    raises is dropped too, so the hook sets a timer."""

    def __init__(self, hook: Callable[[Any], object]) -> None:
        self._hook = hook  # that was there before
        self._error: KeyboardInterrupt | None = None
        self._has_ended = False
        self._handler: Any = None  # of the timer's signal, that was there before

    def begin(self) -> None:
        if hasattr(signal, "setitimer"):
            self._handler = signal.signal(signal.SIGALRM, self._alarm)
        sys.unraisablehook = self._notice

    def end(self) -> None:
        self._has_ended = True
        sys.unraisablehook = self._hook
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, self._handler)

    def raise_it(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _alarm(self, number: int, frame: FrameType | None) -> None:
        """Raises it, unless an interrupt is handled now: what is cleaned up is not disturbed."""
        if not self._has_ended and not any(isinstance(error, KeyboardInterrupt) for error in contexts(sys.exc_info()[1])):
            self.raise_it()

    def _notice(self, unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._hook(unraisable)
            return
        try:
            self._keep(unraisable.exc_value)
        except KeyboardInterrupt as further:  # a signal came just now
            self._keep(further)

    def _keep(self, error: KeyboardInterrupt) -> None:
        """Keeps one of the same kind: the error itself would keep what its frames hold."""
        self._error = type(error)(*error.args)
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, SOON_SECONDS)
