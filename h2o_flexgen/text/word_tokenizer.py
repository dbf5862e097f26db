"""WordTokenizer: a tokenizer made from the files of a model. What it shows of texts and of chats follows from the few things
that its kinds say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from h2o_flexgen.core.hints import shown
from h2o_flexgen.text.chat_template import render
from h2o_flexgen.text.grammar import Grammars, of_rules
from h2o_flexgen.text.row_text import TokenPieces, joins_tokens
from h2o_flexgen.text.tokenizer import ChatInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


class WordTokenizer(ABC):
    reads_texts = True
    eos_ids: frozenset[int]
    note: str

    @property
    @abstractmethod
    def of_transformers(self) -> PreTrainedTokenizerBase:
        """The tokenizer as a class of transformers, for users of that library."""

    @abstractmethod
    def made_again(self, adds_start: bool) -> PreTrainedTokenizerBase:
        """Another of transformers, which puts the start token before a text or does not, whatever its files say."""

    @abstractmethod
    def encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def encode_more(self, text: str) -> list[int]: ...

    def encode_pair(self, first: str, second: str) -> list[int]:
        return [*self.encode(first), *self.encode_more(second)]

    @abstractmethod
    def decode(self, ids: Sequence[int], with_special: bool = False) -> str:
        """Keeps spaces as they are in the tokens: "cleaning up" would change text that is already shown."""

    @abstractmethod
    def name_of(self, token: int) -> object:
        """How the files write this token."""

    @property
    @abstractmethod
    def rules(self) -> Tokenizer | None:
        """What makes tokens of a text and a text of tokens, in the library `tokenizers`; None if something else does."""

    @property
    @abstractmethod
    def chat_template(self) -> str | None: ...

    @property
    @abstractmethod
    def special_tokens(self) -> Mapping[str, object]:
        """The tokens that chat templates may name, by the names that these have for them."""

    def piece(self, token: int) -> str | None:
        return None if self._pieces is None else self._pieces.of(token)

    @cached_property
    def _pieces(self) -> TokenPieces | None:
        """None where the text of tokens is not that of one after the other."""
        if not joins_tokens(getattr(self.rules, "decoder", None)):
            return None
        before = self.encode_more("a")[-1:]
        return TokenPieces(self.decode, self.name_of, before[0]) if self.decode(before) else None

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(lambda: of_rules(self.rules))

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_template)

    def template_for(self, with_tools: bool) -> str | None:
        return self.chat_template

    def special_id(self, text: str) -> int | None:
        token = None if self.rules is None else self.rules.token_to_id(text)
        return None if token is None or self.decode([token]) else int(token)

    def render_chat(self, chat: ChatInput) -> str:
        """Renders without the library, which does not bound a template's work."""
        template = chat.template or self.template_for(bool(chat.tools)) or ""
        settings = chat.settings.of(template)
        try:
            return render(template, chat.messages, self.special_tokens, tools=chat.tools, settings=settings)
        except Exception as error:  # whatever a template raises
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ValueError(f"the model's chat template refuses this turn ({shown(reason)}); try another --style") from error
