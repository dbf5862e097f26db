"""An answer on its way: what the thread that computes tells the one client that waits for it, and the chunks in OpenAI's form,
as its tokens come, of which each is an event that a server sends."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Protocol

from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.jobs.line import Line
from h2o_flexgen.jobs.openai_answers import STOP, TOOL_CALLS, Answers, Said, usage
from h2o_flexgen.sampling.completion import Completion, StepLogprobs
from h2o_flexgen.server.body_fields import CompletionsRequest
from h2o_flexgen.server.desk import RequestListener
from h2o_flexgen.server.problems import ApiProblem
from h2o_flexgen.text.answer_reader import AnswerPart, AnswerReader, CallPart, SaidPart, ThoughtPart
from h2o_flexgen.text.prompts import Prompt


@dataclass(frozen=True)
class TokenPiece:
    """A token of a completion, and the text that has become certain with it."""

    place: int  # of its prompt in the body
    number: int  # of the completion among those of its prompt
    token: int
    text: str
    logprobs: StepLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class WholeAnswer:
    """All completions of a prompt, which have ended."""

    place: int
    completion: Completion


Told = TokenPiece | WholeAnswer | ApiProblem


class RequestExchange:
    """Made in the client's loop; told things in any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Queue[Told] = asyncio.Queue()

    def listener(self, place: int, is_streamed: bool) -> RequestListener:
        on_piece = partial(self._piece, place) if is_streamed else None
        return RequestListener(
            on_piece, lambda completion: self._put(WholeAnswer(place, completion)), lambda problem, error: self._put(problem)
        )

    async def some(self) -> list[Told]:
        """Everything that was told since the last time, and at least something."""
        told = [await self._told.get()]
        while not self._told.empty():
            told.append(self._told.get_nowait())
        return told

    def _piece(self, place: int, row: RowState, token: int, text: str | None) -> None:
        logprobs = row.logprobs[-1] if row.logprobs else None
        self._put(TokenPiece(place, row.number, token, text or "", logprobs, row.finish_reason, row.stop_reason))

    def _put(self, told: Told) -> None:
        with suppress(RuntimeError):  # the loop has ended, so no client waits
            self._loop.call_soon_threadsafe(self._told.put_nowait, told)


END = b"data: [DONE]\n\n"


