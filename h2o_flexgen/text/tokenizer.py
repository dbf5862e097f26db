"""Tokenizers: the one in a model's folder, bytes as tokens on request, and a stand-in for a missing one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from h2o_flexgen.text.grammar import Grammars
from h2o_flexgen.text.library_tokens import of_bytes
from h2o_flexgen.text.template_settings import NO_SETTINGS, TemplateSettings

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
