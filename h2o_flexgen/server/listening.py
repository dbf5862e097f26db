"""Listening: a socket that is bound before anything is loaded, and the thread that answers on it. There is a bound on how many
connections there are, and on how long each may take to say what it wants. Bodies of requests are read up to a size and in a
time."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EADDRNOTAVAIL
from ipaddress import ip_address
from typing import Any

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from h2o_flexgen.core.hints import reason
from h2o_flexgen.server.problems import Refused, no_json, too_large, too_slow

JSON = "application/json"


@dataclass(frozen=True)
class Limits:
    """What clients may take of the server."""

    body_bytes: int = 4_000_000
    body_seconds: float = 60.0  # from the head of a request to the end of its body
    head_seconds: float = 20.0  # from a connection, or from the first byte of a request, to the end of its head
    idle_seconds: float = 75.0  # between two requests of a connection
    unread_seconds: float = 120.0  # for which a client may leave unread what was sent
    connections: int = 1024


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body. A larger one is read to its end, and forgotten, so that the client comes to read why it is refused; unless it
    asks beforehand whether to send it."""
    if not says_json(request.headers):
        raise Refused(no_json(request.headers.get("content-type", "")))
    if asks_to_send_more(request, limits.body_bytes):
        raise Refused(too_large(limits.body_bytes))
    try:
        body = await asyncio.wait_for(_read(request, limits.body_bytes), limits.body_seconds)
    except asyncio.TimeoutError:
        raise Refused(too_slow(limits.body_seconds)) from None
    if body is None:
        raise Refused(too_large(limits.body_bytes))
    return body


def where_it_ends_is_unclear(version: str, headers: Headers) -> bool:
    """Whether a proxy may find another end of this body than this server does (RFC 9112, 6.1): what stands behind the one end
    would be a request of its own for the other. The parser refuses all else that is unclear."""
    return "transfer-encoding" in headers and ("content-length" in headers or version == "1.0")


def says_json(headers: Headers) -> bool:
    """Whether the body is said to be JSON, which a page of another site cannot say unless it is allowed to."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == JSON


def asks_to_send_more(request: Request, most: int) -> bool:
    """Whether the client waits to hear that it may send a body of more than so many bytes."""
    said = request.headers.get("content-length", "")
    asks_first = request.headers.get("expect", "").lower() == "100-continue"
    return asks_first and said.isdigit() and int(said) > most


async def _read(request: Request, most: int) -> bytes | None:
    """None: there was more."""
    pieces, size = list[bytes](), 0
    async for piece in request.stream():
        size += len(piece)
        if size > most:
            pieces.clear()
        else:
            pieces.append(piece)
    return b"".join(pieces) if size <= most else None


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


LOOPBACK = "127.0.0.1"
BACKLOG = 2048
SECONDS_TO_SEND = 30  # for what was answered to reach clients, at the end
SECONDS_AT_ONCE = 1  # the same, where it is ended at once
MOST_HEAD_BYTES = 1 << 16


@dataclass(frozen=True)
class ServerAddress:
    """The address of the server."""

    host: str
    port: int  # 0: one that is free

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@contextmanager
def bound(place: ServerAddress) -> Iterator[socket.socket]:
    """A context with a socket at this place, which does not listen yet."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise _no_address(place, reason(error)) from error
    except UnicodeError as error:  # what names may not have, like two dots in a row
        raise _no_address(place, "no name of a machine is written so") from error
    with socket.socket(family, kind) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that ended a moment ago is no hindrance
        try:
            opened.bind(address)
        except (OSError, OverflowError) as error:
            raise _unusable(place, error) from error
        yield opened


def place_of(opened: socket.socket) -> ServerAddress:
    host, port = opened.getsockname()[:2]
    return ServerAddress(host, port)


def is_loopback(place: ServerAddress) -> bool:
    return ip_address(place.host.partition("%")[0]).is_loopback


@contextmanager
def listening(app: ASGIApp, opened: socket.socket, limits: Limits, on_end: Callable[[], object]) -> Iterator[None]:
    """A context in which a thread answers. `on_end` is called when the thread ends; its error is raised at the end of
    the context. What was answered is sent first, unless an error ends the context."""
    try:
        opened.listen(BACKLOG)
    except OSError as error:
        raise _unusable(place_of(opened), error) from error
    _forget_clients_that_do_not_read(opened, limits.unread_seconds)
    server, failed = uvicorn.Server(_config(app, limits)), list[BaseException]()

    def answer() -> None:
        try:
            server.run(sockets=[opened])
        except BaseException as error:
            failed.append(error)
        finally:
            on_end()

    thread = threading.Thread(target=answer, name="answering")
    thread.start()
    try:
        yield
    except BaseException:
        server.config.timeout_graceful_shutdown = SECONDS_AT_ONCE
        raise
    finally:
        server.should_exit = True
        _join(thread, server)
    if failed:
        raise failed[0]


def _join(thread: threading.Thread, server: uvicorn.Server) -> None:
    """Waits until what was answered is sent; if that is interrupted, connections are cut."""
    try:
        thread.join()
    except BaseException:
        for connection in list(server.server_state.connections):
            assert isinstance(connection, BoundedConnection)
            connection.loop.call_soon_threadsafe(connection.transport.abort)
        thread.join()
        raise


def _config(app: ASGIApp, limits: Limits) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=bounded(limits),  # type: ignore[arg-type]  # made like a class
        ws="none",
        lifespan="off",
        loop="asyncio",
        interface="asgi3",
        log_config=None,
        log_level="error",  # what clients do wrong is no news
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=round(limits.idle_seconds),
        timeout_graceful_shutdown=SECONDS_TO_SEND,
        h11_max_incomplete_event_size=MOST_HEAD_BYTES,
    )


def _forget_clients_that_do_not_read(opened: socket.socket, seconds: float) -> None:
    """Tells the system to end a connection if its client takes nothing of what was sent, for so long. Accepted connections
    inherit this."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))


def _no_address(place: ServerAddress, why: str) -> ValueError:
    return ValueError(f"--host {place.host} is no address of this machine ({why}); give one that is, like {LOOPBACK}")


def _unusable(place: ServerAddress, error: Exception) -> ValueError:
    why = reason(error) if isinstance(error, OSError) else str(error)
    if isinstance(error, OSError) and error.errno == EADDRNOTAVAIL:
        return _no_address(place, why)
    return ValueError(f"port {place.port} of {place.host} cannot be had ({why}); give another --port, or 0 for a free one")
