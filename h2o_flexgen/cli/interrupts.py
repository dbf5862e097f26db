"""Signals while a job runs: the first asks it to end when that costs nothing, the second ends it at once. A library that a
signal must not interrupt in the middle works aside, in a thread of its own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from types import FrameType
from typing import Generic, NoReturn, TypeVar

from h2o_flexgen.cli.errors import ENDING, EndedBySignal

ASKING = ("SIGINT", *ENDING)
Said = TypeVar("Said")


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


@dataclass(frozen=True)
class _End:
    error: BaseException | None


@dataclass(frozen=True)
class Aside(Generic[Said]):
    """`work` is called in a thread of its own. It looks at the event that it is given, and returns soon after it is set.
    Signals are raised where the main thread waits for what the work says."""

    work: Callable[[threading.Event], Iterator[Said]]
    waits: Callable[[], AbstractContextManager[object]]  # the context of each wait

    def said(self) -> Generator[Said, None, None]:
        """What the work yields, as it comes. When this is closed, or an error is raised here, the thread has ended."""
        heard: SimpleQueue[Said | _End] = SimpleQueue()
        ending = threading.Event()
        thread = threading.Thread(target=self._run, args=(heard, ending), name="aside")
        try:
            thread.start()
            while not isinstance(said := self._next(heard), _End):
                yield said
            if said.error is not None:
                raise said.error
        finally:
            ending.set()
            if thread.ident is not None:
                thread.join()

    def _next(self, heard: SimpleQueue[Said | _End]) -> Said | _End:
        with self.waits():
            return heard.get()

    def _run(self, heard: SimpleQueue[Said | _End], ending: threading.Event) -> None:
        error: BaseException | None = None
        try:
            for said in self.work(ending):
                heard.put(said)
        except BaseException as caught:
            error = caught
        heard.put(_End(error))
