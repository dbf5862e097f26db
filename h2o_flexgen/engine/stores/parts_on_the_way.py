"""The KV of prompts on its way to the host, which attends it later: part by part, while the next part is computed.

A buffer has two places, which the parts of a batch take in turn. When a part begins, the one before it goes home. The copy is
in the stream of the lane that stores, and so beside the computation, which waits for it only where it wants the place again.
The last part is left for the STORE_KV of the visit: it goes home while the next visit is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from h2o_flexgen.engine.executor import MovedBefore, MovedInParts
from h2o_flexgen.memory.device import Device, Marker
from h2o_flexgen.schedule.ops import STORE


class PartOfPrompts(NamedTuple):
    number: int  # among those of its batch
    rows: slice


class PartsOnTheWay:
    """Those of one visit, of one level of KV heads."""

    def __init__(self, device: Device, places: int, send: Callable[[PartOfPrompts], int] | None) -> None:
        """`send`: copies a part to the host, and returns the bytes; none where its KV is not needed after the visit."""
        self._device = device
        self._send = send
        self._last: PartOfPrompts | None = None
        self._home: list[Marker | None] = [None] * places  # where the part that had the place before is at home
        self._sent: list[MovedBefore] = []
        self._moved = 0  # bytes of parts that were at home when their copy returned

    def begin(self, rows: slice) -> PartOfPrompts:
        """Finds a place for the next part, and lets the one before it go."""
        number = 0
        if self._last is not None:
            number = self._last.number + 1
            self._go(self._last)
        self._last = PartOfPrompts(number, rows)
        self._device.wait(self._home[number % len(self._home)])
        return self._last

    def _go(self, part: PartOfPrompts) -> None:
        if self._send is None:
            return
        computed = self._device.mark()
        with self._device.stream(STORE):
            self._device.wait(computed)
            begun = self._device.mark(timed=True)
            moved = self._send(part)
            self._home[part.number % len(self._home)] = ended = self._device.mark(timed=True)
        if begun is None or ended is None:
            self._moved += moved
        else:
            self._sent.append(MovedBefore(begun, ended, moved))

    def finish(self) -> MovedInParts:
        """Sends the last part, in the lane that stores."""
        assert self._last is not None and self._send is not None, "a visit with prompts has a part"
        return MovedInParts(self._moved + self._send(self._last), self._sent)
