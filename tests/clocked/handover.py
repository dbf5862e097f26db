"""What threads wait for each other with: each hands on what its thread knows to be over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from typing import Any

from h2o_flexgen.memory.threads import Handover
from tests.clocked.checker import current
from tests.clocked.clock import Clock
from tests.clocked.tensor import Watched


def _known() -> Clock:
    checker = current()
    with checker.lock:
        return checker.snapshot()


def _learn(clock: Clock) -> None:
    checker = current()
    with checker.lock:
        checker.host.join(clock)


class ClockedEvent(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self._clock = Clock()

    def set(self) -> None:
        self._clock.join(_known())
        super().set()

    def wait(self, timeout: float | None = None) -> bool:
        is_set = super().wait(timeout)
        _learn(self._clock)
        return is_set

    def is_set(self) -> bool:
        is_set = super().is_set()
        if is_set:
            _learn(self._clock)
        return is_set


class ClockedQueue:
    """As much of a SimpleQueue as lanes use."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Any, Clock]] = SimpleQueue()

    def put(self, item: Any) -> None:
        self._queue.put((item, _known()))

    def get(self) -> Any:
        item, clock = self._queue.get()
        _learn(clock)
        return item


class ClockedThread(threading.Thread):
    def start(self) -> None:
        self._before = _known()
        super().start()

    def run(self) -> None:
        _learn(self._before)
        with Watched():
            super().run()
        self._behind = _known()

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if not self.is_alive():
            _learn(self._behind)


class Unfinished(dict[Any, Any]):
    """A thread that misses a key learns what the one that took it away knew."""

    def __init__(self) -> None:
        super().__init__()
        self._over: dict[Hashable, Clock] = {}

    def pop(self, key: Hashable, *default: Any) -> Any:
        if key in self:
            self._over.setdefault(key, Clock()).join(_known())
        return super().pop(key, *default)

    def get(self, key: Hashable, default: Any = None) -> Any:
        found = super().get(key, default)
        if found is None and key in self._over:
            _learn(self._over[key])
        return found


class ClockedHandover(Handover):
    def event(self) -> threading.Event:
        return ClockedEvent()

    def queue(self) -> SimpleQueue[Any]:
        return ClockedQueue()  # type: ignore[return-value]

    def thread(self, work: Callable[..., None], given: tuple[object, ...], name: str) -> threading.Thread:
        return ClockedThread(target=work, args=given, name=name, daemon=True)

    def unfinished(self) -> dict[Any, Any]:
        return Unfinished()
