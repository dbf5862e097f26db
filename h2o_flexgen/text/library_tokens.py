"""The tokens of a tokenizer as llguidance has them: the bytes of each, and which of them are in no text. Each form has one
token more, behind all others, which stands for the end of a text: which tokens end a row is the engine's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from h2o_flexgen.core.hints import one_line

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer

END = "<|nothing follows|>"
NO_TEXT = b"\xff"  # begins a token that is in no text


def of_bytes(tokens: Sequence[bytes]) -> LLTokenizer:
    """Tokens of which each is the same bytes everywhere; none of them: it is in no text."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes(tokens)))


class _Bytes:
    """As much of a tokenizer as the library asks for."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes]) -> None:
        named = ((token, b"<%d>" % number) for number, token in enumerate(tokens))
        self.tokens = [*(token or NO_TEXT + name for token, name in named), NO_TEXT + END.encode()]
        self.eos_token_id = len(tokens)
        self._ids = {token: number for number, token in enumerate(tokens) if token}

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[bytes((one,))] for one in text if bytes((one,)) in self._ids]


def of_rules(rules: Tokenizer | None) -> LLTokenizer:
    """The tokens of a tokenizer of the library `tokenizers`: its decoder says what bytes they are."""
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer

    if rules is None:
        raise ValueError("no text can be held to a grammar: this tokenizer is none of the library tokenizers; choose another")
    own = Tokenizer.from_str(rules.to_str())
    own.no_padding()
    own.no_truncation()
    end = END
    while own.token_to_id(end) is not None:
        end += END
    own.add_special_tokens([end])
    try:
        return LLTokenizer(own.to_str(), eos_token=own.token_to_id(end))
    except ValueError as error:
        raise ValueError(
            f"no text can be held to a grammar: the tokenizer cannot be read for it ({one_line(error)})"
        ) from error
