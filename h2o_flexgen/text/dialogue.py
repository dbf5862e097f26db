"""Dialogue: how turns become one text. A style chooses the tokens to add to the text so far so that the model answers.

In a conversation only the new end of the text is needed: what was said before is in the KV cache and is not written again.
Messages given all at once are written as a whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.hints import shown
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.text.messages import ASSISTANT, CALLS, SYSTEM, USER
from h2o_flexgen.text.prompts import Prompt
from h2o_flexgen.text.tokenizer import Message, Tokenizer

SPEAKER, ANSWERER = "User:", "Assistant:"


@dataclass(frozen=True)
class Style(ABC):
    tokenizer: Tokenizer
    system: str = ""

    stops: ClassVar[tuple[str, ...]] = ()  # texts that end a reply

    @abstractmethod
    def turn(self, text: str, before: Completion | None) -> list[int]:
        """The tokens that come after the reply `before`; None begins the text."""

    @abstractmethod
    def whole(self, messages: Sequence[Message]) -> Prompt:
        """The text of a whole chat, up to where the answer begins."""


class PlainStyle(Style):
    """Continues what is typed, for models that were never taught to chat."""

    def turn(self, text: str, before: Completion | None) -> list[int]:
        return self.tokenizer.encode(_opening(self.system) + text) if before is None else self.tokenizer.encode_more(text)

    def whole(self, messages: Sequence[Message]) -> Prompt:
        text = "".join(_opening(said) if role == SYSTEM else said for role, said in _known_roles(messages))
        return Prompt(text, tuple(self.tokenizer.encode(text)))


class Script(Style):
    """Two speakers, named line by line, for models without a chat template."""

    stops = (f"\n{SPEAKER}",)

    def turn(self, text: str, before: Completion | None) -> list[int]:
        spoken = f" {text}\n{ANSWERER}"
        if before is None:
            return self.tokenizer.encode(f"{_opening(self.system)}{SPEAKER}{spoken}")
        said_speaker = self.stops[0] in self.tokenizer.decode(before.token_ids)  # the reply wrote it before it was stopped
        return self.tokenizer.encode_more(spoken if said_speaker else f"{self.stops[0]}{spoken}")

    def whole(self, messages: Sequence[Message]) -> Prompt:
        opening, lines = "", []
        for role, said in _known_roles(messages):
            if role == SYSTEM:
                opening += _opening(said)
            else:
                lines.append(f"{SPEAKER if role == USER else ANSWERER} {said}\n")
        text = f"{opening}{''.join(lines)}{ANSWERER}"
        return Prompt(text, tuple(self.tokenizer.encode(text)))


@dataclass(frozen=True)
class Template(Style):
    """The chat template that comes with the model, or another one."""

    template: str | None = None

    def turn(self, text: str, before: Completion | None) -> list[int]:
        user = {"role": USER, "content": text}
        if before is None:
            opening = [{"role": SYSTEM, "content": self.system}] if self.system else []
            return self.tokenizer.encode_more(self._rendered([*opening, user]))
        mark = _not_in(text)
        made_up = [{"role": USER, "content": "?"}, {"role": ASSISTANT, "content": mark}]
        _, found, behind = self._rendered([*made_up, user]).rpartition(mark)
        if not found:
            raise ValueError("the model's chat template leaves out what was replied before; choose the style script or plain")
        ids = self.tokenizer.encode_more(behind)
        return ids[1:] if ids[:1] == list(before.token_ids[-1:]) else ids  # the reply's own end token is there already

    def whole(self, messages: Sequence[Message]) -> Prompt:
        text = self._rendered(messages)
        return Prompt(text, tuple(self.tokenizer.encode_more(text)))

    def _rendered(self, messages: Sequence[Message]) -> str:
        return self.tokenizer.render_chat(messages, self.template)


def _opening(system: str) -> str:
    return f"{system}\n\n" if system else ""


def _known_roles(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """The role and text of each message, for styles that write all roles themselves."""
    for message in messages:
        if message["role"] not in (SYSTEM, USER, ASSISTANT):
            raise ValueError(f"role {shown(message['role'])} needs a chat template; known are {SYSTEM}, {USER}, {ASSISTANT}")
        if CALLS in message:
            raise ValueError(f"{CALLS} need a chat template; leave them out, or choose a model that has one")
    return [(message["role"], message["content"]) for message in messages]


def _not_in(text: str) -> str:
    mark = "\N{REFERENCE MARK}"
    while mark in text:
        mark += mark
    return mark


STYLES: Mapping[str, type[Style]] = {"template": Template, "script": Script, "plain": PlainStyle}


def choose_style(name: str, tokenizer: Tokenizer, system: str = "", template: str | None = None) -> Style:
    """Chooses a style by name; AUTO means the model's chat template if it has one, and otherwise a script. `template`: another
    chat template, as text."""
    if template is not None:
        if not isinstance(template, str) or name not in (AUTO, "template"):
            raise ValueError(
                f"chat_template is {shown(template)} and style {shown(name)}; give a template as text and no style"
            )
        return Template(tokenizer, system, template)
    if name == "template" and not tokenizer.has_chat_template:
        raise ValueError("this model has no chat template; choose the style script or plain")
    chosen = name if name != AUTO else "template" if tokenizer.has_chat_template else "script"
    return STYLES[chosen](tokenizer, system)
