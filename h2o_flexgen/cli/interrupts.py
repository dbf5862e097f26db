"""Signals while a job runs: the first asks it to end when that costs nothing, the second ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from h2o_flexgen.cli.errors import ENDING, EndedBySignal

ASKING = ("SIGINT", *ENDING)


class Interrupts:
    """What was asked by signals. Until `listen` a signal ends the work at once, as everywhere."""

    def __init__(self, on_first: Callable[[], object]) -> None:
        self._on_first = on_first
        self._listens = False
        self._asked: int | None = None  # the number of the first signal

    def listen(self) -> None:
        self._listens = True

    @property
    def are_asked(self) -> bool:
        return self._asked is not None

    def end(self) -> NoReturn:
        """Ends the command as the signal would have ended it."""
        assert self._asked is not None, "no signal came"
        if self._asked == signal.SIGINT:
            raise KeyboardInterrupt
        raise EndedBySignal(self._asked)

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """A context in which a signal ends the work at once, as before `listen`: while nothing is done that it could harm."""
        listened, self._listens = self._listens, False
        try:
            yield
        finally:
            self._listens = listened

    @contextmanager
    def heard(self) -> Iterator[None]:
        """A context in which signals are heard. One that is ignored, as under `nohup`, stays ignored."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [int(signal.Signals[name]) for name in ASKING]
        before = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}

        def hear(number: int, frame: FrameType | None) -> None:
            if not self._listens or self.are_asked:
                before[number](number, frame)
            else:
                self._asked = number
                self._on_first()

        for number in before:
            signal.signal(number, hear)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
