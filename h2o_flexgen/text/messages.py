"""Chats as Python programs give them, one or several lists of messages with role and content, read into one form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from h2o_flexgen.core.hints import shown
from h2o_flexgen.text.tokenizer import Message

A_CHAT = 'a chat is a list like [{"role": "user", "content": "..."}]'


def read_chats(given: object) -> list[list[Message]]:
    """Reads one chat or several; a chat is a list of messages, of which the role and the text are read."""
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise ValueError(f"the messages are {shown(given)}; {A_CHAT}")
    items = list(given)
    chats = [items] if items and all(isinstance(one, Mapping) for one in items) else items
    return [_read_chat(f"chat {place}", chat) for place, chat in enumerate(chats)]


def _read_chat(whose: str, given: object) -> list[Message]:
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise ValueError(f"{whose} is {shown(given)}; {A_CHAT}")
    messages = [_read_message(f"message {place} of {whose}", one) for place, one in enumerate(given)]
    if not messages:
        raise ValueError(f"{whose} is empty; {A_CHAT}")
    return messages


def _read_message(whose: str, given: object) -> Message:
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str) or given.get("content") is None:
        raise ValueError(f"{whose} is {shown(given)}; {A_CHAT}")
    content = given["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, Sequence) or not all(isinstance(part, Mapping) and "text" in part for part in parts):
        raise ValueError(f"{whose} has the content {shown(content)}; only text is read")
    return {"role": given["role"], "content": "".join(str(part["text"]) for part in parts)}
