"""Threads of lanes that enter a watch before they issue anything."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any

from h2o_flexgen.memory.threads import Event, Handover

Watch = Callable[[], AbstractContextManager[object]]


class WatchedHandover(Handover):
    def __init__(self, inner: Handover, watch: Watch) -> None:
        self._inner, self._watch = inner, watch

    def event(self) -> Event:
        return self._inner.event()

    def queue(self) -> SimpleQueue[Any]:
        return self._inner.queue()

    def unfinished(self) -> dict[Any, Any]:
        return self._inner.unfinished()

    def thread(self, work: Callable[..., None], given: tuple[object, ...], name: str) -> threading.Thread:
        def watched(*handed: Any) -> None:
            with self._watch():
                work(*handed)

        return self._inner.thread(watched, given, name)