def delta_of(part: AnswerPart) -> Said:
    """A part of a message as streams have it."""
    if isinstance(part, SaidPart):
        return {"content": part.text}
    if isinstance(part, ThoughtPart):
        return {"reasoning_content": part.text}
    if isinstance(part, CallPart):
        function = {"name": part.name, "arguments": ""}
        return {"tool_calls": [{"index": part.index, "id": part.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


def as_json(said: Said) -> bytes:
    """What is said, as JSON. A model may write half a pair of characters, which UTF-8 has only as an escape."""
    return json.dumps(said, ensure_ascii=False).encode("utf-8", errors="backslashreplace")


def as_event(said: Said) -> bytes:
    return b"data: " + as_json(said) + b"\n\n"


class AnswerWriter(Protocol):
    """Writes one answer, whole or event by event."""

    last: ClassVar[bytes]  # behind all events

    def whole(self, completions: Sequence[Completion]) -> Said: ...

    def begin(self) -> Iterator[Said]:
        """What comes before the first token."""

    def of(self, told: TokenPiece | WholeAnswer) -> Iterator[Said]:
        """What has become certain with this."""

    def end(self, completions: Sequence[Completion]) -> Iterator[Said]:
        """What comes behind the last token."""

    def failed(self, problem: ApiProblem) -> Said:
        """The last event of an answer that breaks off."""

    def event(self, said: Said) -> bytes: ...


@dataclass
class AnswerChunks:
    """The chunks of one answer. Where the prompt is echoed with log-probabilities, each completion comes as one chunk."""

    answers: Answers
    name: str
    created: int
    asked: CompletionsRequest
    echoes: Sequence[str]  # prompts as they are echoed
    prompts: Sequence[Prompt]
    _offsets: Counter[int] = field(default_factory=Counter)  # characters of each completion, for its log-probabilities
    _readers: dict[int, AnswerReader] = field(default_factory=dict)  # of completions of chats

    last: ClassVar[bytes] = END

    def whole(self, completions: Sequence[Completion]) -> Said:
        return self.answers.body(self.name, self.created, [*zip(self.asked.lines, completions)])

    def begin(self) -> Iterator[Said]:
        """What stands before the first token of each completion."""
        for index in range(len(self.asked.lines) * self.asked.completions):
            line, prompt = self._line(index), self.echoes[index // self.asked.completions]
            if line.is_chat:
                yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})
            elif line.options.echo and not self._comes_whole(line):
                yield self._chunk(index, {"text": prompt})

    def of(self, told: TokenPiece | WholeAnswer) -> Iterator[Said]:
        line = self.asked.lines[told.place]
        if isinstance(told, TokenPiece):
            yield from () if self._comes_whole(line) else self._of_piece(line, told)
        elif self._comes_whole(line):
            for output in told.completion.outputs:
                index = self._index(told.place, output.index)
                choice = self.answers.choice(line, told.completion, output, index, self.name)
                yield {**self._head(line), "choices": [choice], **self._no_usage()}

    def end(self, completions: Sequence[Completion]) -> Iterator[Said]:
        if self.asked.with_usage:
            yield {**self._head(self.asked.lines[0]), "choices": [], "usage": usage(completions)}

    def failed(self, problem: ApiProblem) -> Said:
        return problem.body

    def event(self, said: Said) -> bytes:
        return as_event(said)

    # ------------------------------------------------------------------------------------------------------------------

    def _of_piece(self, line: Line, piece: TokenPiece) -> Iterator[Said]:
        index = self._index(piece.place, piece.number)
        beside: Said = {"token_ids": [piece.token]} if self.answers.shows_ids(line) else {}
        if piece.logprobs is not None:
            beside["logprobs"] = self._logprobs(line, index, piece)
        texts = self._deltas(index, piece) if line.is_chat else [{"text": piece.text}] if piece.text else []
        nothing: Said = {"delta": {}} if line.is_chat else {"text": ""}
        for text in texts or ([nothing] if beside else []):
            yield self._chunk(index, {**text, **beside})
            beside = {}
        if piece.finish_reason is not None:
            called = line.is_chat and self._reader(index).calls and piece.finish_reason == STOP
            yield self._chunk(index, nothing, TOOL_CALLS if called else piece.finish_reason, piece.stop_reason)

    def _deltas(self, index: int, piece: TokenPiece) -> list[Said]:
        """What has become certain of the message with this piece."""
        reader = self._reader(index)
        parts = reader.add(piece.text)
        if piece.finish_reason is not None:
            parts += reader.end(is_cut=piece.finish_reason != STOP)
        return [{"delta": delta_of(part)} for part in parts]

    def _reader(self, index: int) -> AnswerReader:
        if index not in self._readers:
            line, prompt = self._line(index), self.prompts[index // self.asked.completions]
            identity = self.answers.identity(line, self.name, prompt.ids, index)
            self._readers[index] = self.answers.reading(line, prompt.text).reader(identity)
        return self._readers[index]

    def _logprobs(self, line: Line, index: int, piece: TokenPiece) -> Said | None:
        if piece.logprobs is None:
            return None
        if line.is_chat:
            return self.answers.chat_logprobs([piece.logprobs])
        found = self.answers.logprobs([piece.token], [piece.logprobs], self._offsets[index])
        self._offsets[index] += len(self.answers.text([piece.token]))
        return found

    def _chunk(self, index: int, said: Said, finish: str | None = None, stop: int | str | None = None) -> Said:
        line = self._line(index)
        choice = {"index": index, "logprobs": None, **said, "finish_reason": finish, "stop_reason": stop}
        return {**self._head(line), "choices": [choice], **self._no_usage()}

    def _head(self, line: Line) -> Said:
        kind = "chat.completion.chunk" if line.is_chat else "text_completion"
        return self.answers.head(self.name, self.created, line, kind)

    def _no_usage(self) -> Said:
        return {"usage": None} if self.asked.with_usage else {}

    @staticmethod
    def _comes_whole(line: Line) -> bool:
        return line.options.echo and line.options.params.logprobs is not None

    def _index(self, place: int, number: int) -> int:
        return place * self.asked.completions + number

    def _line(self, index: int) -> Line:
        return self.asked.lines[index // self.asked.completions]
