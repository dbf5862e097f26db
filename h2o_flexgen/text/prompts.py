"""Prompts and chats as Python programs give them, read into one form: texts, token ids, messages in OpenAI's form. What would
change the text of a chat and is not known is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import TypeAlias

from h2o_flexgen.core.files import parse_json
from h2o_flexgen.core.hints import did_you_mean, refuse_unknown, shown
from h2o_flexgen.text.tokenizer import Message, Tokenizer

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


Prompts: TypeAlias = "str | Iterable[object]"  # dicts, tensors and arrays are iterable too
NOT_READ = ("multi_modal_data", "prompt_embeds", "encoder_prompt", "inputs_embeds", "pixel_values")
FORMS = 'a prompt is a text, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}'
QUERY, DOCUMENT = "{query}", "{document}"  # their places in a template
PLACES_OF_PAIR = re.compile("(" + "|".join(map(re.escape, (QUERY, DOCUMENT))) + ")")
A_CHAT = f"a chat is a list like [{A_MESSAGE}]"


@dataclass(frozen=True)
class Prompt:
    text: str | None  # None if token ids were given
    ids: tuple[int, ...]
    left_out: int = 0  # tokens of a longer one
    is_pair: bool = False  # of two texts, as the tokenizer puts pairs together


def read_prompts(given: Prompts, tokenizer: Tokenizer) -> list[Prompt]:
    """Reads one prompt (a text, a list of token ids or a dict) or any iterable of prompts."""
    return [_prompt(f"prompt {place}", one, tokenizer) for place, one in enumerate(_each(given))]


def shortened(prompt: Prompt, most: int | None, tokenizer: Tokenizer) -> Prompt:
    """The prompt with `most` tokens at most (None: as it is). Its last ones are left out, but for what the tokenizer puts at
    the end of every text, or of every pair of texts."""
    if most is None or len(prompt.ids) <= most:
        return prompt
    ending = _ending(prompt, tokenizer)[:most]
    return replace(prompt, ids=(*prompt.ids[: most - len(ending)], *ending), left_out=len(prompt.ids) - most)


def _ending(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end every prompt of its kind, whatever it says."""
    if prompt.text is None and not prompt.is_pair:
        return ()
    encode = partial(tokenizer.encode_pair, "a") if prompt.is_pair else tokenizer.encode
    alike: list[int] = []
    for each in zip(*(reversed(encode(text)) for text in ("", "a", "b"))):
        if len(set(each)) > 1:
            break
        alike.insert(0, each[0])
    return tuple(alike)


