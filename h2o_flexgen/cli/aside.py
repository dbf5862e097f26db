"""Work in a thread of its own, for a library that a signal must not interrupt in the middle: signals are raised where the main
thread waits for what the work says, and the work is asked to end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Thread
from typing import Generic, TypeVar

Said = TypeVar("Said")


@dataclass(frozen=True)
class _End:
    error: BaseException | None


@dataclass(frozen=True)
class Aside(Generic[Said]):
    """`work` is called in the thread. It looks at the event that it is given, and returns soon after it is set."""

    work: Callable[[Event], Iterator[Said]]
    waits: Callable[[], AbstractContextManager[object]]  # the context of each wait

    def said(self) -> Generator[Said, None, None]:
        """What the work yields, as it comes. When this is closed, or an error is raised here, the thread has ended."""
        heard: SimpleQueue[Said | _End] = SimpleQueue()
        ending = Event()
        thread = Thread(target=self._run, args=(heard, ending), name="aside")
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

    def _run(self, heard: SimpleQueue[Said | _End], ending: Event) -> None:
        error: BaseException | None = None
        try:
            for said in self.work(ending):
                heard.put(said)
        except BaseException as caught:
            error = caught
        heard.put(_End(error))
