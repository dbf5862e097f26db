"""What `generate` returns for one prompt: plain data, without torch or a tokenizer."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float


@dataclass(frozen=True)
class StepLogprobs:
    """The log-probability of one token, and the most likely tokens of that step (it may be among them)."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that an answer asks for. `arguments` are JSON as the model has written it."""

    id: str
    name: str
    arguments: str

    @property
    def written(self) -> dict[str, object]:
        """The call in OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class AnswerMessage:
    """The answer to a chat: its text, without what the model thought before it and the tools that it calls."""

    content: str | None  # None where there are only thoughts or calls
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def written(self) -> dict[str, object]:
        """The message in OpenAI's form, as it may be given again with the next messages."""
        thought = {} if self.reasoning_content is None else {"reasoning_content": self.reasoning_content}
        calls = {"tool_calls": [call.written for call in self.tool_calls]} if self.tool_calls else {}
        return {"role": "assistant", "content": self.content, **thought, **calls}


@dataclass(frozen=True)
class Output:
    """One continuation of a prompt. `token_ids` includes the end-of-sequence or stop token that ended the row; `text` includes
    neither that nor a stop string, unless asked for."""

    index: int  # among the continuations of its prompt
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[StepLogprobs, ...] | None  # one per token; None unless asked for
    finish_reason: str  # "stop" or "length"; for a reply also "interrupted"
    stop_reason: int | str | None = None  # the stop token or stop string that ended it; None for an end of text
    message: AnswerMessage | None = field(default=None, compare=False)  # what a chat has made of the text

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of all its tokens together; None unless logprobs were asked for."""
        return None if self.logprobs is None else sum(step.chosen.logprob for step in self.logprobs)


@dataclass(frozen=True)
class Completion:
    """A prompt and its continuation; if several were asked for, `text` and the fields with it belong to the first."""

    index: int  # of the prompt in the input
    prompt: str | None  # None if token ids were given
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[StepLogprobs, ...] | None
    finish_reason: str
    stop_reason: int | str | None = None
    prompt_logprobs: tuple[StepLogprobs | None, ...] | None = None  # one per token; None for the first, which follows nothing
    others: tuple[Output, ...] = ()  # continuations after the first
    embedding: array[float] | None = field(default=None, hash=False)  # of the prompt, where that was asked for
    truncated_tokens: int = 0  # of the prompt, that were left out
    cached_tokens: int | None = field(default=None, compare=False)  # of a prompt that arrived: those computed for others before
    message: AnswerMessage | None = field(default=None, compare=False)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """All continuations."""
        first = Output(0, self.text, self.token_ids, self.logprobs, self.finish_reason, self.stop_reason, self.message)
        return (first, *self.others)