def read_pair(place: int, given: object, tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Reads a context and its continuation. Two texts are tokenized as one, as the model would read them."""
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable) or len(both := list(given)) != 2:
        raise ValueError(f"pair {place} is {shown(given)}; a pair is (context, continuation), texts or token ids")
    before, after = both
    if isinstance(before, str) and isinstance(after, str):
        start, whole = len(tokenizer.encode(before)), tokenizer.encode(before + after)
        return tuple(whole[:start]), tuple(whole[start:])
    ids = tuple(tokenizer.encode(before)) if isinstance(before, str) else token_ids(f"context {place}", before)
    return ids, tuple(tokenizer.encode_more(after)) if isinstance(after, str) else token_ids(f"continuation {place}", after)


@dataclass(frozen=True)
class TextPair:
    """Two texts that are read together: what is asked, and a text that may answer it."""

    query: str
    document: str
    template: str | None = None  # with their places; None: as the tokenizer puts pairs together

    def read_with(self, tokenizer: Tokenizer) -> Prompt:
        if self.template is None:
            return Prompt(None, tuple(tokenizer.encode_pair(self.query, self.document)), is_pair=True)
        parts = PLACES_OF_PAIR.split(self.template)
        text = "".join({QUERY: self.query, DOCUMENT: self.document}.get(part, part) for part in parts)
        return Prompt(text, tuple(tokenizer.encode(text)))


def read_documents(query: object, documents: object, template: object = None) -> list[TextPair]:
    """The pairs of a query and each of its documents."""
    if not isinstance(query, str) or not query:
        raise ValueError(f"the query is {shown(query)}; it is a text")
    if isinstance(documents, (str, Mapping)) or not isinstance(documents, Iterable):
        raise ValueError(f"the documents are {shown(documents)}; give a list of texts")
    texts = list(documents)
    if wrong := [one for one in texts if not isinstance(one, str) or not one]:
        raise ValueError(f"a document is {shown(wrong[0])}; a document is a text")
    if template is not None and (not isinstance(template, str) or {QUERY, DOCUMENT} - {*PLACES_OF_PAIR.findall(template)}):
        raise ValueError(f"template is {shown(template)}; it is a text with {QUERY} and {DOCUMENT} in it")
    return [TextPair(query, one, template) for one in texts]


def token_ids(what: str, given: object) -> tuple[int, ...]:
    """Reads whole numbers of any kind: Python's, numpy's or torch's."""
    numbers = _plain(given)
    if isinstance(numbers, (str, bytes, Mapping)) or not isinstance(numbers, Iterable):
        raise ValueError(f"{what} is {shown(given)}; {FORMS}")
    return tuple(_token_id(what, _plain(one)) for one in numbers)


@dataclass(frozen=True)
class _GivenPrompt:
    """A dict's tokens, as text or as ids, and for ids perhaps the text that they come from."""

    tokens: object
    text: object = None


def _each(given: object) -> list[object]:
    if isinstance(given, str):
        return [given]
    if isinstance(given, Mapping):
        return [*_of_mapping("the prompt", given)]
    plain = _plain(given)
    if isinstance(plain, (bytes, bytearray)) or not isinstance(plain, Iterable):
        raise ValueError(f"the prompts are {shown(given)}; {FORMS}, and prompts are a list of these")
    items = [_plain(one) for one in plain]
    return [items] if items and all(map(_is_whole, items)) else items


def _prompt(what: str, given: object, tokenizer: Tokenizer) -> Prompt:
    if isinstance(given, Prompt):
        return given
    if isinstance(given, Mapping):
        found = list(_of_mapping(what, given))
        if len(found) != 1:
            raise ValueError(f"{what} is a batch of {len(found)}; give it by itself, and not in a list")
        given = found[0]
    one = given if isinstance(given, _GivenPrompt) else _GivenPrompt(given)
    if isinstance(one.tokens, str):  # an empty text is no prompt, even if the tokenizer adds a start token
        return Prompt(one.tokens, tuple(tokenizer.encode(one.tokens)) if one.tokens else ())
    return Prompt(one.text if isinstance(one.text, str) else None, token_ids(what, one.tokens))


def _of_mapping(what: str, given: Mapping[str, object]) -> Iterator[_GivenPrompt]:
    """A dict as vLLM takes it is one prompt; one that a tokenizer of transformers returned may hold several."""
    if unread := next((key for key in NOT_READ if given.get(key) is not None), None):
        raise ValueError(f"{what} has {unread}, but this engine reads texts alone; leave it out")
    if given.get("prompt_token_ids") is not None:
        yield _GivenPrompt(given["prompt_token_ids"], given.get("prompt"))
    elif given.get("prompt") is not None:
        yield _GivenPrompt(given["prompt"])
    elif given.get("input_ids") is not None:
        yield from map(_GivenPrompt, _without_padding(given["input_ids"], given.get("attention_mask")))
    elif "role" in given:
        raise ValueError(f"{what} is a message of a chat; write llm.chat(messages)")
    else:
        raise ValueError(f"{what} is a dict of {shown(sorted(map(str, given)))}; {FORMS}")


def _without_padding(input_ids: object, mask: object) -> Iterator[object]:
    if mask is None:
        return iter(_each(input_ids))
    rows = [token_ids("input_ids", row) for row in _each(input_ids)]
    kept = [token_ids("the attention_mask", row) for row in _each(mask)]
    if (lengths := [*map(len, rows)]) != (covered := [*map(len, kept)]):
        raise ValueError(
            f"the rows of input_ids have {shown(lengths)} tokens, and those of attention_mask {shown(covered)}; "
            "give both in the same shape"
        )
    return (list(compress(row, own)) for row, own in zip(rows, kept))


def _plain(value: object) -> object:
    """The contents of a tensor or an array as lists and numbers."""
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_id(what: str, value: object) -> int:
    if isinstance(value, Mapping) and "role" in value:
        raise ValueError(f"{what} is a chat; write llm.chat(messages)")
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{what} has the token id {shown(value)}; token ids are whole numbers")
    return value


# -- chats ---------------------------------------------------------------------------------------------------------------


def read_chats(given: object) -> list[list[Message]]:
    """Reads one chat or several; a chat is a list of messages."""
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise ValueError(f"the messages are {shown(given)}; {A_CHAT}")
    items = list(given)
    chats = [items] if items and all(isinstance(one, Mapping) for one in items) else items
    return [read_chat(f"chat {place}", chat) for place, chat in enumerate(chats)]


def read_chat(what: str, given: object) -> list[Message]:
    """Reads one chat; `what` begins the error of one that cannot be read."""
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise ValueError(f"{what} is {shown(given)}; {A_CHAT}")
    messages = [read_message(f"message {place} of {what}", one) for place, one in enumerate(given)]
    if not messages:
        raise ValueError(f"{what} is empty; {A_CHAT}")
    return messages
