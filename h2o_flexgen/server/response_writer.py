"""Answers in the form of OpenAI's Responses: items, which are thoughts, messages and calls of tools, and the events of a stream
in their order. A whole answer is what the events of its stream come to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar, cast

from h2o_flexgen.jobs.line import Line
from h2o_flexgen.jobs.openai_answers import STOP, Answers, Said, usage
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.server.answer_chunks import TokenPiece, WholeAnswer, as_event
from h2o_flexgen.server.problems import ApiProblem
from h2o_flexgen.server.response_fields import INSTRUCTIONS, MOST, REASONING, TEXT, ResponseRequest
from h2o_flexgen.text.answer_reader import AnswerPart, ArgumentsPart, CallPart, SaidPart
from h2o_flexgen.text.prompts import Prompt
from h2o_flexgen.text.tools import CHOICE, PARALLEL, TOOLS

IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"
MESSAGE, THOUGHT, CALL = "message", "reasoning", "function_call"
BEGINNINGS = {MESSAGE: "msg", THOUGHT: "rs", CALL: "fc"}  # of what items are known by
PARTS = {MESSAGE: "output_text", THOUGHT: "reasoning_text"}
OF_MESSAGES: Said = {"annotations": [], "logprobs": []}
ECHOED = ("metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")


@dataclass
class OutputItem:
    """An item of an answer, while it grows."""

    kind: str
    id: str
    index: int
    call: CallPart | None = None
    text: str = ""  # or the arguments of a call

    def written(self, status: str) -> Said:
        if self.call is not None:
            about: Said = {"call_id": self.call.id, "name": self.call.name, "arguments": self.text}
        else:
            about = {"content": [self._part] if self.text or status != IN_PROGRESS else []}
        beside: Said = {"role": "assistant"} if self.kind == MESSAGE else {"summary": []} if self.kind == THOUGHT else {}
        return {"id": self.id, "type": self.kind, "status": status, **beside, **about}

    @property
    def _part(self) -> Said:
        return {"type": PARTS[self.kind], "text": self.text, **(OF_MESSAGES if self.kind == MESSAGE else {})}

    def begin(self) -> Iterator[Said]:
        yield {"type": "response.output_item.added", "output_index": self.index, "item": self.written(IN_PROGRESS)}
        if self.call is None:
            yield {"type": "response.content_part.added", **self._place, "part": self._part}

    def grow(self, text: str) -> Said:
        self.text += text
        return {"type": f"response.{self._name}.delta", **self._place, "delta": text, **self._logprobs}

    def end(self, status: str) -> Iterator[Said]:
        if self.call is not None:
            named: Said = {"name": self.call.name, "arguments": self.text}
            yield {"type": f"response.{self._name}.done", **self._place, **named}
        else:
            yield {"type": f"response.{self._name}.done", **self._place, "text": self.text, **self._logprobs}
            yield {"type": "response.content_part.done", **self._place, "part": self._part}
        yield {"type": "response.output_item.done", "output_index": self.index, "item": self.written(status)}

    @property
    def _name(self) -> str:
        return "function_call_arguments" if self.call is not None else PARTS[self.kind]

    @property
    def _place(self) -> Said:
        return {"item_id": self.id, "output_index": self.index, **({} if self.call is not None else {"content_index": 0})}

    @property
    def _logprobs(self) -> Said:
        return {"logprobs": []} if self.kind == MESSAGE else {}


@dataclass
class ResponseWriter:
    answers: Answers
    name: str
    created: int
    asked: ResponseRequest
    prompt: Prompt
    _items: list[OutputItem] = field(default_factory=list)
    _is_cut: bool = False
    _numbers: Iterator[int] = field(default_factory=count)

    last: ClassVar[bytes] = b""

    def __post_init__(self) -> None:
        identity = self.answers.identity(self._line, self.name, self.prompt.ids, 0)
        self._reader = self.answers.reading(self._line, self.prompt.text).reader(identity)

    @property
    def _line(self) -> Line:
        return self.asked.lines[0]

    def whole(self, completions: Sequence[Completion]) -> Said:
        (completion,) = completions
        for _ in self._taken(completion.text, completion.finish_reason):
            pass
        for _ in self._closed():
            pass
        return self._over(completions)

    def begin(self) -> Iterator[Said]:
        for state in ("created", "in_progress"):
            yield {"type": f"response.{state}", "response": self._response(IN_PROGRESS)}

    def of(self, told: TokenPiece | WholeAnswer) -> Iterator[Said]:
        if isinstance(told, TokenPiece):
            yield from self._taken(told.text, told.finish_reason)

    def end(self, completions: Sequence[Completion]) -> Iterator[Said]:
        yield from self._closed()
        yield {"type": f"response.{self._status}", "response": self._over(completions)}

    def failed(self, problem: ApiProblem) -> Said:
        error: Said = {"code": "server_error", "message": problem.message}
        return {"type": "response.failed", "response": {**self._response(FAILED), "error": error}}

    def event(self, said: Said) -> bytes:
        return f"event: {said['type']}\n".encode() + as_event({**said, "sequence_number": next(self._numbers)})

    # -- items -------------------------------------------------------------------------------------------------------------

    def _taken(self, text: str, finish_reason: str | None) -> Iterator[Said]:
        """Takes more of the text; what has become certain with it."""
        parts = self._reader.add(text)
        if finish_reason is not None:
            self._is_cut = finish_reason != STOP
            parts += self._reader.end(self._is_cut)
        yield from self._of_parts(parts)

    def _of_parts(self, parts: Iterable[AnswerPart]) -> Iterator[Said]:
        for part in parts:
            if isinstance(part, CallPart):
                yield from self._opened(CALL, part)
                continue
            if not isinstance(part, ArgumentsPart):
                kind = MESSAGE if isinstance(part, SaidPart) else THOUGHT
                if not self._items or self._items[-1].kind != kind:
                    yield from self._opened(kind)
            yield self._items[-1].grow(part.text)

    def _opened(self, kind: str, call: CallPart | None = None) -> Iterator[Said]:
        if self._items:
            yield from self._items[-1].end(COMPLETED)
        index = len(self._items)
        self._items.append(OutputItem(kind, f"{BEGINNINGS[kind]}_{self.name}{index:02d}", index, call))
        yield from self._items[-1].begin()

    def _closed(self) -> Iterator[Said]:
        """Ends the last item; an answer has one at least."""
        if not self._items:
            yield from self._opened(MESSAGE)
        yield from self._items[-1].end(self._status)

    # -- the whole -----------------------------------------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        return INCOMPLETE if self._is_cut else COMPLETED

    def _over(self, completions: Sequence[Completion]) -> Said:
        *before, last = self._items
        output = [*(item.written(COMPLETED) for item in before), last.written(self._status)]
        details: Said | None = {"reason": MOST} if self._is_cut else None
        told = self._usage(usage(completions))
        return {**self._response(self._status), "output": output, "incomplete_details": details, "usage": told}

    def _usage(self, counted: Said) -> Said:
        thoughts = "".join(item.text for item in self._items if item.kind == THOUGHT)
        cached = cast(Said, counted.get("prompt_tokens_details", {}))
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0, **cached},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": len(self.answers.tokenizer.encode_more(thoughts)) if thoughts else 0},
            "total_tokens": counted["total_tokens"],
        }

    def _response(self, status: str) -> Said:
        given, params = self.asked.given, self._line.options.params
        of_text = {name: value for name, value in given.get(TEXT, {}).items() if value is not None}
        return {
            "id": f"resp_{self.name}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.answers.model_of(self.asked.lines[0]),
            "output": [],
            "error": None,
            "incomplete_details": None,
            INSTRUCTIONS: given.get(INSTRUCTIONS),
            MOST: given.get(MOST),
            "temperature": params.temperature,
            "top_p": params.top_p,
            TEXT: {"format": {"type": "text"}, **of_text},
            REASONING: {"effort": None, "summary": None, **given.get(REASONING, {})},
            TOOLS: self._tools,
            CHOICE: given.get(CHOICE, "auto"),
            PARALLEL: given.get(PARALLEL, True),
            "store": False,
            "background": False,
            "previous_response_id": None,
            "truncation": "disabled",
            "usage": None,
            "metadata": {},
            **{name: given[name] for name in ECHOED if name in given},
        }

    @property
    def _tools(self) -> list[Said]:
        use = self._line.options.tools
        return [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.is_strict,
            }
            for tool in (() if use is None else use.tools)
        ]
