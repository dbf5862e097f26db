"""The fields of a request to /v1/responses, read into those of a chat. What has no counterpart there is refused by name.

Its items are messages, calls of tools, what tools have answered, and thoughts. They are made into the messages of the chat;
several items of an answer become one message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from h2o_flexgen.core.allowed_values import Choice
from h2o_flexgen.core.hints import did_you_mean, refuse_unknown, shown
from h2o_flexgen.jobs.line import Line
from h2o_flexgen.jobs.line_fields import (
    LOGPROBS,
    MAX_TOKENS,
    OTHER_MAX_TOKENS,
    PROMPT_LOGPROBS,
    ModelNames,
    Options,
    read_options,
)
from h2o_flexgen.sampling.params import SAMPLING
from h2o_flexgen.sampling.structured_outputs import FORMAT, NAME, OF_OBJECT, OF_SCHEMA, OF_TEXT
from h2o_flexgen.server.body_fields import (
    STREAM,
    STREAM_OPTIONS,
    WITHOUT_EFFECT,
    CompletionsRequest,
    names_of,
    read_given,
    refusal_of,
    truth,
)
from h2o_flexgen.text.prompts import ASSISTANT, CALL_ID, CALLS, DEVELOPER, SYSTEM, TOOL, USER, read_arguments, read_chat
from h2o_flexgen.text.prompts import REASONING as THOUGHTS
from h2o_flexgen.text.tokenizer import EFFORT, SETTINGS, VERBOSITY
from h2o_flexgen.text.tools import ALLOWED, CHOICE, FUNCTION, PARALLEL, TOOLS, Tool, read_function, read_tools, tool_use

MESSAGE, CALL, ANSWER, THOUGHT = "message", "function_call", "function_call_output", "reasoning"
ITEM_TYPES = (MESSAGE, CALL, ANSWER, THOUGHT)
ROLES = (SYSTEM, DEVELOPER, USER, ASSISTANT)  # what tools have answered is an item of its own
_TEXTS = ("input_text", "output_text", "reasoning_text")
_ITEM_FIELDS: Mapping[str, tuple[str, ...]] = {  # and what only says which item it was
    MESSAGE: ("role", "content", "id", "status", "phase"),
    CALL: ("call_id", "name", "arguments", "id", "status"),
    ANSWER: ("call_id", "output", "id", "status"),
    THOUGHT: ("content", "summary", "id", "status"),
}
_OF_PARTS = ("type", "text", "annotations", "logprobs")
_ITEMS_INSTEAD: Mapping[str, str] = {"encrypted_content": "thoughts are not encrypted here; leave it out"}


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
        if kind not in ITEM_TYPES:
            raise ValueError(f"{what} is of the type {shown(kind)}; known are {', '.join(ITEM_TYPES)}")
        refuse_unknown(f"field of {what} (type {kind})", found, _ITEM_FIELDS[kind], _ITEMS_INSTEAD)
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
        self.add({"role": ASSISTANT, THOUGHTS: content})

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


INPUT, INSTRUCTIONS, MOST, TEXT, REASONING = "input", "instructions", "max_output_tokens", "text", "reasoning"
_KEPT = "nothing is kept between requests; give all items as input"
_OF_CHATS = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
_SAMPLED = frozenset(SAMPLING) - {MAX_TOKENS, "n", LOGPROBS, PROMPT_LOGPROBS, FORMAT}
_OWN = (INPUT, INSTRUCTIONS, MOST, TEXT, REASONING, TOOLS, CHOICE, PARALLEL, STREAM, STREAM_OPTIONS, "model")
# fields that are let pass with the value that changes nothing, and what to do otherwise
_NEUTRAL: Mapping[str, tuple[tuple[object, ...], str]] = {
    "store": ((False,), _KEPT),
    "background": ((False,), "answers come at once; leave it out"),
    "truncation": (("disabled",), "nothing of a chat is left out; give less of it"),
    "include": (([],), "all that there is comes by itself; for log-probabilities ask /v1/chat/completions"),
    "top_logprobs": ((0,), "log-probabilities are those of /v1/chat/completions"),
}
KNOWN = frozenset((*_OWN, SETTINGS, *_OF_CHATS, *_NEUTRAL, *_SAMPLED))
_INSTEAD: Mapping[str, str] = {
    "previous_response_id": _KEPT,
    "conversation": _KEPT,
    "prompt": "there are no stored prompts; write instructions and input",
    "messages": f"it is called {INPUT}",
    "n": "there is one answer; ask several times",
    FORMAT: f'it is called {TEXT}: {{"format": ...}}',
    **dict.fromkeys((MAX_TOKENS, OTHER_MAX_TOKENS), f"it is called {MOST}"),
    "max_tool_calls": f"tools are called by the client; {PARALLEL} allows one call",
    EFFORT: f'it is called {REASONING}: {{"effort": ...}}',
    VERBOSITY: f'it is called {TEXT}: {{"{VERBOSITY}": ...}}',
}
_WORDING: Mapping[str, str] = {
    **dict.fromkeys((NAME, FORMAT), f"{TEXT}.format"),
    **dict.fromkeys((MAX_TOKENS, OTHER_MAX_TOKENS), MOST),
    EFFORT: f"{REASONING}.effort",
    VERBOSITY: f"{TEXT}.{VERBOSITY}",
}
_A_TOOL = '{"type": "function", "name": "...", "parameters": {...}}'
_FORMATS = Choice((OF_TEXT, OF_OBJECT, OF_SCHEMA))


@dataclass(frozen=True)
class ResponseRequest(CompletionsRequest):
    """What a body asks for: one answer."""

    given: Mapping[str, Any] = field(default_factory=dict)  # the body

    def as_given(self, message: str) -> str:
        return _as_given(message, self.names)


def read_response(data: bytes, defaults: Options, names: ModelNames) -> ResponseRequest:
    """Reads a body for the model of these names."""
    given = read_given(data, names)
    try:
        return _asked(given, defaults)
    except ValueError as error:
        raise refusal_of(_as_given(str(error), given), given) from error


def _as_given(message: str, names: Any) -> str:
    """The message by the names that a request of this kind has."""
    first, blank, rest = message.partition(" ")
    word, point, behind = first.partition(".")
    if word not in _WORDING or word in names:
        return message
    behind = behind.removeprefix(OF_SCHEMA).removeprefix(".")
    return f"{_WORDING[word]}{point if behind else ''}{behind}{blank}{rest}"


def _asked(given: Mapping[str, Any], defaults: Options) -> ResponseRequest:
    found = {name: value for name, value in given.items() if value is not None}
    refuse_unknown("field", found, sorted(KNOWN), _INSTEAD)
    for name in found.keys() & _NEUTRAL.keys():
        neutral, otherwise = _NEUTRAL[name]
        if not any(found[name] is one or (type(found[name]) is type(one) and found[name] == one) for one in neutral):
            raise ValueError(f"{name} is {shown(found[name])}; {otherwise}")
    if INPUT not in found:
        raise ValueError(f"{INPUT} is missing; it is a text, or a list of items")
    messages = read_chat(INPUT, read_items(found[INPUT], found.get(INSTRUCTIONS)))
    line = Line(None, messages, True, _options(found, defaults))
    is_streamed = truth(STREAM, found.get(STREAM))
    _check_stream_options(found.get(STREAM_OPTIONS), is_streamed)
    return ResponseRequest((line,), is_streamed, False, names_of(found), found)


def _options(found: Mapping[str, Any], defaults: Options) -> Options:
    taken = {name: value for name, value in found.items() if name in (SETTINGS, *_OF_CHATS, *_SAMPLED)}
    if MOST in found:
        if type(found[MOST]) is int and found[MOST] == 0:
            raise ValueError(f"{MOST} is 0; an answer has a token at least, so give 1 or more")
        taken[OTHER_MAX_TOKENS] = found[MOST]
    options = read_options({**taken, **_of_text(found.get(TEXT)), **_of_reasoning(found.get(REASONING))}, True, defaults)
    if options.params.n != 1:
        options = replace(options, params=replace(options.params, n=1))
    use = tool_use(read_tools(found.get(TOOLS), _A_TOOL, _tool), _choice(found.get(CHOICE)), found.get(PARALLEL))
    return replace(options, tools=use)


def _of_text(given: object) -> dict[str, object]:
    """What is said of the text, as chats have it."""
    if given is None:
        return {}
    found = _mapping(TEXT, given)
    refuse_unknown(f"field of {TEXT}", found, ("format", VERBOSITY), {})
    taken = {name: value for name, value in found.items() if name == VERBOSITY}
    if "format" not in found:
        return taken
    asked = _mapping(f"{TEXT}.format", found["format"])
    kind = _FORMATS.value(f"{TEXT}.format.type", asked.get("type"))
    beside = {name: value for name, value in asked.items() if name != "type"}
    if kind != OF_SCHEMA:
        refuse_unknown(f"field of {TEXT}.format", beside, (), {})
    return {**taken, FORMAT: {"type": kind, OF_SCHEMA: beside} if kind == OF_SCHEMA else {"type": kind}}


def _of_reasoning(given: object) -> dict[str, object]:
    if given is None:
        return {}
    found = _mapping(REASONING, given)
    no_summaries = "there are no summaries: thoughts come whole"
    refuse_unknown(f"field of {REASONING}", found, ("effort",), dict.fromkeys(("summary", "generate_summary"), no_summaries))
    return {EFFORT: found["effort"]} if found else {}


def _tool(what: str, given: object) -> Tool:
    if not isinstance(given, Mapping) or given.get("type") != FUNCTION:
        raise ValueError(f"{what} is {shown(given)}; only functions are known, as {_A_TOOL}")
    return read_function(what, {name: value for name, value in given.items() if name != "type"})


def _choice(given: object) -> object:
    """The choice of a tool, as chats have it."""
    if isinstance(given, Mapping) and given.get("type") == ALLOWED and isinstance(given.get(TOOLS), list):
        rest = {name: value for name, value in given.items() if name != "type"}
        return {"type": ALLOWED, ALLOWED: {**rest, TOOLS: [_choice(one) for one in given[TOOLS]]}}
    if not isinstance(given, Mapping) or given.get("type") != FUNCTION or "name" not in given:
        return given
    refuse_unknown(f"field of {CHOICE}", map(str, given), ("type", "name"), {})
    return {"type": FUNCTION, FUNCTION: {"name": given["name"]}}


def _check_stream_options(given: object, is_streamed: bool) -> None:
    if given is None:
        return
    if not is_streamed:
        raise ValueError(f"{STREAM_OPTIONS} is for a streamed answer; add {STREAM}, or leave it out")
    found = _mapping(STREAM_OPTIONS, given)
    refuse_unknown(f"field of {STREAM_OPTIONS}", found, (WITHOUT_EFFECT,), {"include_usage": "the last event has it"})
    truth(f"{STREAM_OPTIONS}.{WITHOUT_EFFECT}", found.get(WITHOUT_EFFECT))


def _mapping(name: str, given: object) -> dict[str, object]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} is {shown(given)}; allowed is an object")
    return {str(key): value for key, value in given.items() if value is not None}
