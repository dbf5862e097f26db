"""Uploads: files as forms bring them, written to the disk as they come, in a size and a time that bound what any client can
take."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from h2o_flexgen.core.hints import refuse_unknown, shown
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.server.batches.stored_files import OF_INPUT, NewFile
from h2o_flexgen.server.listening import Limits, asks_to_send_more
from h2o_flexgen.server.problems import ApiProblem, Refused, bad_request, file_too_large, no_form, too_slow

FORM = b"multipart/form-data"
FILE, PURPOSE = "file", "purpose"
ELSEWHERE = {"expires_after": "nothing expires here; leave it out"}
MOST_BESIDE = 1 << 16  # bytes of a form beside its file
LEAST_RATE = 100_000  # bytes per second: a client that always sends slower is not waited for
AT_ONCE = 1 << 20  # bytes that are written together
LONGEST_NAME = 255


@dataclass(frozen=True)
class UploadForm:
    """What came with a file."""

    filename: str
    purpose: str


async def receive(request: Request, new: NewFile, limits: Limits, most: int) -> UploadForm:
    """Writes the file of a form. A larger one is read to its end, and forgotten, so that the client comes to read why it is
    refused; unless it asks beforehand."""
    boundary = _boundary(request)
    if asks_to_send_more(request, most + MOST_BESIDE):
        raise Refused(file_too_large(most))
    parts, is_too_large, unwritten = _FormParts(boundary), False, list[bytes]()
    async for piece in _in_time(request, limits.body_seconds + most / LEAST_RATE):
        if not is_too_large:
            unwritten.append(parts.of(piece))
            is_too_large = parts.file_bytes > most
        if is_too_large:
            unwritten.clear()
        elif sum(map(len, unwritten)) >= AT_ONCE:
            written, unwritten = b"".join(unwritten), []
            await run_in_threadpool(new.write, written)
    if is_too_large:
        raise Refused(file_too_large(most))
    await run_in_threadpool(new.write, b"".join(unwritten))
    return parts.form()


def _boundary(request: Request) -> bytes:
    """What parts the form of a request."""
    kind = request.headers.get("content-type", "")
    form, options = parse_options_header(kind)
    if form != FORM or not options.get(b"boundary"):
        raise Refused(no_form(kind))
    return options[b"boundary"]


async def _in_time(request: Request, seconds: float) -> AsyncIterator[bytes]:
    """The pieces of a body, as long as they come to their end in time."""
    loop, pieces = asyncio.get_running_loop(), aiter(request.stream())
    until = loop.time() + seconds
    while True:
        try:
            yield await asyncio.wait_for(anext(pieces), until - loop.time())
        except StopAsyncIteration:
            return
        except asyncio.TimeoutError:
            raise Refused(too_slow(seconds)) from None


class _FormParts:
    """The parts of a form. All but the file are held: names, values and headers together are bounded."""

    def __init__(self, boundary: bytes) -> None:
        self.bytes = self.file_bytes = 0
        self._fields: dict[str, bytearray] = {}
        self._filename: str | None = None
        self._pieces: list[bytes] = []  # of the file, not yet taken
        self._header, self._value = b"", b""
        self._headers: dict[bytes, bytes] = {}
        self._is_whole = False
        heard: Mapping[str, Callable[..., None]] = {
            "on_part_begin": self._headers.clear,
            "on_header_field": self._of_header,
            "on_header_value": self._of_value,
            "on_header_end": self._header_ends,
            "on_headers_finished": self._begins,
            "on_part_data": self._of_part,
            "on_end": self._ends,
        }
        try:
            self._parser = MultipartParser(boundary, heard)  # type: ignore[arg-type]
        except FormParserError as error:
            raise Refused(_broken(error)) from error
        self._parser.logger.setLevel(logging.CRITICAL)  # only the client is told what is wrong with its form

    def of(self, data: bytes) -> bytes:
        """Takes the next bytes of the body; returns those of the file among them."""
        self.bytes += len(data)
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise Refused(_broken(error)) from error
        if self.bytes - self.file_bytes > MOST_BESIDE:
            raise Refused(_broken(f"it has more than {format_bytes(MOST_BESIDE)} beside its {FILE}"))
        found, self._pieces = b"".join(self._pieces), []
        return found

    def form(self) -> UploadForm:
        if not self._is_whole:
            raise Refused(_broken("it ends too early"))
        if self._filename is None:
            raise Refused(bad_request(f"{FILE} is missing; send a form with a {FILE} and its {PURPOSE}", param=FILE))
        purpose = self._fields.get(PURPOSE, bytearray()).decode("utf-8", "replace")
        if purpose != OF_INPUT:
            said = f'{PURPOSE} is {shown(purpose)}; the only one that is known here is "{OF_INPUT}"'
            raise Refused(bad_request(said, param=PURPOSE))
        return UploadForm(self._filename, purpose)

    # -- what the parser says ----------------------------------------------------------------------------------------------

    def _of_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _of_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_ends(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _begins(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = _text(options.get(b"name", b""))
        outer = self._name.partition("[")[0]  # of fields that hold others
        try:
            refuse_unknown("field", [outer if outer in ELSEWHERE else self._name], (FILE, PURPOSE), ELSEWHERE)
        except ValueError as error:
            raise Refused(bad_request(str(error), param=self._name)) from error
        if self._name == FILE and self._filename is None:
            self._filename = _text(options.get(b"filename", FILE.encode()))[-LONGEST_NAME:]
        elif self._name == FILE or self._name in self._fields:
            raise Refused(bad_request(f"{self._name} stands there twice; send one", param=self._name))
        else:
            self._fields[self._name] = bytearray()

    def _of_part(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self._pieces.append(data[start:end])
            self.file_bytes += end - start
        else:
            self._fields[self._name] += data[start:end]

    def _ends(self) -> None:
        self._is_whole = True


def _text(given: bytes) -> str:
    return given.decode("utf-8", "replace")


def _broken(why: object) -> ApiProblem:
    return bad_request(f"the form cannot be read: {why}", "invalid_form")
