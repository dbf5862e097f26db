"""Messages of chats in OpenAI's form, as programs give and store them, read into the form that chat templates know. What would
change the text and is not known is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from h2o_flexgen.core.files import parse_json
from h2o_flexgen.core.hints import did_you_mean, refuse_unknown, shown
from h2o_flexgen.text.tokenizer import Message

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
DEVELOPER = "developer"  # OpenAI's later name of a system
ROLES: Mapping[str, str] = {  # and what templates call them
    SYSTEM: SYSTEM,
    DEVELOPER: SYSTEM,
    USER: USER,
    ASSISTANT: ASSISTANT,
    TOOL: TOOL,
    "function": TOOL,  # OpenAI's earlier name
}
A_MESSAGE = '{"role": "user", "content": "..."}'
CALLS, CALL, CALL_ID, REASONING = "tool_calls", "function_call", "tool_call_id", "reasoning_content"
_OF_ALL = ("role", "content", "name")
_OF_ROLE: Mapping[str, tuple[str, ...]] = {
    ASSISTANT: (*_OF_ALL, CALLS, CALL, "refusal", "annotations", REASONING),
    TOOL: (*_OF_ALL, CALL_ID),
}
_INSTEAD: Mapping[str, str] = {
    "audio": "only text is read",
    **dict.fromkeys(("images", "image_url", "input_audio"), "only text is read"),
    **dict.fromkeys((CALLS, CALL), f"only a message of the {ASSISTANT} has calls"),
    CALL_ID: f"only a message of a {TOOL} has one",
    "text": "it is called content",
    "tool_call": f"it is called {CALLS}, a list",
}


def read_message(what: str, given: object) -> Message:
    """Reads one message; `what` begins the error of one that cannot be read. A field that is null is left out."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{what} is {shown(given)}; write {A_MESSAGE}")
    found = {str(name): value for name, value in given.items() if value is not None}
    role = _role(what, found.get("role"))
    refuse_unknown(f"field of {what} (role {role})", found, _OF_ROLE.get(role, _OF_ALL), _INSTEAD)
    calls = _calls(what, found)
    said = found.get("content", found.get("refusal"))
    if said is None and not calls and REASONING not in found:
        raise ValueError(f"{what} is {shown(given)}; it has no content; write {A_MESSAGE}")
    beside = {name: _text(what, name, found[name]) for name in ("name", CALL_ID, REASONING) if name in found}
    _text(what, "refusal", found.get("refusal", ""))
    if not isinstance(found.get("annotations", []), list):
        raise ValueError(f"{what} has the annotations {shown(found['annotations'])}; allowed is a list")
    # a template may write a content that is missing as None, and look whether there are calls by their name alone
    content = "" if said is None else _content(what, said)
    return {"role": role, "content": content, **beside, **({CALLS: calls} if calls else {})}


def _role(what: str, given: object) -> str:
    if not isinstance(given, str) or given not in ROLES:
        hint = did_you_mean(given, ROLES) if isinstance(given, str) else ""
        raise ValueError(f"{what} has the role {shown(given)}; allowed are {', '.join(ROLES)}{hint}")
    return ROLES[given]


def _text(what: str, name: str, given: object) -> str:
    if not isinstance(given, str):
        raise ValueError(f"{what} has the {name} {shown(given)}; allowed is a text")
    return given


def _content(what: str, given: object) -> str:
    """The text of a content, which may be in parts."""
    if isinstance(given, str):
        return given
    if not isinstance(given, Sequence) or not all(isinstance(part, Mapping) for part in given):
        raise ValueError(f"{what} has the content {shown(given)}; only text is read")
    return "".join(_part(what, part) for part in given)


def _part(what: str, part: Mapping[object, object]) -> str:
    kind = part.get("type", "text")
    if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
        raise ValueError(f'{what} has the part {shown(part)}; only text is read, as {{"type": "text", "text": "..."}}')
    refuse_unknown(f"field of a part of {what}", [str(name) for name in part], ("type", kind), {})
    return str(part[kind])


# -- calls of tools --------------------------------------------------------------------------------------------------------


def _calls(what: str, found: Mapping[str, object]) -> list[Message]:
    """The calls of a message, with arguments as the objects that templates expect and not as the texts that clients send."""
    given = found.get(CALLS, [])
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ValueError(f"{what} has the {CALLS} {shown(given)}; allowed is a list")
    if CALL in found:
        if given:
            raise ValueError(f"{what} has {CALLS} and {CALL}; give one of them")
        return [_call(f"{CALL} of {what}", {"function": found[CALL]})]
    return [_call(f"call {place} of {what}", one) for place, one in enumerate(given)]


def _call(what: str, given: object) -> Message:
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str):
        known = '{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{}"}}'
        raise ValueError(f"{what} is {shown(given)}; it is {known}")
    refuse_unknown(f"field of {what}", map(str, given), ("id", "type", "function"), {})
    refuse_unknown(f"field of the function of {what}", map(str, function), ("name", "arguments"), {})
    if given.get("type", "function") != "function":
        raise ValueError(f"{what} has the type {shown(given['type'])}; allowed is function")
    identity = {} if given.get("id") is None else {"id": _text(what, "id", given["id"])}
    arguments = read_arguments(what, function.get("arguments"))
    return {**identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_arguments(what: str, given: object) -> Mapping[str, object]:
    """Reads the arguments of a call; `what` begins the error of those that are no object."""
    try:
        found = parse_json(given or "{}") if given is None or isinstance(given, str) else given
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()  # half a pair of characters is read by no tokenizer
    except (ValueError, TypeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{what} has the arguments {shown(given)}; allowed is an object, or one written as JSON")
    return found
