"""The text that a token adds behind other text, where texts of tokens are joined one after the other: text that grows need not
be decoded again for each new token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

UNFINISHED = "\ufffd"  # shown by decoders for a character that is not complete
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # names of tokens that are a byte each: some decoders read a run of them together
WHOLE_TOKENS = ("ByteLevel", "ByteFallback", "Fuse", "Metaspace")  # rules of decoders that look at tokens one by one


def joins_tokens(decoder: object) -> bool:
    """Whether a decoder of the library of tokenizers joins the texts of tokens, but for what it strips before the first."""
    state = getattr(decoder, "__getstate__", lambda: None)()
    rule = json.loads(state) if isinstance(state, bytes) else None
    return isinstance(rule, dict) and _joins(rule)


def _joins(rule: Mapping[str, object]) -> bool:
    kind, pattern = rule.get("type"), rule.get("pattern")
    if kind == "Sequence":
        rules = rule.get("decoders")
        return isinstance(rules, list) and all(map(_joins, rules))
    if kind == "Replace":
        return isinstance(pattern, dict) and len(str(pattern.get("String", ""))) == 1
    return kind in WHOLE_TOKENS or (kind == "Strip" and rule.get("stop") == 0)


class TokenPieces:
    def __init__(self, decode: Callable[[Sequence[int]], str], name: Callable[[int], object], before: int) -> None:
        """`before`: a token that has a text, and behind which others are decoded."""
        self._decode, self._name, self._before = decode, name, before
        self._start = len(decode([before]))
        self._known: dict[int, str | None] = {}

    def of(self, token: int) -> str | None:
        """None if the text depends on the tokens beside it."""
        try:
            return self._known[token]
        except KeyError:
            return self._known.setdefault(token, self._decoded(token))

    def _decoded(self, token: int) -> str | None:
        text = self._decode([self._before, token])[self._start :]
        return None if UNFINISHED in text or BYTE.fullmatch(str(self._name(token))) else text
