"""Devices whose streams do nothing for random while at every mark and behind every wait."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from random import Random

from h2o_flexgen.memory.device import Device, Marker
from tests.delayed.watched import Watch, WatchedHandover

LEAST, MOST = 1 << 10, 1 << 21  # cycles that a stream is late: a millisecond at most, on most GPUs
ON_TIME = 0.5  # share of the marks and waits at which it is not


class Delays:
    """Cycles that come of a seed and of how many were drawn before on the same lane."""

    def __init__(self, seed: int, sleep: Callable[[int], object], late: Collection[str] | None = None) -> None:
        """`late`: the lanes that may be late; None: all."""
        self._seed, self._sleep, self._late, self._lock = seed, sleep, late, threading.Lock()
        self._lane = threading.local()
        self.drawn: Counter[str] = Counter()  # by lane

    @contextmanager
    def on(self, lane: str) -> Iterator[None]:
        before = getattr(self._lane, "name", "")
        self._lane.name = lane
        try:
            yield
        finally:
            self._lane.name = before

    def some(self) -> None:
        """Makes the current stream late, or not."""
        lane = getattr(self._lane, "name", "")
        with self._lock:
            self.drawn[lane] += 1
            random = Random(f"{self._seed} {lane} {self.drawn[lane]}")
        if random.random() >= ON_TIME and (self._late is None or lane in self._late):
            self._sleep(round(LEAST * (MOST / LEAST) ** random.random()))


def delayed(kind: type[Device], delays: Delays, watch: Watch = nullcontext) -> Device:
    """A device of this kind with delays, whose lanes' threads are watched."""

    class Delayed(kind):  # type: ignore[misc, valid-type]
        def stream(self, lane: str) -> AbstractContextManager[object]:
            both = ExitStack()
            both.enter_context(super().stream(lane))
            both.enter_context(delays.on(lane))
            return both

        def mark(self, timed: bool = False, blocking: bool = False) -> Marker | None:
            delays.some()
            return super().mark(timed, blocking)

        def wait(self, marker: Marker | None) -> None:
            super().wait(marker)
            delays.some()

    device = Delayed()
    device.handover = WatchedHandover(device.handover, watch)
    return device
