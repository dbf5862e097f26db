"""Items of OpenAI's Responses, as programs give them: messages, calls of tools, what tools have answered, and thoughts, made
into the messages of a chat. An answer may have several items; they become one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from h2o_flexgen.core.hints import did_you_mean, refuse_unknown, shown
from h2o_flexgen.text.prompts import ASSISTANT, CALL_ID, CALLS, DEVELOPER, REASONING, SYSTEM, TOOL, USER, read_arguments

MESSAGE, CALL, ANSWER, THOUGHT = "message", "function_call", "function_call_output", "reasoning"
KINDS = (MESSAGE, CALL, ANSWER, THOUGHT)
ROLES = (SYSTEM, DEVELOPER, USER, ASSISTANT)  # what tools have answered is an item of its own
_TEXTS = ("input_text", "output_text", "reasoning_text")
_FIELDS: Mapping[str, tuple[str, ...]] = {  # and what only says which item it was
    MESSAGE: ("role", "content", "id", "status", "phase"),
    CALL: ("call_id", "name", "arguments", "id", "status"),
    ANSWER: ("call_id", "output", "id", "status"),
    THOUGHT: ("content", "summary", "id", "status"),
}
_OF_PARTS = ("type", "text", "annotations", "logprobs")
_INSTEAD: Mapping[str, str] = {"encrypted_content": "thoughts are not encrypted here; leave it out"}


def read_items(given: object, instructions: object = None) -> list[dict[str, Any]]:
    """The messages in a text, or in a list of items; `instructions` come first."""
    messages = _Messages()
    if instructions is not None:
        if not isinstance(instructions, str):
            raise ValueError(f"instructions is {shown(instructions)}; allowed is a text")
        messages.add({"role": SYSTEM, "content": instructions})
    if isinstance(given, str):
        messages.add({"role": USER, "content": given})
    elif isinstance(given, Sequence):
        for place, one in enumerate(given):
            messages.read(f"input[{place}]", one)
    else:
        raise ValueError(f"input is {shown(given)}; allowed is a text, or a list of items")
    return messages.all


class _Messages:
    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}  # of tools, by the ids of their calls

    def add(self, message: dict[str, Any]) -> None:
        self.all.append(message)

    def read(self, what: str, given: object) -> None:
        if not isinstance(given, Mapping):
            raise ValueError(f"{what} is {shown(given)}; allowed is an item, which is an object")
        found = {str(name): value for name, value in given.items() if value is not None}
        kind = found.pop("type", MESSAGE if "role" in found else None)
        if kind not in KINDS:
            raise ValueError(f"{what} is of the type {shown(kind)}; known are {', '.join(KINDS)}")
        refuse_unknown(f"field of {what} (type {kind})", found, _FIELDS[kind], _INSTEAD)
        {MESSAGE: self._message, CALL: self._call, ANSWER: self._answer, THOUGHT: self._thought}[kind](what, found)

    def _message(self, what: str, found: Mapping[str, object]) -> None:
        role, content = _role(what, found.get("role")), _text(f"{what}.content", found.get("content"))
        if role == ASSISTANT and (begun := self._begun()) is not None and "content" not in begun:
            begun["content"] = content  # behind its thoughts
        else:
            self.add({"role": role, "content": content})

    def _call(self, what: str, found: Mapping[str, object]) -> None:
        identity, name, arguments = (_string(what, key, found) for key in ("call_id", "name", "arguments"))
        read_arguments(what, arguments)
        self._names[identity] = name
        call = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault(CALLS, []).append(call)

    def _answer(self, what: str, found: Mapping[str, object]) -> None:
        identity = _string(what, "call_id", found)
        if identity not in self._names:
            raise ValueError(f"{what}.call_id is {shown(identity)}, and no item before it is the {CALL} with this call_id")
        content = _text(f"{what}.output", found.get("output"))
        self.add({"role": TOOL, CALL_ID: identity, "name": self._names[identity], "content": content})

    def _thought(self, what: str, found: Mapping[str, object]) -> None:
        if found.get("summary", []) != []:
            raise ValueError(f"{what}.summary is {shown(found['summary'])}; only thoughts as they were are read; give []")
        content = _text(f"{what}.content", found.get("content", []))
        self.add({"role": ASSISTANT, REASONING: content})

    def _begun(self) -> dict[str, Any] | None:
        """The message of the model that may go on."""
        return self.all[-1] if self.all and self.all[-1].get("role") == ASSISTANT else None

    def _assistant(self) -> dict[str, Any]:
        if self._begun() is None:
            self.add({"role": ASSISTANT})
        return self.all[-1]


def _role(what: str, given: object) -> str:
    if not isinstance(given, str) or given not in ROLES:
        hint = did_you_mean(given, ROLES) if isinstance(given, str) else ""
        raise ValueError(f"{what} has the role {shown(given)}; allowed are {', '.join(ROLES)}{hint}")
    return given


def _string(what: str, name: str, found: Mapping[str, object]) -> str:
    if not isinstance(given := found.get(name), str):
        raise ValueError(f"{what}.{name} is {shown(given)}; allowed is a text")
    return given


def _text(what: str, given: object) -> str:
    """A text, which may be in parts."""
    if isinstance(given, str):
        return given
    if not isinstance(given, Sequence):
        raise ValueError(f"{what} is {shown(given)}; allowed is a text, or a list of texts as input_text")
    return "".join(_part(f"{what}[{place}]", one) for place, one in enumerate(given))


def _part(what: str, given: object) -> str:
    if not isinstance(given, Mapping):
        raise ValueError(f'{what} is {shown(given)}; only text is read, as {{"type": "input_text", "text": "..."}}')
    kind = given.get("type")
    name = "refusal" if kind == "refusal" else "text"
    if kind not in (*_TEXTS, "refusal") or not isinstance(given.get(name), str):
        raise ValueError(f'{what} is {shown(given)}; only text is read, as {{"type": "input_text", "text": "..."}}')
    refuse_unknown(f"field of {what}", map(str, given), (*_OF_PARTS, name), {})
    return str(given[name])
