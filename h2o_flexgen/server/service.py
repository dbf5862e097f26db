"""Service: how one request to complete something is answered, whole or token by token."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from h2o_flexgen.engine.arrivals import Arrival, Closed, TooLong
from h2o_flexgen.engine.job import Request, prompt_of, without_number
from h2o_flexgen.jobs.file_job import LineReading
from h2o_flexgen.jobs.line import Line
from h2o_flexgen.jobs.line_fields import Options
from h2o_flexgen.jobs.openai_answers import Answers
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.server.answer_chunks import AnswerChunks, AnswerWriter, RequestExchange, WholeAnswer, as_json
from h2o_flexgen.server.body_fields import CompletionsRequest, blamed, read_asked, read_asked_inputs
from h2o_flexgen.server.desk import Desk, RequestListener
from h2o_flexgen.server.listening import Limits, read_body
from h2o_flexgen.server.problems import TOO_LONG, ApiProblem, Refused, bad_request, ending
from h2o_flexgen.server.response_fields import ResponseRequest, read_response
from h2o_flexgen.server.response_writer import ResponseWriter
from h2o_flexgen.text.prompts import Prompt

CLIENT_HAS_GONE = 499  # as other servers log it; no client reads it
UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # so that chunks pass proxies as they come


@dataclass(frozen=True)
class Order:
    """A body with its requests, which were handed in."""

    asked: CompletionsRequest
    echoes: Sequence[str]  # prompts as they are echoed
    prompts: Sequence[Prompt]
    arrivals: Sequence[Arrival]
    name: str
    created: int  # seconds since 1970


@dataclass(frozen=True)
class Service:
    desk: Desk
    reading: LineReading
    answers: Answers
    of_prompts: Options  # what requests leave open
    of_chats: Options
    limits: Limits
    readers: Executor  # a thread that reads bodies and tokenizes, beside the one that answers
    began: int  # seconds since 1970
    _numbers: count[int] = field(default_factory=count)

    async def answer(self, request: HttpRequest, is_chat: bool) -> Response:
        usual = self.of_chats if is_chat else self.of_prompts
        return await self._answer(request, lambda data: read_asked(data, is_chat, usual, self.answers.names))

    async def respond(self, request: HttpRequest) -> Response:
        return await self._answer(request, lambda data: read_response(data, self.of_chats, self.answers.names))

    async def read(self, request: HttpRequest, url: str) -> Response:
        """Answers where prompts are only read."""
        return await self._answer(request, lambda data: read_asked_inputs(url, data, self.answers.names))

    async def _answer(self, request: HttpRequest, read: Callable[[bytes], CompletionsRequest]) -> Response:
        data = await read_body(request, self.limits)
        exchange = RequestExchange()
        order = await asyncio.get_running_loop().run_in_executor(self.readers, self._order, data, read, exchange)
        if order.asked.is_streamed:
            return EventStream(self._events(order, exchange), lambda: self.desk.give_up(order.arrivals))
        return await self._whole(request, order, exchange)

    # -- handing in ------------------------------------------------------------------------------------------------------

    def _order(self, data: bytes, read: Callable[[bytes], CompletionsRequest], exchange: RequestExchange) -> Order:
        """Reads a body and hands its requests in."""
        asked = read(data)
        requests = [self._request(place, line, asked) for place, line in enumerate(asked.lines)]
        listeners = [exchange.listener(place, asked.is_streamed) for place in range(len(requests))]
        arrivals = self._handed_in([*zip(requests, listeners)], asked)
        echoes = [self._echo(line, request) for line, request in zip(asked.lines, requests)]
        prompts = [*map(prompt_of, requests)]
        return Order(asked, echoes, prompts, arrivals, uuid.uuid4().hex, int(time.time()))

    def _request(self, place: int, line: Line, asked: CompletionsRequest) -> Request:
        """A request with its tokens. One with a seed of its own draws by its place in the body, whatever came before."""
        number = next(self._numbers) if line.options.params.seed is None else place
        with _refusing(asked, number):
            return self.reading.request(number, line)

    def _handed_in(self, requests: Sequence[tuple[Request, RequestListener]], asked: CompletionsRequest) -> list[Arrival]:
        with _refusing(asked, *(request.index or 0 for request, _ in requests)):
            return self.desk.offer(requests)

    def _echo(self, line: Line, request: Request) -> str:
        prompt = prompt_of(request)
        return self.answers.prompt_text(prompt.text, prompt.ids) if line.options.echo else ""

    # -- answering -------------------------------------------------------------------------------------------------------

    async def _whole(self, request: HttpRequest, order: Order, exchange: RequestExchange) -> Response:
        collecting = asyncio.create_task(_collected(order, exchange))
        gone = asyncio.create_task(_gone(request))
        try:
            await asyncio.wait({collecting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=CLIENT_HAS_GONE)
            return Response(as_json(self._writer(order).whole(collecting.result())), media_type="application/json")
        finally:
            collecting.cancel()
            gone.cancel()
            self.desk.give_up(order.arrivals)

    async def _events(self, order: Order, exchange: RequestExchange) -> AsyncIterator[bytes]:
        writer, ended = self._writer(order), list[Completion]()
        yield b"".join(map(writer.event, writer.begin()))
        while len(ended) < len(order.arrivals):
            for told in await exchange.some():
                if isinstance(told, ApiProblem):
                    yield writer.event(writer.failed(told))
                    return
                yield b"".join(map(writer.event, writer.of(told)))
                ended += [told.completion] if isinstance(told, WholeAnswer) else []
        yield b"".join(map(writer.event, writer.end(ended))) + writer.last

    def _writer(self, order: Order) -> AnswerWriter:
        if isinstance(order.asked, ResponseRequest):
            return ResponseWriter(self.answers, order.name, order.created, order.asked, order.prompts[0])
        return AnswerChunks(self.answers, order.name, order.created, order.asked, order.echoes, order.prompts)


class EventStream(StreamingResponse):
    """Events as they come. However it ends, the desk is told that no client waits."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], give_up: Callable[[], None]) -> None:
        super().__init__(events, headers=UNBUFFERED)
        self._give_up = give_up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._give_up()


async def _collected(order: Order, exchange: RequestExchange) -> list[Completion]:
    """The completions of all prompts, in the order of the prompts."""
    found: dict[int, Completion] = {}
    while len(found) < len(order.arrivals):
        for told in await exchange.some():
            if isinstance(told, ApiProblem):
                raise Refused(told)
            if isinstance(told, WholeAnswer):
                found[told.place] = told.completion
    return [found[place] for place in range(len(found))]


async def _gone(request: HttpRequest) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@contextmanager
def _refusing(asked: CompletionsRequest, *numbers: int) -> Iterator[None]:
    """A context in which what cannot be run becomes a refusal. `numbers`: of requests, which clients know as their prompts."""
    try:
        yield
    except Closed:
        raise Refused(ending()) from None
    except ValueError as error:
        reason = str(error)
        for number in numbers:
            reason = without_number(reason, number)
        reason = asked.as_given(reason)
        is_long = isinstance(error, TooLong)
        raise Refused(bad_request(reason, TOO_LONG if is_long else None, blamed(reason, asked.names))) from error
