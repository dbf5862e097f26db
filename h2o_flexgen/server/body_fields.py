"""The fields of a body: those of every request, and the few that only a server knows."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from h2o_flexgen.core.allowed_values import TRUTH
from h2o_flexgen.core.hints import refuse_unknown, shown
from h2o_flexgen.jobs.line import INPUT, Line, read_body, read_inputs, read_json
from h2o_flexgen.jobs.line_fields import LOGPROBS, PAIRS, TOP_LOGPROBS, ModelNames, Options, UnknownModel, as_given
from h2o_flexgen.server.problems import Refused, bad_request, unknown_model

STREAM, STREAM_OPTIONS, USAGE = "stream", "stream_options", "include_usage"
WITHOUT_EFFECT = "include_obfuscation"  # OpenAI pads chunks against listeners
MOST_COMPLETIONS, MOST_ROWS, MOST_LIKELIEST = 128, 2048, 20  # n; completions of a body; tokens beside each


@dataclass(frozen=True)
class CompletionsRequest:
    """What a body asks for: a completion or several behind each of its prompts."""

    lines: tuple[Line, ...]
    is_streamed: bool
    with_usage: bool  # a last chunk counts tokens
    names: frozenset[str]  # of the fields that the body has

    def as_given(self, message: str) -> str:
        """The message about this request, with the names that it has for things."""
        return as_given(message, self.names)

    @property
    def is_chat(self) -> bool:
        return self.lines[0].is_chat

    @property
    def completions(self) -> int:
        """Completions of each prompt."""
        return self.lines[0].options.params.n


def read_asked(data: bytes, is_chat: bool, defaults: Options, names: ModelNames) -> CompletionsRequest:
    """Reads a body for the model of these names."""
    given = read_given(data, names)
    try:
        return _asked(given, is_chat, defaults)
    except ValueError as error:
        raise refusal_of(str(error), given) from error


def read_asked_inputs(url: str, data: bytes, names: ModelNames) -> CompletionsRequest:
    """The same of a body with prompts that are only read, for this url."""
    given = read_given(data, names)
    try:
        lines = _inputs(url, given)
    except ValueError as error:
        raise refusal_of(str(error), given) from error
    return CompletionsRequest(tuple(lines), False, False, names_of(given))


def read_given(data: bytes, names: ModelNames) -> Mapping[str, object]:
    try:
        given = read_json(data)
    except ValueError as error:
        raise Refused(bad_request(f"the body cannot be read: {error}", "invalid_json")) from error
    if not isinstance(given, dict):
        raise Refused(bad_request(f"the body is {shown(given)}; it is an object with the fields of a request"))
    try:
        return names.read(given)
    except UnknownModel as error:
        raise Refused(unknown_model(str(error))) from error
    except ValueError as error:
        raise refusal_of(str(error), given) from error


def read_line_body(given: Mapping[str, object], is_chat: bool, defaults: Options, names: ModelNames) -> list[Line]:
    """The requests of a batch's line, which may be what a body may be; a ValueError says what is wrong with it."""
    asked = _asked(names.read(given), is_chat, defaults)
    if asked.is_streamed:
        raise ValueError(f"{STREAM} is True; records come whole; leave it out")
    return list(asked.lines)


def read_line_inputs(url: str, given: Mapping[str, object], names: ModelNames) -> list[Line]:
    """The same of a line with prompts that are only read."""
    return _inputs(url, names.read(given))


def _inputs(url: str, given: Mapping[str, object]) -> list[Line]:
    lines = read_inputs(url, given)
    if len(lines) > MOST_ROWS:
        name = PAIRS[url][0] if url in PAIRS else INPUT
        raise ValueError(f"{name} has {len(lines)} prompts; allowed are {MOST_ROWS}: ask in parts")
    return lines


def names_of(given: Mapping[str, object]) -> frozenset[str]:
    return frozenset(name for name, value in given.items() if value is not None)


def _asked(given: Mapping[str, object], is_chat: bool, defaults: Options) -> CompletionsRequest:
    is_streamed = truth(STREAM, given.get(STREAM))
    of_all = {name: value for name, value in given.items() if name not in (STREAM, STREAM_OPTIONS)}
    lines = read_body(of_all, is_chat, defaults)
    with_usage = _with_usage(given.get(STREAM_OPTIONS), is_streamed)
    asked = CompletionsRequest(tuple(lines), is_streamed, with_usage, names_of(given))
    _refuse_too_many(asked)
    return asked


def truth(name: str, value: object) -> bool:
    return value is not None and bool(TRUTH.value(name, value))


def _with_usage(given: object, is_streamed: bool) -> bool:
    if given is None:
        return False
    if not is_streamed:
        raise ValueError(f"{STREAM_OPTIONS} is for a streamed answer; add {STREAM}, or leave it out")
    if not isinstance(given, Mapping):
        raise ValueError(f"{STREAM_OPTIONS} is {shown(given)}; it is an object, like {{{USAGE!r}: true}}")
    refuse_unknown(f"field of {STREAM_OPTIONS}", given, (USAGE, WITHOUT_EFFECT), {})
    truth(f"{STREAM_OPTIONS}.{WITHOUT_EFFECT}", given.get(WITHOUT_EFFECT))
    return truth(f"{STREAM_OPTIONS}.{USAGE}", given.get(USAGE))


def _refuse_too_many(asked: CompletionsRequest) -> None:
    params = asked.lines[0].options.params
    if params.n > MOST_COMPLETIONS:
        raise ValueError(f"n is {params.n}; allowed is {MOST_COMPLETIONS} at most")
    rows = len(asked.lines) * params.n
    if rows > MOST_ROWS:
        raise ValueError(f"prompt asks for {rows} completions at once; allowed are {MOST_ROWS}: ask in parts")
    if params.logprobs is not None and params.logprobs > MOST_LIKELIEST:
        name = TOP_LOGPROBS if asked.is_chat else LOGPROBS
        raise ValueError(f"{name} is {params.logprobs}; allowed is {MOST_LIKELIEST} at most")


def refusal_of(message: str, given: Collection[str]) -> Refused:
    """The refusal of a body with these fields."""
    return Refused(bad_request(message, param=blamed(message, given)))


def blamed(message: str, given: Collection[str]) -> str | None:
    """The field that a message is about: one begins with its name, or quotes it."""
    word = re.split(r"[ .\[]", message, maxsplit=1)[0]
    if word in given:
        return word
    for where in (r"\bmessage \d+ of (\w+)", r"^unknown field of (\w+)"):
        if (found := re.search(where, message)) and found[1] in given:
            return found[1]
    return next((name for name in given if f"unknown field {name!r}" in message), None)
