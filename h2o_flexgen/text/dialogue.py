"""Dialogue: how turns become one text. A style chooses the tokens to add to the text so far so that the model answers.

In a conversation only the new end of the text is needed: what was said before is in the KV cache and is not written again.
Messages given all at once are written as a whole.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, ClassVar

from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.hints import shown
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.sampling.structured_outputs import JSON, JSON_OBJECT, NAME
from h2o_flexgen.text.answer_forms import FORMS, ID_LENGTH, THOUGHTS, AnswerForm, form_of
from h2o_flexgen.text.answer_reader import AnswerReading
from h2o_flexgen.text.prompts import ASSISTANT, CALL_ID, CALLS, SYSTEM, USER, Prompt
from h2o_flexgen.text.tokenizer import NO_SETTINGS, ChatInput, Message, TemplateSettings, Tokenizer
from h2o_flexgen.text.tools import TOOLS, ToolUse, held_to_calls

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
    def whole(self, chat: ChatInput) -> Prompt:
        """The text of a whole chat, up to where the answer begins."""

    def form(self, with_tools: bool) -> AnswerForm:
        """What answers may have beside their texts."""
        return AnswerForm()

    def asked(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        use: ToolUse | None = None,
        settings: TemplateSettings = NO_SETTINGS,
    ) -> tuple[Prompt, SamplingParams]:
        """A chat as a prompt, and how it is to be continued, so that the answer has the form in which it is read."""
        shown = () if use is None else use.shown
        if shown:
            self._refuse_tools(params)
        prompt = self.whole(ChatInput(messages, shown, settings))
        changed: dict[str, object] = {"stop": (*params.stop_strings, *self.stops)} if self.stops else {}
        reading = self.reading(prompt.text, params, use)
        if any(self.tokenizer.special_id(mark) is not None for mark in reading.form.marks):
            changed["skip_special_tokens"] = False
        if use is not None and shown and (use.must_call or use.has_strict or params.held_to is not None):
            changed[NAME] = held_to_calls(use, reading.form, reading.begins_thinking, self.tokenizer, params.held_to)
        return prompt, replace(params, **changed) if changed else params  # type: ignore[arg-type]

    def reading(self, prompt: str | None, params: SamplingParams, use: ToolUse | None = None) -> AnswerReading:
        """How answers to a prompt of a chat are read. One that is held to something is nothing else, or calls tools."""
        callable_tools = () if use is None else use.callable
        if params.held_to is not None and not callable_tools:
            return AnswerReading()
        form = self.form(with_tools=bool(callable_tools))
        begins = form.thoughts is not None and (prompt or "").rstrip().endswith(form.thoughts.opens)
        most = 1 if use is not None and use.calls_one else None
        form = form if callable_tools else replace(form, calls=None)
        return AnswerReading(form, tuple(tool.name for tool in callable_tools), most, begins)

    def _refuse_tools(self, params: SamplingParams) -> None:
        """Refuses tools where a call could not be told from something else."""
        form, held_to = self.form(with_tools=True).calls, params.held_to
        if form is None:
            raise ValueError(
                f"{TOOLS} need a chat template that writes calls as {_KNOWN_FORMS} ({HAS_ONE} has one); {self._lacks_form}"
            )
        if held_to is not None and held_to.kind not in (JSON, JSON_OBJECT):
            raise ValueError(f"{NAME} has a {held_to.kind}, and {TOOLS} stand beside JSON alone; leave one of them out")
        if held_to is not None and form.may_begin_bare:
            raise ValueError(
                f"{NAME} stands beside {TOOLS}, and this model's calls look like other JSON; leave one of them out"
            )

    @property
    def _lacks_form(self) -> str:
        return "this style has none, so choose a model that has one, or write them into the prompt"


class PlainStyle(Style):
    """Continues what is typed, for models that were never taught to chat."""

    def turn(self, text: str, before: Completion | None) -> list[int]:
        return self.tokenizer.encode(_opening(self.system) + text) if before is None else self.tokenizer.encode_more(text)

    def whole(self, chat: ChatInput) -> Prompt:
        chat.settings.refuse_without_template()
        text = "".join(_opening(said) if role == SYSTEM else said for role, said in _known_roles(chat.messages))
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

    def whole(self, chat: ChatInput) -> Prompt:
        chat.settings.refuse_without_template()
        opening, lines = "", []
        for role, said in _known_roles(chat.messages):
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
            return self.tokenizer.encode_more(self._rendered(ChatInput([*opening, user])))
        mark = _not_in(text)
        made_up = [{"role": USER, "content": "?"}, {"role": ASSISTANT, "content": mark}]
        _, found, behind = self._rendered(ChatInput([*made_up, user])).rpartition(mark)
        if not found:
            raise ValueError("the model's chat template leaves out what was replied before; choose the style script or plain")
        ids = self.tokenizer.encode_more(behind)
        return ids[1:] if ids[:1] == list(before.token_ids[-1:]) else ids  # the reply's own end token is there already

    def whole(self, chat: ChatInput) -> Prompt:
        calls = self.form(bool(chat.tools)).calls
        messages = chat.messages if calls is None else _with_ids(chat.messages, calls.id_length)
        try:
            text = self._rendered(replace(chat, messages=messages))
        except ValueError as error:
            try:
                text = self._rendered(replace(chat, messages=_with_written_arguments(messages)))
            except ValueError:
                raise error from None
        return Prompt(text, tuple(self.tokenizer.encode_more(text)))

    def form(self, with_tools: bool) -> AnswerForm:
        return form_of(self._text(with_tools))

    def _text(self, with_tools: bool) -> str:
        return self.template or self.tokenizer.template_for(with_tools) or ""

    @property
    def _lacks_form(self) -> str:
        return "the model's does not, so write them into the prompt"

    def _rendered(self, chat: ChatInput) -> str:
        return self.tokenizer.render_chat(replace(chat, template=self.template))


HAS_ONE = "Qwen/Qwen3-4B"  # a model that messages name
_KNOWN_FORMS = ", ".join(form.name for form in FORMS if form.encloses != THOUGHTS)


def _with_ids(messages: Sequence[Message], length: int) -> Sequence[Message]:
    """The messages with ids of calls of this length, for templates that take no other. Equal ids stay equal."""
    if length == ID_LENGTH:
        return messages

    def shortened(given: str) -> str:
        return given if len(given) == length else blake2b(given.encode("utf-8", "surrogatepass")).hexdigest()[:length]

    found = []
    for message in messages:
        calls = [{**call, "id": shortened(call.get("id", ""))} for call in message.get(CALLS, ())]
        answered = {CALL_ID: shortened(message[CALL_ID])} if CALL_ID in message else {}
        found.append({**message, **answered, **({CALLS: calls} if calls else {})})
    return found


def _with_written_arguments(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with arguments of calls as texts, for templates that do not take them as objects."""

    def written(call: Mapping[str, Any]) -> Mapping[str, Any]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [{**message, CALLS: [*map(written, message[CALLS])]} if CALLS in message else message for message in messages]


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
