"""What a text is held to, as it is asked for: a JSON schema, any JSON object, a regular expression, one of some texts, or a
grammar. The names are vLLM's. OpenAI's `response_format` is read into the same. What compiles these is not imported here.

The engine knows only a `Constraint`: it takes the tokens of one row one by one, and says which may come next.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from h2o_flexgen.core.allowed_values import TRUTH, Allowed, Choice, Rule, any_of, several, text
from h2o_flexgen.core.files import NotADocument, local_path, parse_json, read_document_text
from h2o_flexgen.core.hints import refuse_unknown, shortened, shown

JSON, REGEX, CHOICE, GRAMMAR, JSON_OBJECT = "json", "regex", "choice", "grammar", "json_object"
FORM_NAMES = (JSON, REGEX, CHOICE, GRAMMAR, JSON_OBJECT)
WHITESPACE = ("disable_any_whitespace", "whitespace_pattern")  # of JSON
_TEXT = Rule(text, "a text that is not empty")
_TEXTS = Rule(any_of(several(text)), "a list of texts, none of them empty")
_INSTEAD: Mapping[str, str] = {
    "backend": "there is one that compiles, llguidance; leave it out",
    "structural_tag": "write it as a grammar",
    "json_schema": f"it is called {JSON}",
    "lark": f"it is called {GRAMMAR}",
    "strict": "what is asked for always holds; leave it out",
}


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What a text is held to: one of the first five. Each is checked when this is made; whether it can be compiled is known
    where there is a tokenizer."""

    json: str | bool | Mapping[str, object] | None = None  # a schema; kept as a text
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # Lark's form, or GBNF
    json_object: bool | None = None
    disable_fallback: bool = False  # changes nothing: what cannot be held to is refused
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            given = getattr(self, one.name)
            if given is not one.default:
                object.__setattr__(self, one.name, _READERS[one.name](f"{NAME}.{one.name}", given))
        asked = [name for name in FORM_NAMES if getattr(self, name)]
        if len(asked) != 1:
            found = f"asks for {' and '.join(asked)}" if asked else "asks for nothing"
            raise ValueError(f"{NAME} {found}; give one of {', '.join(FORM_NAMES)}")
        of_json = ("disable_additional_properties", *WHITESPACE)
        if asked[0] not in (JSON, JSON_OBJECT) and (name := next((name for name in of_json if getattr(self, name)), None)):
            raise ValueError(f"{NAME}.{name} is for {JSON} and {JSON_OBJECT}, and this is a {asked[0]}; leave it out")

    @property
    def kind(self) -> str:
        return next(name for name in FORM_NAMES if getattr(self, name))

    @property
    def asked(self) -> dict[str, object]:
        """What is asked for, as plain values."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) != one.default}

    @property
    def schema(self) -> Any:
        """The JSON schema; for any object, that of an object."""
        if self.json_object:
            return {"type": "object"}
        schema = parse_json(str(self.json))
        return _closed(schema) if self.disable_additional_properties else schema

    @property
    def texts(self) -> tuple[str, ...]:
        assert isinstance(self.choice, tuple), "read when it was made"
        return self.choice


NAME, FORMAT = "structured_outputs", "response_format"


def _schema(name: str, given: object) -> str:
    """A schema as a text, with its properties in their order: an answer has them in this order."""
    try:
        schema = parse_json(given) if isinstance(given, str) else given
        if not isinstance(schema, (Mapping, bool)):
            raise TypeError(schema)
        return json_text.dumps(schema, ensure_ascii=False, allow_nan=False)
    except NotADocument as error:
        raise ValueError(f"{name} is {shown(given)}, which is not JSON ({error}); allowed is a JSON schema") from None
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"{name} is {shown(given)}; allowed is a JSON schema, an object or a text that has one") from None


_READERS: Mapping[str, Any] = {
    JSON: _schema,
    **dict.fromkeys((REGEX, GRAMMAR, "whitespace_pattern"), _TEXT.value),
    CHOICE: _TEXTS.value,
    **dict.fromkeys((JSON_OBJECT, "disable_fallback", "disable_any_whitespace", "disable_additional_properties"), TRUTH.value),
}


def _closed(schema: object) -> object:
    """The schema, in which no object has other properties than those that are named."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(one) for name, one in schema.items()}
    names_some = "properties" in schema or "patternProperties" in schema
    return {**closed, "additionalProperties": False} if names_some and "additionalProperties" not in schema else closed


