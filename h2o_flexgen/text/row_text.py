"""Text that grows token by token: decoded in a short window, searched for stop strings, never taken back once handed out.
Where texts of tokens are joined one after the other, `TokenPieces` knows what each token adds, and nothing is decoded again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from h2o_flexgen.text.tokenizer import Tokenizer

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


UNFINISHED_AT_MOST = 3  # so many at the end can still become one character, which has at most four bytes
CONTEXT_TOKENS = 6  # prompt tokens decoded before the first new one, as some decoders drop a leading space
WINDOW_TOKENS = 16  # decoded again with each new token, before the window moves on
WINDOW_TOKENS_AT_MOST = 64  # if no place to move to was found, since this is no text


class TextDecoder(Protocol):
    """As much of a tokenizer as makes text of tokens."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def piece(self, token: int) -> str | None: ...


@dataclass(frozen=True)
class WithSpecials:
    """Decodes special tokens, too."""

    tokenizer: Tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, with_special=True)

    def piece(self, token: int) -> str | None:
        return self.tokenizer.piece(token) or None  # of a special one it has none


class Detokenizer:
    """Text that grows token by token. Only a short window of the last tokens is decoded again for each new one, and incomplete
    characters are held back. The pieces joined are the text, which continues the prompt."""

    def __init__(self, tokenizer: TextDecoder, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = _context(tokenizer, prompt_ids)
        self._text = tokenizer.decode(self._window)
        self._shown = _length_shown(self._text)  # characters of the window's text that were handed out
        self._clean = self._last_clean = 0  # the last two places that no character spans, where a window may start

    def add(self, token: int) -> str:
        """Adds a token and returns the text that has become certain."""
        self._window.append(token)
        own = self._tokenizer.piece(token) if self._shown == len(self._text) > 0 else None
        is_garbage = len(self._window) > WINDOW_TOKENS_AT_MOST
        if own is not None:
            piece, held, self._text = own, 0, self._text + own
        else:
            self._text = self._tokenizer.decode(self._window)
            held = _unfinished(self._text)  # all of them: some decoders show no characters before a missing byte
            piece = self._text[self._shown : _length_shown(self._text) if is_garbage else len(self._text) - held]
        self._shown += len(piece)
        if piece and not held:
            self._clean, self._last_clean = self._last_clean, len(self._window)
        if len(self._window) > WINDOW_TOKENS and self._clean and not held:
            self._move_to(self._clean)
        elif is_garbage:
            self._move_to(len(self._window) - WINDOW_TOKENS)
        return piece

    def rest(self) -> str:
        """Returns at the end what was held back: a character that will never be complete."""
        piece, self._shown = self._text[self._shown :], len(self._text)
        return piece

    def _move_to(self, start: int) -> None:
        """Starts the window here from now on: before the last clean place, so that it holds some text that was shown."""
        held = len(self._text) - self._shown
        self._window = self._window[start:]
        self._text = self._tokenizer.decode(self._window)
        self._shown = max(0, len(self._text) - held)
        self._clean, self._last_clean = 0, max(0, self._last_clean - start)


def _context(tokenizer: TextDecoder, prompt_ids: Sequence[int]) -> list[int]:
    """The last tokens of the prompt, beginning with a whole character."""
    for length in range(CONTEXT_TOKENS, 0, -1):
        ids = list(prompt_ids[-length:])
        if UNFINISHED not in tokenizer.decode(ids):
            return ids
    return list(prompt_ids[-CONTEXT_TOKENS:])


def _unfinished(text: str) -> int:
    return len(text) - len(text.rstrip(UNFINISHED))


def _length_shown(text: str) -> int:
    """The length without characters at the end that the next token may still complete."""
    return len(text) - min(UNFINISHED_AT_MOST, _unfinished(text))


def decode_new(tokenizer: TextDecoder, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    """Decodes at once what a Detokenizer returns piece by piece (bytes that are no text may show differently)."""
    context = _context(tokenizer, prompt_ids)
    return tokenizer.decode([*context, *ids])[_length_shown(tokenizer.decode(context)) :]


def pieces_of(tokenizer: TextDecoder, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[str]:
    """The text of each token; joined they are the text. Characters of several tokens belong to the last of them."""
    growing = Detokenizer(tokenizer, prompt_ids)
    pieces = [growing.add(token) for token in ids]
    return [*pieces[:-1], pieces[-1] + growing.rest()] if pieces else []


IsWhole = Callable[[str], bool]


class StopChecker:
    """Looks for stop strings in text that comes in pieces, however the pieces cut them; a possible beginning is held back."""

    def __init__(self, stops: Sequence[str], keeps_stop: bool = False, is_whole: IsWhole | None = None) -> None:
        """`is_whole`: the text may only end where this says that it is whole; a stop string elsewhere is text."""
        self._stops = tuple(stops)
        self._keeps_stop = keeps_stop
        self._is_whole = is_whole
        self._before = ""  # text that was handed out, where it counts
        self._held = ""
        self.found: str | None = None  # the stop string that the text ended with

    def add(self, piece: str, may_stop: bool = True) -> str:
        """Adds a piece and returns the text that surely stands before any stop string, or ends with it. A stop string that ends
        in a piece without `may_stop` is ignored."""
        if not self._stops:
            return piece
        text = self._held + piece
        found = self._first(text) if may_stop else None
        if found is not None:
            place, self.found = found
            self._held = ""
            return text[: self._end(place, self.found)]
        begun = self._begun(text)
        self._held = text[len(text) - begun :]
        sure = text[: len(text) - begun]
        if self._is_whole is not None:
            self._before += sure
        return sure

    def _end(self, place: int, stop: str) -> int:
        """The end of a text with a stop string at this place."""
        return place + len(stop) if self._keeps_stop else place

    def _first(self, text: str) -> tuple[int, str] | None:
        """The first stop string that ends in the new piece, and its place; earlier text was searched already."""
        found = [(place, stop) for stop in self._stops if (place := self._place(text, stop)) >= 0]
        return min(found, default=None)

    def _place(self, text: str, stop: str) -> int:
        """The first place where a stop string may end the text; -1 if there is none."""
        place = text.find(stop, max(0, len(self._held) - len(stop) + 1))
        while place >= 0 and self._is_whole is not None and not self._is_whole(self._before + text[: self._end(place, stop)]):
            place = text.find(stop, place + 1)
        return place

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held

    def _begun(self, text: str) -> int:
        """The length of the longest end of the text with which a stop string begins."""
        start = len(text)
        for stop in self._stops:
            place = text.find(stop[0], max(0, len(text) - len(stop) + 1), start)
            while place >= 0 and not stop.startswith(text[place:]):
                place = text.find(stop[0], place + 1, start)
            start = place if place >= 0 else start
        return len(text) - start


class RowText:
    """The text of a row while it grows: decoded, searched for stop strings, and never taken back once handed out."""

    def __init__(
        self,
        tokenizer: TextDecoder,
        prompt_ids: Sequence[int],
        stops: Sequence[str],
        keeps_stop: bool = False,
        is_whole: IsWhole | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._stops = StopChecker(stops, keeps_stop, is_whole)
        self._may_stop = True  # for the token added last
        self._pieces: list[str] = []

    @property
    def stopped_by(self) -> str | None:
        return self._stops.found

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, token: int, may_stop: bool = True) -> str:
        self._may_stop = may_stop
        return self._keep(self._stops.add(self._detokenizer.add(token), may_stop))

    def finish(self) -> str:
        """Returns what was held back, unless a stop string ended the text."""
        if self.stopped_by is not None:
            return ""
        last = self._stops.add(self._detokenizer.rest(), self._may_stop)
        return self._keep(last if self.stopped_by is not None else last + self._stops.rest())

    def _keep(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece
