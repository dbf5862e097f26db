"""Tokenizers: the one in a model's folder, bytes as tokens on request, and a stand-in for a missing one. They write down
chats, with the settings that a chat template looks at beside the messages, `enable_thinking` for instance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from h2o_flexgen.core.allowed_values import Choice
from h2o_flexgen.core.hints import shown
from h2o_flexgen.text.grammar import Grammars, of_bytes

SETTINGS, EFFORT, VERBOSITY = "chat_template_kwargs", "reasoning_effort", "verbosity"
USUAL_VERBOSITY = "medium"
VERBOSITIES = Choice(("low", USUAL_VERBOSITY, "high"))
THINKS, NO_EFFORT = "enable_thinking", "none"
TAKEN = ("messages", "tools", "documents", "add_generation_prompt")


@dataclass(frozen=True)
class TemplateSettings:
    given: Mapping[str, object] = field(default_factory=dict)
    effort: str | None = None  # for thoughts, as OpenAI has it; a template may have a name for that, or none
    verbosity: str | None = None  # as OpenAI has it

    def of(self, template: str) -> dict[str, object]:
        """The settings for a template; one that it does not look at is refused."""
        for name in self.given:
            if not _looks_at(template, name):
                raise ValueError(f"{SETTINGS} has {shown(name)}, at which the chat template does not look; leave it out")
        if not _looks_at(template, VERBOSITY):
            self._refuse_verbosity("at which the chat template does not look")
        said = {} if self.effort is None else {EFFORT: self.effort, THINKS: self.effort != NO_EFFORT}
        if self.verbosity is not None:
            said[VERBOSITY] = self.verbosity
        return {**{name: value for name, value in said.items() if _looks_at(template, name)}, **self.given}

    def refuse_without_template(self) -> None:
        if self.given:
            raise ValueError(f"{SETTINGS} is {shown(self.given)}; chats are not written by a template here; leave it out")
        self._refuse_verbosity("and chats are not written by a template here")

    def _refuse_verbosity(self, why: str) -> None:
        if self.verbosity not in (None, USUAL_VERBOSITY):
            raise ValueError(f"{VERBOSITY} is {shown(self.verbosity)}, {why}; say it in a message")


NO_SETTINGS = TemplateSettings()


def _looks_at(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def read_settings(given: object, effort: object = None, verbosity: object = None) -> TemplateSettings:
    """Reads what a request says of templates."""
    if effort is not None and not isinstance(effort, str):
        raise ValueError(f"{EFFORT} is {shown(effort)}; allowed is a text")
    asked = None if verbosity is None else VERBOSITIES.value(VERBOSITY, verbosity)
    if given is None:
        return TemplateSettings({}, effort, asked)
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in given):
        raise ValueError(f'{SETTINGS} is {shown(given)}; allowed is an object with names, like {{"{THINKS}": false}}')
    if own := next((name for name in given if name in TAKEN), None):
        raise ValueError(f"{SETTINGS} has {shown(own)}, which is made of the request itself; leave it out")
    try:
        json.dumps(given, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"{SETTINGS} is {shown(given)}; allowed are values of JSON") from None
    return TemplateSettings({**given}, effort, asked)


BYTES = "bytes"  # a token per byte; AUTO is the model's own tokenizer
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
LACKS_FILES = f"it has none of {', '.join(TOKENIZER_FILES)}: put them there"
Message = Mapping[str, Any]  # role ("system", "user", "assistant", "tool") and content; of some, tool_calls or tool_call_id


@dataclass(frozen=True)
class ChatInput:
    """Messages, and what a chat template is given beside them."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]] = ()  # those that the model is told of, in OpenAI's form
    settings: TemplateSettings = NO_SETTINGS
    template: str | None = None  # instead of the model's own


