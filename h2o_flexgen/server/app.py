"""The routes of the server, the checks before them, and the answer where there is no such route. Requests are let in by the
name of the host that they ask, and by a key. What a person sees of a server at a glance is the page that a browser shows at /,
and the status, as JSON, that it asks for."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from hmac import compare_digest
from ipaddress import ip_address
from pathlib import Path
from typing import TypeAlias

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h2o_flexgen.core.files import read_text
from h2o_flexgen.jobs.line import CHAT, COMPLETIONS
from h2o_flexgen.jobs.line import READING as READ_THERE
from h2o_flexgen.jobs.line_fields import CLASSIFY, UnknownModel
from h2o_flexgen.server.batch_routes import BatchRoutes, routes_without_folder
from h2o_flexgen.server.counts import MEDIA_TYPE, Now, ServerCounts, batches_text
from h2o_flexgen.server.listening import says_json, where_it_ends_is_unclear
from h2o_flexgen.server.problems import (
    VERSION,
    ApiProblem,
    Refused,
    broken,
    ending,
    other_method,
    other_site,
    unclear_end,
    unknown_host,
    unknown_key,
    unknown_model,
    unknown_path,
)
from h2o_flexgen.server.service import CLIENT_HAS_GONE, Service

LOCAL = "localhost"
HEADER = re.compile(
    r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::[0-9]*)?", re.ASCII | re.IGNORECASE
)  # an address or a name, and a port


@dataclass(frozen=True)
class Hosts:
    """The names in a Host header that mean this server. One that listens to its machine alone answers to the names of loopback
    alone. Otherwise a site could make its name lead here (DNS rebinding) and read everything, as browsers go by names."""

    own: str | None = None  # the one that was chosen beside those of loopback; None: a client may use any name

    def admit(self, header: str | None) -> bool:
        """Whether a request with this Host header is for this server."""
        if self.own is None:
            return True
        name = _name(header or "")
        return name == self.own.lower() or name == LOCAL or name.endswith(f".{LOCAL}") or _is_loopback(name)


def _name(header: str) -> str:
    """The name in a header, without its port; empty where it cannot be read."""
    found = HEADER.fullmatch(header)
    return (found[1] or found[2]).lower().removesuffix(".") if found else ""


def _is_loopback(name: str) -> bool:
    try:
        address = ip_address(name)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


SCHEME = b"bearer"
LEAST = 8  # characters: a shorter one is soon guessed


@dataclass(frozen=True)
class Keys:
    """The keys of a server, of which a request needs one; without any, requests need none. They are in a file, one a line. The
    time of a comparison says nothing about them."""

    known: tuple[bytes, ...] = field(default=(), repr=False)

    @classmethod
    def read(cls, file: Path, flag: str) -> Keys:
        lines = [line.strip() for line in read_text(file, f"{flag} {file}").splitlines()]
        keys = tuple(line for line in lines if line)
        if not keys:
            raise ValueError(f"{flag} {file} has no key; write one a line")
        short = next((place for place, line in enumerate(lines, start=1) if 0 < len(line) < LEAST), None)
        if short is not None:
            raise ValueError(f"{flag} {file} has a key of fewer than {LEAST} characters in line {short}; write a longer one")
        return cls(tuple(key.encode() for key in keys))

    def admit(self, authorization: str | None) -> bool:
        """Whether this header has a known key; its bytes were read as latin-1. All keys are compared, whichever fits."""
        if not self.known:
            return True
        scheme, _, given = (authorization or "").encode("latin-1").partition(b" ")
        is_known = sum(compare_digest(key, given.strip()) for key in self.known)
        return is_known > 0 and scheme.lower() == SCHEME


STATUS = "/status"
READING = ("GET", "HEAD", "OPTIONS")  # changes nothing
GUARDED = (VERSION, CLASSIFY, STATUS)  # whatever begins so asks for a key
MODELS, RESPONSES = "/v1/models", "/v1/responses"
OWNER = "h2o_flexgen"
Answer: TypeAlias = "Callable[[Request], Awaitable[Response]]"


def make_app(
    service: Service, counts: ServerCounts, keys: Keys, hosts: Hosts, facts: Facts, batches: BatchRoutes | None = None
) -> ASGIApp:
    """`batches`: None where nothing is kept."""
    routes = [
        *_page_routes(service, counts, facts),
        *_state_routes(service, counts, batches),
        *_model_routes(service),
        *_completion_routes(service),
        *(routes_without_folder() if batches is None else batches.routes()),
    ]
    handlers = {Refused: _refused, HTTPException: _no_route, ClientDisconnect: _gone, Exception: _bug}
    app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]
    return Door(app, counts, keys, hosts)  # outside of all that answers, of errors too


def _page_routes(service: Service, counts: ServerCounts, facts: Facts) -> list[Route]:
    shown = page()

    async def root(request: Request) -> Response:
        return shown

    async def state(request: Request) -> Response:
        said = status(facts, service.desk.is_closed, service.desk.now, counts)
        return JSONResponse(said, headers={"Cache-Control": "no-store"})

    return [Route("/", root), Route(STATUS, state)]


def _state_routes(service: Service, counts: ServerCounts, batches: BatchRoutes | None) -> list[Route]:
    async def health(request: Request) -> Response:
        return _told(ending()) if service.desk.is_closed else JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        text = counts.text(service.desk.now) + ("" if batches is None else batches_text(batches.work.batches))
        return PlainTextResponse(text, media_type=MEDIA_TYPE)

    return [Route("/health", health), Route("/metrics", metrics)]


def _model_routes(service: Service) -> list[Route]:
    names = service.answers.names

    def said(name: str) -> dict[str, object]:
        of_adapter = {} if name == names.model else {"parent": names.model}
        return {"id": name, "object": "model", "created": service.began, "owned_by": OWNER, **of_adapter}

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [*map(said, names.every)]})

    async def one_model(request: Request) -> Response:
        try:
            return JSONResponse(said(names.of(names.adapter(request.path_params["name"]))))
        except UnknownModel as error:
            return _told(unknown_model(str(error)))

    return [Route(MODELS, models), Route(MODELS + "/{name:path}", one_model)]


def _completion_routes(service: Service) -> list[Route]:
    async def completions(request: Request) -> Response:
        return await service.answer(request, is_chat=False)

    async def chat(request: Request) -> Response:
        return await service.answer(request, is_chat=True)

    def reading(url: str) -> Answer:
        async def of_prompts(request: Request) -> Response:
            return await service.read(request, url)

        return of_prompts

    async def responses(request: Request) -> Response:
        return await service.respond(request)

    each = {COMPLETIONS: completions, CHAT: chat, RESPONSES: responses, **{url: reading(url) for url in READ_THERE}}
    return [Route(path, answer, methods=["POST"]) for path, answer in each.items()]


@dataclass(frozen=True)
class Door:
    """Lets in requests that name this server and have a key, and counts answers."""

    app: ASGIApp
    counts: ServerCounts
    keys: Keys
    hosts: Hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.counts.answered(message["status"])
            await send(message)

        headers = Headers(scope=scope)
        if where_it_ends_is_unclear(scope["http_version"], headers):
            await _told(unclear_end())(scope, receive, counted)
        else:
            await self._behind(scope["method"], scope["path"], headers)(scope, receive, counted)

    def _behind(self, method: str, path: str, headers: Headers) -> ASGIApp:
        """What answers a request with this method, this path and these headers."""
        if not self.hosts.admit(host := headers.get("host")):
            return _told(unknown_host(host or ""))
        if path.startswith(GUARDED) and not self.keys.admit(headers.get("authorization")):
            return _told(unknown_key())
        if method not in READING and not says_json(headers) and (site := _other_site(headers)):
            return _told(other_site(site))
        return self.app


def _other_site(headers: Headers) -> str | None:
    """The site of the page that sent a request, if it is another site. Browsers let pages send anything but JSON without
    permission, but name the page's site."""
    origin = headers.get("origin")
    return None if origin is None or origin.partition("://")[2] == headers.get("host") else origin


