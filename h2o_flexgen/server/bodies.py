"""Bodies of requests: read up to a size and in a time that bound what any client can take."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request

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