class AsStructuredOutputs(Allowed):
    """What vLLM's `structured_outputs` may be. On the command line it is a file with a JSON schema."""

    def value(self, name: str, given: object, note: str = "") -> StructuredOutputsParams:
        if isinstance(given, StructuredOutputsParams):
            return given
        if not isinstance(given, Mapping):
            raise ValueError(f"{name} is {shown(given)}; allowed is {self}")
        known = [one.name for one in fields(StructuredOutputsParams)]
        found = {str(key): value for key, value in given.items() if value is not None}
        refuse_unknown(f"field of {name}", found, known, _INSTEAD)
        return StructuredOutputsParams(**found)

    def typed(self, word: str) -> StructuredOutputsParams:
        path = local_path(word)
        named = shortened(str(path))
        try:
            return StructuredOutputsParams(json=read_document_text(path, named))
        except ValueError as error:
            raise ValueError(str(error).replace(f"{NAME}.{JSON}", f"the file {named}", 1)) from error

    def __str__(self) -> str:
        return f'an object with one of {", ".join(FORM_NAMES)}, like {{"{CHOICE}": ["yes", "no"]}}'


# -- as OpenAI has it --------------------------------------------------------------------------------------------------------

OF_TEXT, OF_OBJECT, OF_SCHEMA = "text", "json_object", "json_schema"
_TYPES = Choice((OF_TEXT, OF_OBJECT, OF_SCHEMA))
A_FORMAT = '{"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}'


class AsResponseFormat(Allowed):
    """What OpenAI's `response_format` may be."""

    def value(self, name: str, given: object, note: str = "") -> StructuredOutputsParams | None:
        if isinstance(given, StructuredOutputsParams):
            return given
        if not isinstance(given, Mapping):
            raise ValueError(f"{name} is {shown(given)}; allowed is {self}")
        found = {str(key): value for key, value in given.items() if value is not None}
        kind = _TYPES.value(f"{name}.type", found.get("type"))
        refuse_unknown(f"field of {name}", found, ("type", OF_SCHEMA) if kind == OF_SCHEMA else ("type",), {})
        if kind == OF_TEXT:
            return None
        return StructuredOutputsParams(json_object=True) if kind == OF_OBJECT else _of_schema(name, found.get(OF_SCHEMA))

    def __str__(self) -> str:
        return f"an object like {A_FORMAT}"


def _of_schema(name: str, given: object) -> StructuredOutputsParams:
    if not isinstance(given, Mapping):
        raise ValueError(f"{name}.{OF_SCHEMA} is {shown(given)}; write {A_FORMAT}")
    found = {str(key): value for key, value in given.items() if value is not None}
    refuse_unknown(f"field of {name}.{OF_SCHEMA}", found, ("name", "description", "schema", "strict"), {})
    for text_name in ("name", "description"):
        if not isinstance(found.get(text_name, ""), str):
            raise ValueError(f"{name}.{OF_SCHEMA}.{text_name} is {shown(found[text_name])}; allowed is a text")
    TRUTH.value(f"{name}.{OF_SCHEMA}.strict", found.get("strict", False))
    if not isinstance(schema := found.get("schema"), Mapping):
        raise ValueError(f"{name}.{OF_SCHEMA}.schema is {shown(schema)}; allowed is a JSON schema, an object")
    return StructuredOutputsParams(json=_schema(f"{name}.{OF_SCHEMA}.schema", schema))


class Constraint(Protocol):
    """The state of one row. Threads may use it in turn, but not at once."""

    @property
    def is_whole(self) -> bool:
        """Whether the text so far is a whole answer, behind which it may end."""

    @property
    def is_over(self) -> bool:
        """Whether it is whole, and nothing but its end may follow."""

    @property
    def only_token(self) -> int | None:
        """The one token that may come next; None if there are several, none, or the text may end, or if a mask alone tells."""

    def allows(self, token: int) -> bool:
        """Whether a mask would have this token."""

    def take(self, token: int) -> None:
        """Takes the next token of the text. A ConstraintBroken refuses one that may not come."""

    def restart(self) -> None:
        """Forgets all tokens."""

    def write_mask(self, words: memoryview) -> None:
        """Writes a bit for each token of the vocabulary into words of 32 bits (format I): 1 for those that may come next. Those
        that end a text are among them where it is whole. A ConstraintBroken says why this cannot be known."""

    def holds(self, text: str) -> bool:
        """Whether a text would be a whole answer, whatever was taken."""


class ConstraintBroken(ValueError):
    """A row cannot go on as it is held."""