class Tokenizer(Protocol):
    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a row."""

    @property
    def reads_texts(self) -> bool:
        """True if texts can be encoded, and token ids shown as text."""

    @property
    def note(self) -> str:
        """What reports say of it; nothing for the model's own tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Encodes a text with the special tokens that the model expects around a prompt."""

    def encode_more(self, text: str) -> list[int]:
        """Encodes text that continues other text: no special tokens but those written in it."""

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Encodes two texts that are read together, as the tokenizer puts pairs of texts together."""

    def decode(self, ids: Sequence[int], with_special: bool = False) -> str:
        """Decodes tokens, without special ones unless they are asked for."""

    def piece(self, token: int) -> str | None:
        """The text that a token adds behind some text that ends in a whole character; None if that depends on other tokens."""

    @property
    def grammars(self) -> Grammars:
        """What its texts may be held to."""

    @property
    def has_chat_template(self) -> bool: ...

    def template_for(self, with_tools: bool) -> str | None:
        """The chat template for chats with tools, or without."""

    def special_id(self, text: str) -> int | None:
        """The token that is written so and is special, which means that texts do not show it; None if there is none."""

    def render_chat(self, chat: ChatInput) -> str:
        """The text of a chat, up to where the model's answer begins. Special tokens are written out."""


class ByteTokenizer:
    """A token per byte, for random weights and for models trained this way. Every text can be encoded and every id decoded,
    with any vocabulary; ids without a byte show as numbers."""

    SPECIALS = 4  # ids 0 to 3 have a meaning in most vocabularies
    has_chat_template = False
    reads_texts = True
    note = "every byte is a token"

    def __init__(self, vocab: int, eos_ids: frozenset[int] = frozenset()) -> None:
        self.eos_ids = eos_ids
        self._first = self.SPECIALS if vocab > self.SPECIALS else 0
        self._values = vocab - self._first

    def encode(self, text: str) -> list[int]:
        return [self._first + byte % self._values for byte in text.encode("utf-8", errors="replace")]

    def encode_more(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_pair(self, first: str, second: str) -> list[int]:
        return self.encode(first + second)

    def decode(self, ids: Sequence[int], with_special: bool = False) -> str:
        return b"".join(map(self._bytes_of, ids)).decode("utf-8", errors="replace")

    def piece(self, token: int) -> str | None:
        own = self._bytes_of(token)
        return own.decode() if own.isascii() else None

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(lambda: of_bytes([self._bytes_of(token) for token in range(self._first + min(256, self._values))]))

    def template_for(self, with_tools: bool) -> str | None:
        return None

    def special_id(self, text: str) -> int | None:
        return None

    def render_chat(self, chat: ChatInput) -> str:
        raise ValueError("bytes have no chat template")

    def _bytes_of(self, token: int) -> bytes:
        byte = token - self._first
        if byte < 0:
            return b""
        return bytes((byte,)) if byte < 256 else f"<{token}>".encode()


class NoTokenizer:
    """Stands in for a missing tokenizer: token ids go in and come out, their text is empty, and texts are refused."""

    has_chat_template = False
    reads_texts = False

    def __init__(self, place: Path, eos_ids: frozenset[int] = frozenset(), lacks: str = LACKS_FILES) -> None:
        """`place` is the model's folder or its GGUF file."""
        self.eos_ids = eos_ids
        self.note = f"none: {place} has no tokenizer, so prompts and outputs are token ids"
        self.missing = (
            f"{place} has no tokenizer ({lacks}); give token ids, or choose a tokenizer (--tokenizer, in Python tokenizer=): "
            f"{BYTES}, or the folder or GGUF file of another"
        )

    def encode(self, text: str) -> list[int]:
        raise ValueError(f"a text cannot be read: {self.missing}")

    def encode_more(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_pair(self, first: str, second: str) -> list[int]:
        return self.encode(first)

    def decode(self, ids: Sequence[int], with_special: bool = False) -> str:
        return ""

    def piece(self, token: int) -> str | None:
        return ""

    @property
    def grammars(self) -> Grammars:
        raise ValueError(f"no text can be held to a grammar: {self.missing}")

    def template_for(self, with_tools: bool) -> str | None:
        return None

    def special_id(self, text: str) -> int | None:
        return None

    def render_chat(self, chat: ChatInput) -> str:
        raise ValueError(f"a chat cannot be written down: {self.missing}")