def _told(problem: ApiProblem) -> Response:
    return JSONResponse(problem.body, problem.status, dict(problem.headers))


async def _refused(request: Request, error: Refused) -> Response:
    return _told(error.problem)


async def _no_route(request: Request, error: HTTPException) -> Response:
    allowed, method, path = (error.headers or {}).get("Allow"), request.method, request.url.path
    if allowed is not None:
        return _told(other_method(method, path, allowed))
    return _told(unknown_path(method, path, {route.path for route in request.app.routes if isinstance(route, Route)}))


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=CLIENT_HAS_GONE)


async def _bug(request: Request, error: Exception) -> Response:
    """The answer where the server itself has failed; the error is logged."""
    return _told(broken(f"the server has failed: {type(error).__name__}"))


# -- the page, and the status ----------------------------------------------------------------------------------------------

FILE = Path(__file__).with_name("page.html")


def page() -> Response:
    """One file, which asks this server alone for what it shows. The browser is told so: it runs the style and the script that
    stand in the file, and loads nothing from anywhere else."""
    content = FILE.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": "; ".join(_policy(content)),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return Response(content, headers=headers, media_type="text/html")


def _policy(content: str) -> Iterator[str]:
    yield "default-src 'none'"
    yield f"style-src {_sum_of('style', content)}"
    yield f"script-src {_sum_of('script', content)}"
    yield "connect-src 'self'"
    yield "img-src data:"
    yield from (f"{what} 'none'" for what in ("base-uri", "form-action", "frame-ancestors"))


def _sum_of(element: str, content: str) -> str:
    """The checksum by which a browser knows the one element of this kind."""
    (inner,) = re.findall(f"<{element}>(.*?)</{element}>", content, re.DOTALL)
    return f"'sha256-{b64encode(sha256(inner.encode()).digest()).decode()}'"


@dataclass(frozen=True)
class Tier:
    """What lies where: one place for data."""

    name: str
    held_bytes: Mapping[str, int]  # by kind of data
    needed_bytes: int  # at most, with the room that is worked in; a checkpoint's own files on disk are only read
    budget_bytes: int | None


@dataclass(frozen=True)
class Facts:
    """What is settled before the server listens."""

    model: str  # by which clients know it
    longest_prompt: int  # tokens
    most_tokens: int  # of a completion
    words: Mapping[str, str]  # what is said of the plan, by what it is about
    tiers: tuple[Tier, ...]


def status(facts: Facts, is_ending: bool, now: Now, counts: ServerCounts) -> dict[str, object]:
    return {
        **asdict(facts),
        "is_ending": is_ending,
        "seconds": counts.seconds(),
        "now": asdict(now),
        "since_it_began": counts.totals(),
    }
