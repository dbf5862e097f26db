"""Connections: a bound on how many there are, and on how long each may take to say what it wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from h2o_flexgen.serving.bodies import Limits


def bounded(limits: Limits) -> Callable[..., asyncio.Protocol]:
    """The class of connections under these limits."""

    class Bounded(BoundedConnection):
        of_each = limits

    return Bounded


class BoundedConnection(H11Protocol):
    """A connection that is closed if the head of a request does not come to its end in time."""

    of_each: Limits
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.of_each.connections:
            transport.abort()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Whether the head of a request is under way is known by the parser, which has begun none."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(self.of_each.head_seconds, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
