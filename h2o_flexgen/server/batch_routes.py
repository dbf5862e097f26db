"""The routes of files and batches, and their lists, a page at a time, as OpenAI has them. Uploads: files as forms bring them,
written to the disk as they come, in a size and a time that bound what any client can take."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from h2o_flexgen.core.allowed_values import Bounds
from h2o_flexgen.core.hints import reason, refuse_unknown, shown
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.jobs.line import EVERY_URL, URLS, read_json
from h2o_flexgen.jobs.openai_answers import Said
from h2o_flexgen.sampling.sampler import resolve_seed
from h2o_flexgen.server.batch_threads import BatchWork
from h2o_flexgen.server.listening import Limits, asks_to_send_more, read_body
from h2o_flexgen.server.problems import (
    ApiProblem,
    Refused,
    bad_request,
    cannot_write,
    ending,
    file_too_large,
    no_data_folder,
    no_form,
    too_slow,
    unknown_file,
)
from h2o_flexgen.server.stored_batches import OF_INPUT, WINDOW, NewFile

# -- uploads ---------------------------------------------------------------------------------------------------------------

FORM = b"multipart/form-data"
FILE, PURPOSE = "file", "purpose"
ELSEWHERE_OF_FORMS = {"expires_after": "nothing expires here; leave it out"}
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
            refuse_unknown("field", [outer if outer in ELSEWHERE_OF_FORMS else self._name], (FILE, PURPOSE), ELSEWHERE_OF_FORMS)
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


# -- lists -----------------------------------------------------------------------------------------------------------------

LIMIT, AFTER, ORDER = "limit", "after", "order"
NEWEST_FIRST, OLDEST_FIRST = "desc", "asc"


class Listed(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def said(self) -> Said: ...


def refuse_other(asked: Mapping[str, str], known: Sequence[str]) -> None:
    try:
        refuse_unknown("parameter", asked, known, {})
    except ValueError as error:
        raise Refused(bad_request(str(error))) from error


def page(oldest_first: Sequence[Listed], asked: Mapping[str, str], most: int, usual: int) -> Said:
    """As many as are asked for, behind the one that is named."""
    order = asked.get(ORDER, NEWEST_FIRST)
    if order not in (NEWEST_FIRST, OLDEST_FIRST):
        raise Refused(bad_request(f"{ORDER} is {shown(order)}; allowed are {OLDEST_FIRST} and {NEWEST_FIRST}", param=ORDER))
    found = [*oldest_first] if order == OLDEST_FIRST else [*reversed(oldest_first)]
    limit, after = _limit(asked.get(LIMIT, str(usual)), most), asked.get(AFTER)
    begins = 0
    if after is not None:
        begins = next((place for place, one in enumerate(found, start=1) if one.id == after), 0)
        if not begins:
            raise Refused(bad_request(f"{AFTER} is {shown(after)}, which is not among these", param=AFTER))
    shown_ones = found[begins : begins + limit]
    return {
        "object": "list",
        "data": [one.said for one in shown_ones],
        "first_id": shown_ones[0].id if shown_ones else None,
        "last_id": shown_ones[-1].id if shown_ones else None,
        "has_more": begins + limit < len(found),
    }


def _limit(given: str, most: int) -> int:
    allowed = Bounds(1, most)
    try:
        return int(allowed.typed(given))
    except ValueError:
        raise Refused(bad_request(f"{LIMIT} is {shown(given)}; allowed is {allowed}", param=LIMIT)) from None


# -- routes ----------------------------------------------------------------------------------------------------------------

FILES, BATCHES = "/v1/files", "/v1/batches"
BYTES = "application/octet-stream"
INPUT, ENDPOINT, COMPLETION_WINDOW, METADATA = "input_file_id", "endpoint", "completion_window", "metadata"
ELSEWHERE = {"output_expires_after": "nothing expires here; leave it out"}
MOST_PAIRS, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512  # of metadata
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class BatchRoutes:
    work: BatchWork
    limits: Limits
    most_bytes: int  # of a file
    seed: int | None  # of batches; None: each has its own
    is_closed: Callable[[], bool]

    # -- files -------------------------------------------------------------------------------------------------------------

    async def upload(self, request: Request) -> Response:
        if self.is_closed():
            raise Refused(ending())
        files = self.work.files
        with _writing(), files.new() as new:
            form = await receive(request, new, self.limits, self.most_bytes)
            file = await run_in_threadpool(files.keep, new, form.filename, form.purpose)
        return JSONResponse(file.said)

    async def files(self, request: Request) -> Response:
        asked = request.query_params
        refuse_other(asked, (LIMIT, AFTER, ORDER, PURPOSE))
        found = [one for one in self.work.files.all() if asked.get(PURPOSE, one.purpose) == one.purpose]
        return JSONResponse(page(found, asked, most=10_000, usual=10_000))

    async def file(self, request: Request) -> Response:
        return JSONResponse(self.work.files.one(request.path_params["id"]).said)

    async def content(self, request: Request) -> Response:
        file = self.work.files.one(request.path_params["id"])
        try:
            opened = await run_in_threadpool(self.work.files.lines(file.id).open, "rb")
        except FileNotFoundError:
            raise Refused(unknown_file(file.id)) from None  # it was removed meanwhile
        return Content(opened)

    async def remove(self, request: Request) -> Response:
        file_id = request.path_params["id"]
        with _writing():
            await run_in_threadpool(self.work.batches.remove_file, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    # -- batches -----------------------------------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        asked = NewBatch.read(await read_body(request, self.limits))
        if self.is_closed():
            raise Refused(ending())
        with _writing():
            batch = await run_in_threadpool(
                self.work.batches.create, asked.input_file_id, asked.endpoint, asked.metadata, resolve_seed(self.seed)
            )
        self.work.check(batch)
        return JSONResponse(batch.said)

    async def batches(self, request: Request) -> Response:
        refuse_other(request.query_params, (LIMIT, AFTER))
        return JSONResponse(page(self.work.batches.all(), request.query_params, most=100, usual=20))

    async def batch(self, request: Request) -> Response:
        return JSONResponse(self.work.batches.one(request.path_params["id"]).said)

    async def cancel(self, request: Request) -> Response:
        with _writing():
            batch = await run_in_threadpool(self.work.batches.cancel, request.path_params["id"])
        self.work.wake()
        return JSONResponse(batch.said)

    def routes(self) -> list[Route]:
        return [Route(path, self._by_method(names), methods=[*names]) for path, names in ROUTES.items()]

    def _by_method(self, names: Mapping[str, str]) -> Handler:
        handlers = {method: getattr(self, name) for method, name in names.items()}

        async def answer(request: Request) -> Response:
            found: Response = await handlers["GET" if request.method == "HEAD" else request.method](request)
            return found

        return answer


ROUTES: Mapping[str, Mapping[str, str]] = {
    FILES: {"POST": "upload", "GET": "files"},
    FILES + "/{id}": {"GET": "file", "DELETE": "remove"},
    FILES + "/{id}/content": {"GET": "content"},
    BATCHES: {"POST": "create", "GET": "batches"},
    BATCHES + "/{id}": {"GET": "batch"},
    BATCHES + "/{id}/cancel": {"POST": "cancel"},
}


def routes_without_folder() -> list[Route]:
    """The same routes of a server that keeps nothing: the answer says which option would make it keep files."""

    async def refuse(request: Request) -> Response:
        raise Refused(no_data_folder())

    return [Route(path, refuse, methods=[*names]) for path, names in ROUTES.items()]


class Content(FileResponse):
    """The bytes of a file that is open: they are sent to their end, even if it is removed meanwhile."""

    def __init__(self, opened: BinaryIO) -> None:
        super().__init__(f"/dev/fd/{opened.fileno()}", media_type=BYTES)
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._opened:
            await super().__call__(scope, receive, send)


@dataclass(frozen=True)
class NewBatch:
    """What a new batch is to be."""

    input_file_id: str
    endpoint: str
    metadata: Mapping[str, str] | None

    @classmethod
    def read(cls, data: bytes) -> NewBatch:
        try:
            given = read_json(data)
        except ValueError as error:
            raise Refused(bad_request(f"the body cannot be read: {error}", "invalid_json")) from error
        if not isinstance(given, dict):
            raise Refused(bad_request(f"the body is {shown(given)}; it is an object with the fields of a batch"))
        try:
            refuse_unknown("field", given, (INPUT, ENDPOINT, COMPLETION_WINDOW, METADATA), ELSEWHERE)
        except ValueError as error:
            raise Refused(bad_request(str(error))) from error
        file_id = _one_of(given, INPUT, str, "the id of a file")
        endpoint = _one_of(given, ENDPOINT, EVERY_URL, f"one of {URLS}")
        _one_of(given, COMPLETION_WINDOW, (WINDOW,), f'"{WINDOW}"')
        return cls(file_id, endpoint, _metadata(given.get(METADATA)))


def _one_of(given: Mapping[str, object], name: str, allowed: type[str] | tuple[str, ...], words: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or (isinstance(allowed, tuple) and value not in allowed):
        raise Refused(bad_request(f"{name} is {shown(value)}; allowed is {words}", param=name))
    return value


def _metadata(given: object) -> Mapping[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or len(given) > MOST_PAIRS or not all(_is_short(*pair) for pair in given.items()):
        most = f"{MOST_PAIRS} texts of {LONGEST_VALUE} characters, with names of {LONGEST_KEY}, at most"
        raise Refused(bad_request(f"{METADATA} is {shown(given)}; allowed are {most}", param=METADATA))
    return given


def _is_short(name: str, value: object) -> bool:
    return isinstance(value, str) and len(name) <= LONGEST_KEY and len(value) <= LONGEST_VALUE


@contextmanager
def _writing() -> Iterator[None]:
    """A context in which the disk may fail, which clients are told."""
    try:
        yield
    except OSError as error:
        raise Refused(cannot_write(reason(error))) from error
