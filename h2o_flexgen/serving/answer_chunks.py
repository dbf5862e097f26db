"""Chunks: an answer in parts, as its tokens come, in OpenAI's form; each is an event that a server sends."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from h2o_flexgen.jobs.line import Line
from h2o_flexgen.jobs.openai_answers import Answers, Said, usage
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.serving.body_fields import CompletionsRequest
from h2o_flexgen.serving.request_exchange import TokenPiece, WholeAnswer

END = b"data: [DONE]\n\n"


def as_event(said: Said) -> bytes:
    return b"data: " + json.dumps(said, ensure_ascii=False).encode("utf-8", errors="backslashreplace") + b"\n\n"


@dataclass
class AnswerChunks:
    """The chunks of one answer. Where the prompt is echoed with log-probabilities, each completion comes as one chunk."""

    answers: Answers
    name: str
    created: int
    asked: CompletionsRequest
    prompts: Sequence[str]  # as they are echoed
    _offsets: Counter[int] = field(default_factory=Counter)  # characters of each completion, for its log-probabilities

    def begin(self) -> Iterator[Said]:
        """What stands before the first token of each completion."""
        for index in range(len(self.asked.lines) * self.asked.completions):
            line, prompt = self._line(index), self.prompts[index // self.asked.completions]
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
                choice = self.answers.choice(line, told.completion, output, self._index(told.place, output.index))
                yield {**self._head(line), "choices": [choice], **self._no_usage()}

    def end(self, completions: Sequence[Completion]) -> Iterator[Said]:
        if self.asked.with_usage:
            yield {**self._head(self.asked.lines[0]), "choices": [], "usage": usage(completions)}

    # ------------------------------------------------------------------------------------------------------------------

    def _of_piece(self, line: Line, piece: TokenPiece) -> Iterator[Said]:
        index, ids = self._index(piece.place, piece.number), {}
        if self.answers.shows_ids(line):
            ids = {"token_ids": [piece.token]}
        if piece.text or piece.logprobs is not None or ids:
            text = {"delta": {"content": piece.text}} if line.is_chat else {"text": piece.text}
            yield self._chunk(index, {**text, "logprobs": self._logprobs(line, index, piece), **ids})
        if piece.finish_reason is not None:
            nothing: Said = {"delta": {}} if line.is_chat else {"text": ""}
            yield self._chunk(index, nothing, piece.finish_reason, piece.stop_reason)

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
        return self.answers.head(self.name, self.created, line.is_chat, kind)

    def _no_usage(self) -> Said:
        return {"usage": None} if self.asked.with_usage else {}

    @staticmethod
    def _comes_whole(line: Line) -> bool:
        return line.options.echo and line.options.params.logprobs is not None

    def _index(self, place: int, number: int) -> int:
        return place * self.asked.completions + number

    def _line(self, index: int) -> Line:
        return self.asked.lines[index // self.asked.completions]
