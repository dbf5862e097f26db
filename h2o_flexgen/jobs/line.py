"""The input file of a job: its lines in turn, each with its place, or one line at a place. A line is a request in OpenAI's
batch form, a plain object with a prompt or messages, or a text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple, TypeAlias

from h2o_flexgen.core.files import DOCUMENT, JSON_LINES, local_path, parse_json
from h2o_flexgen.core.hints import Mistakes, as_in_json, reason, refuse_unknown, shown
from h2o_flexgen.jobs.line_fields import (
    CLASSIFY,
    PAIRS,
    RERANK,
    SCORE,
    ModelNames,
    Options,
    read_embedding_options,
    read_label_options,
    read_options,
)
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.dialogue import Style
from h2o_flexgen.text.prompts import Prompt, TextPair, read_chat, token_ids
from h2o_flexgen.text.tokenizer import Message, Tokenizer

LONGEST_LINE = 1 << 26  # bytes
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RawLine(NamedTuple):
    number: int  # counted from 1
    offset: int
    end: int  # where the next line begins
    data: bytes  # without the end of the line; of one that is too long only the beginning


@dataclass(frozen=True)
class InputFile:
    path: Path
    name: str  # as it was written, for messages

    @classmethod
    def of(cls, name: str) -> InputFile:
        """Refuses what cannot be read twice."""
        path = local_path(name)
        try:
            with path.open("rb") as opened:
                is_plain = S_ISREG(os.fstat(opened.fileno()).st_mode)
        except OSError as error:
            raise ValueError(f"{name} cannot be read ({reason(error)}); give a file with a request per line") from error
        if not is_plain:
            raise ValueError(f"{name} is no plain file; a request is read again when its turn comes, so write them to a file")
        return cls(path, name)

    @property
    def is_json(self) -> bool:
        return self.path.suffix == JSON_LINES

    @property
    def is_document(self) -> bool:
        """Whether it is called as one value of JSON is."""
        return self.path.suffix == DOCUMENT

    def lines(self) -> Iterator[RawLine]:
        """The lines that are not blank."""
        with self.path.open("rb") as opened:
            number = offset = 0
            while piece := opened.readline(LONGEST_LINE + 1):
                number, start, offset = number + 1, offset, offset + len(piece)
                if len(piece) > LONGEST_LINE and not piece.endswith(b"\n"):
                    offset += _skip_line(opened)
                data = _text_of(piece, start)
                if data.strip():
                    yield RawLine(number, start, offset, data)

    def open(self) -> LinesAt:
        return LinesAt(self.path.open("rb"))


class LinesAt:
    """Lines of a file that stays open, by the place where they begin."""

    def __init__(self, opened: BufferedReader) -> None:
        self._opened = opened

    def line(self, offset: int) -> bytes:
        self._opened.seek(offset)
        return _text_of(self._opened.readline(LONGEST_LINE + 1), offset)

    def close(self) -> None:
        self._opened.close()


def _text_of(piece: bytes, offset: int) -> bytes:
    """A line without its end, and the first one without the mark that some editors put there."""
    return (piece.removeprefix(BYTE_ORDER_MARK) if offset == 0 else piece).rstrip(b"\r\n")


def _skip_line(opened: BufferedReader) -> int:
    """Reads on to the end of the line; returns how many bytes that were."""
    skipped = 0
    while piece := opened.readline(LONGEST_LINE):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


CUSTOM_ID, PROMPT, MESSAGES, INPUT, BODY = "custom_id", "prompt", "messages", "input", "body"
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
READING = (EMBEDDINGS, CLASSIFY, SCORE, RERANK)  # prompts are only read there
EVERY_URL = (COMPLETIONS, CHAT, *READING)
URLS = " and ".join((", ".join(f'"{url}"' for url in EVERY_URL[:-1]), f'"{EVERY_URL[-1]}"'))
ENVELOPE = (CUSTOM_ID, "method", "url", BODY)
FORMS = f'a line is {{"{PROMPT}": ...}}, {{"{MESSAGES}": [...]}}, or a request in the form of OpenAI\'s batches'
BODIES = f'a request has a "{PROMPT}", or "{MESSAGES}" for a chat'
LONGEST_ID = 512  # characters
RESERVED = "refused-line-"  # begins the id of a record if the id of its line is already another line's
SURROGATE = b"\\ud"  # how the escape of a surrogate begins, the only way in which valid UTF-8 holds one


@dataclass(frozen=True)
class Line:
    """A request. `custom_id` is None where the line has none."""

    custom_id: str | None
    prompt: str | tuple[int, ...] | Sequence[Message] | TextPair
    is_chat: bool
    options: Options

    def read_with(self, tokenizer: Tokenizer, style: Style) -> tuple[Prompt, SamplingParams]:
        """The prompt in tokens, and how it is to be continued. `style` writes chats down."""
        params = self.options.params
        if self.is_chat:
            return style.asked(self.prompt, params, self.options.tools, self.options.settings)  # type: ignore[arg-type]
        if isinstance(self.prompt, TextPair):
            return self.prompt.read_with(tokenizer), params
        if isinstance(self.prompt, str):
            return Prompt(self.prompt, tuple(tokenizer.encode(self.prompt))), params
        return Prompt(None, self.prompt), params  # type: ignore[arg-type]


class BadLine(ValueError):
    """What is wrong with a line, and its id if that could be read."""

    def __init__(self, reason: str, custom_id: str | None = None) -> None:
        super().__init__(as_in_json(reason))
        self.custom_id = custom_id


@dataclass(frozen=True)
class LineReader:
    """Reads lines of one file. Whatever is wrong with one is a BadLine."""

    is_json: bool
    defaults: Options
    url: str | None = None  # that all requests are for, in the form of OpenAI's batches; None: any form will do
    read_body: ReadBody | None = None  # if bodies are not read as those of files are
    most_bytes: int = LONGEST_LINE
    read_inputs: ReadInputs | None = None  # the same of bodies with prompts that are only read
    names: ModelNames | None = None  # that the model may have in bodies, one with each adapter; None: any name will do

    def read(self, data: bytes) -> Line:
        try:
            if not self.is_json:
                return Line(None, _text(PROMPT, _decoded(data)), False, self.defaults)
            given = read_json(data)
        except ValueError as error:
            raise BadLine(str(error)) from error
        if not isinstance(given, dict):
            raise BadLine(f"it is {shown(given)}; {FORMS}")
        return self._read_object(given)

    def _read_object(self, given: dict[str, object]) -> Line:
        mistakes, custom_id = Mistakes(), None
        with mistakes.noted():
            custom_id = _custom_id(given.get(CUSTOM_ID))
        rest = {name: value for name, value in given.items() if name != CUSTOM_ID}
        try:
            if any(name in rest for name in ENVELOPE):
                return replace(self._read_envelope(given, mistakes), custom_id=custom_id)
            with mistakes.noted():
                if self.url is not None:
                    raise ValueError(f"it is no request of a batch; write an object with {', '.join(ENVELOPE)}")
                line = self._read_body(rest, rest.get(MESSAGES) is not None)
            mistakes.refuse()
            return replace(line, custom_id=custom_id)
        except ValueError as error:
            raise BadLine(str(error), custom_id) from error

    def _read_envelope(self, given: Mapping[str, object], mistakes: Mistakes) -> Line:
        """Reads the parts one without the other, and refuses all mistakes, with those that were noted before."""
        with mistakes.noted():
            refuse_unknown("field", given, ENVELOPE, {})
        with mistakes.noted():
            if given.get(CUSTOM_ID) is None:
                raise ValueError(f"{CUSTOM_ID} is missing, by which its record is known")
        with mistakes.noted():
            if given.get("method", "POST") != "POST":
                raise ValueError(f'method is {shown(given["method"])}; only "POST" is known')
        with mistakes.noted():
            line = self._read_for(given.get("url"), given.get(BODY))
        mistakes.refuse()
        return line

    def _read_for(self, url: object, body: object) -> Line:
        if not isinstance(url, str) or url not in EVERY_URL:
            raise ValueError(f"url is {shown(url)}; known are {URLS}")
        if self.url not in (None, url):
            raise ValueError(f'url is "{url}", but this batch is for "{self.url}"')
        if not isinstance(body, dict):
            raise ValueError(f"{BODY} is {shown(body)}; it is the request, an object")
        if url in READING:
            name = INPUT if url not in PAIRS else PAIRS[url][0]
            return _only(name, (self.read_inputs or read_inputs)(url, self._named(body)))
        return self._read_body(body, url == CHAT)

    def _read_body(self, body: Mapping[str, object], is_chat: bool) -> Line:
        return _only(PROMPT, (self.read_body or read_body)(self._named(body), is_chat, self.defaults))

    def _named(self, body: Mapping[str, object]) -> Mapping[str, object]:
        return body if self.names is None else self.names.read(body)


def _only(name: str, lines: Sequence[Line]) -> Line:
    if len(lines) > 1:
        raise ValueError(f"{name} is a list of {len(lines)} prompts; write a line for each")
    return lines[0]


ReadInputs: TypeAlias = Callable[[str, Mapping[str, object]], list[Line]]
ReadBody: TypeAlias = Callable[[Mapping[str, object], bool, Options], list[Line]]


def read_json(data: bytes) -> object:
    """The document in these bytes; a ValueError says why there is none."""
    text = _decoded(data)
    try:
        given: object = parse_json(text)
        if SURROGATE in data.lower():
            _refuse_halves(given)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    return given


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start})") from error


def read_body(body: Mapping[str, object], is_chat: bool, defaults: Options) -> list[Line]:
    """The requests of a body, which are one for each of its prompts. A ValueError says what is wrong with it."""
    wanted, other = (MESSAGES, PROMPT) if is_chat else (PROMPT, MESSAGES)
    given = body.get(wanted)
    if body.get(other) is not None:
        raise ValueError(f"{other} stands beside {wanted}" if given is not None else f"{other} is for the other url")
    rest = {name: value for name, value in body.items() if name not in (wanted, other)}
    mistakes = Mistakes()
    with mistakes.noted():
        options = read_options(rest, is_chat, defaults, beside=(wanted, other))
    with mistakes.noted():
        if given is None:
            raise ValueError(f"{wanted} is missing; {BODIES}")
        prompts = [read_chat(MESSAGES, given)] if is_chat else _prompts(PROMPT, given)
    mistakes.refuse()
    return [Line(None, prompt, is_chat, options) for prompt in prompts]


def read_inputs(url: str, body: Mapping[str, object]) -> list[Line]:
    """The requests of a body with prompts that are only read: one for each of its inputs, or pairs of texts."""
    if url in PAIRS:
        pairs, options = PAIRS[url][1](body)
        return [Line(None, pair, False, options) for pair in pairs]
    read_options_of = read_embedding_options if url == EMBEDDINGS else read_label_options
    options = read_options_of({name: value for name, value in body.items() if name != INPUT}, (INPUT,))
    if body.get(INPUT) is None:
        raise ValueError(f"{INPUT} is missing; it is a text or token ids, or a list of such")
    return [Line(None, prompt, False, options) for prompt in _prompts(INPUT, body[INPUT])]


def _custom_id(given: object) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str) or not 0 < len(given) <= LONGEST_ID:
        raise ValueError(f"{CUSTOM_ID} is {shown(given)}; allowed is a text of 1 to {LONGEST_ID} characters")
    if given.startswith(RESERVED):
        raise ValueError(f"{CUSTOM_ID} is {shown(given)}; records of bad lines are called {RESERVED}..., so give another one")
    return given


def _prompts(name: str, given: object) -> list[str | tuple[int, ...]]:
    """A text or token ids, or a list of such."""
    several = given if isinstance(given, list) and given and isinstance(given[0], (str, list)) else [given]
    return [_prompt(name, one) for one in several]


def _prompt(name: str, given: object) -> str | tuple[int, ...]:
    if isinstance(given, str):
        return _text(name, given)
    ids = token_ids(name, given)
    if not ids:
        raise ValueError(f"{name} is empty; it needs at least one token")
    return ids


def _text(name: str, given: str) -> str:
    if not given.strip():
        raise ValueError(f"{name} is empty; it needs at least one token")
    return given


def _refuse_halves(given: object) -> None:
    """Refuses texts with an unpaired surrogate, which no tokenizer can read."""
    try:
        json.dumps(given, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text contains an unpaired surrogate") from error
