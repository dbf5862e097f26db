"""Forms of answers: how models write thoughts and calls of tools between their texts. A chat template shows which form its
model was taught, since it writes earlier calls in the same way. Calls are read while they come: a name, and arguments that are
handed out piece by piece. What is no call is noticed as early as possible."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

KNOWN_TEMPLATES = 64  # of which the form stays known
THOUGHTS, OBJECTS, AFTER_NAMES = "thoughts", "calls as objects", "arguments after names"  # what a form encloses
ID_LENGTH = 24  # of what a call is known by


@dataclass(frozen=True)
class MarkedForm:
    """Something with marks around it. Between marks and what they enclose there may be blanks."""

    name: str
    encloses: str
    sign: str  # a regular expression for what only the chat templates of such models have
    opens: str
    closes: str = ""  # empty: it ends by itself
    arguments: str = "arguments"  # what a call's are called in its object
    inner: tuple[str, str] = ("", "")  # further marks around all calls
    between: str = ""  # two calls within the marks; empty: each has marks of its own
    may_begin_bare: bool = False  # an answer may begin with a call that has no mark
    is_single: bool = False  # an answer has one call at most
    id_length: int = ID_LENGTH
    blank: str = ""  # between a mark and a call, as models were taught


# A template's form of calls, and its form of thoughts, is the first row of which it has the sign.
FORMS = (
    MarkedForm("Mistral with names first", AFTER_NAMES, r"\[ARGS\]", "[TOOL_CALLS]", id_length=9),
    MarkedForm("Mistral", OBJECTS, r"\[TOOL_CALLS\]", "[TOOL_CALLS]", inner=("[", "]"), between=",", id_length=9),
    MarkedForm("Hermes or Qwen", OBJECTS, r'<tool_call>[^<]{0,40}\{"name"', "<tool_call>", "</tool_call>", blank="\n"),
    MarkedForm(
        "Llama 3.1",
        OBJECTS,
        r'\{"name": function name, "parameters":',
        "<|python_tag|>",
        arguments="parameters",
        between=";",
        may_begin_bare=True,
        is_single=True,
    ),
    MarkedForm("think", THOUGHTS, "</?think>", "<think>", "</think>"),
    MarkedForm("Magistral", THOUGHTS, r"\[THINK\]", "[THINK]", "[/THINK]"),
)


@dataclass(frozen=True)
class AnswerForm:
    """What may stand in the answers of a model beside its texts."""

    calls: MarkedForm | None = None
    thoughts: MarkedForm | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        marked = [form for form in (self.calls, self.thoughts) if form is not None]
        return tuple(mark for form in marked for mark in (form.opens, form.closes) if mark)


@lru_cache(maxsize=KNOWN_TEMPLATES)
def form_of(template: str) -> AnswerForm:
    """The form of answers to chats that this template writes down."""
    plain = template.replace("\\n", "\n").replace('\\"', '"')
    found = [form for form in FORMS if re.search(form.sign, plain)]
    calls = next((form for form in found if form.encloses != THOUGHTS), None)
    return AnswerForm(calls, next((form for form in found if form.encloses == THOUGHTS), None))


BLANKS = " \t\r\n"
ENDS_NUMBERS = ",}]"
ARGUMENTS = ("arguments", "parameters")
BESIDE = ("name", "id", "type")  # other names that the object of a call may have
NAME_ENDS, ID_BEGINS = "[ARGS]", "[CALL_ID]"
LONGEST_NAME = 256  # characters before the arguments, with all that stands beside a name


class WrittenCall(Protocol):
    """A call of which the beginning was read."""

    name: str | None
    has_begun: bool  # its name is known, and it surely is a call
    is_over: bool
    is_broken: bool  # what came last belongs to no call

    def take(self, text: str) -> int:
        """Takes the next text, and returns how many characters of it belong to the call."""

    def new_arguments(self) -> str:
        """The text of the arguments that has come since the last time."""


class JsonValue:
    """A JSON value that comes in pieces. Where it ends is known by its brackets and quotes alone."""

    def __init__(self) -> None:
        self.characters = list[str]()
        self.is_over = False
        self._open = 0  # brackets
        self._in_string = self._is_escaped = False

    def take(self, character: str) -> bool:
        """Takes a character that belongs to the value; False if it stands behind the value."""
        if self.characters and not self._open and not self._in_string and character in ENDS_NUMBERS + BLANKS:
            self.is_over = True  # a number, or a word
            return False
        self.characters.append(character)
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string:
            self._is_escaped = character == "\\"
            self._in_string = character != '"'
        else:
            self._in_string = character == '"'
            self._open += (character in "{[") - (character in "}]")
        self.is_over = not self._open and not self._in_string and self.first in '{["'
        return True

    @property
    def first(self) -> str:
        return self.characters[0] if self.characters else ""

    @property
    def value(self) -> object:
        """A ValueError says that it is not JSON."""
        return json.loads("".join(self.characters), strict=False)


class CallObject:
    """A call written as an object with the name and the arguments, in any order."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.has_begun = self.is_over = self.is_broken = False
        self._arguments: Sequence[str] | None = None
        self._handed_out = 0
        self._key = ""
        self._value = JsonValue()
        self._next: Callable[[str], bool] = self._before_object

    def take(self, text: str) -> int:
        for place, character in enumerate(text):
            if self.is_over or self.is_broken:
                return place
            try:
                while not self._next(character):  # it is left to what comes next
                    pass
            except ValueError:
                self.is_broken = True
                return place
        return len(text)

    def new_arguments(self) -> str:
        if not self.has_begun or self._arguments is None:
            return ""
        new, self._handed_out = self._arguments[self._handed_out :], len(self._arguments)
        return "".join(new)

    # -- what takes the next character ----------------------------------------------------------------------------------

    def _before_object(self, character: str) -> bool:
        return self._expect(character, {"{": self._before_key})

    def _before_key(self, character: str) -> bool:
        self._value = JsonValue()
        return self._expect(character, {"}": self._behind, '"': self._in_key}, left='"')

    def _in_key(self, character: str) -> bool:
        self._value.take(character)
        if self._value.is_over:
            self._key = str(self._value.value)
            if self._key not in (*ARGUMENTS, *BESIDE) or (self._key in ARGUMENTS and self._arguments is not None):
                raise ValueError(self._key)
            self._next = self._before_colon
        return True

    def _before_colon(self, character: str) -> bool:
        self._value = JsonValue()
        return self._expect(character, {":": self._before_value})

    def _before_value(self, character: str) -> bool:
        if character not in BLANKS:
            self._next = self._in_value
            self._refuse_other_kinds(character)
            return False
        return True

    def _in_value(self, character: str) -> bool:
        is_taken = self._value.take(character)
        if self._key in ARGUMENTS and self._value.first == "{":
            self._arguments = self._value.characters
            self.has_begun = self.name is not None
        if self._value.is_over:
            self._keep()
            self._next = self._behind_value
        return is_taken

    def _behind_value(self, character: str) -> bool:
        return self._expect(character, {",": self._before_key, "}": self._behind})

    def _behind(self, character: str) -> bool:
        raise AssertionError("nothing is taken behind the object")

    def _expect(self, character: str, known: dict[str, Callable[[str], bool]], left: str = "") -> bool:
        """Goes on as the character says; `left`: one that what comes next has to take."""
        if character in BLANKS:
            return True
        if character not in known:
            raise ValueError(character)
        self._next = known[character]
        if self._next == self._behind:
            self._end()
        return character != left

    # -- what was read --------------------------------------------------------------------------------------------------

    def _refuse_other_kinds(self, first: str) -> None:
        """Refuses names that are no texts, and arguments that are neither an object nor a text that has one."""
        if (self._key == "name" and first != '"') or (self._key in ARGUMENTS and first not in '{"'):
            raise ValueError(first)

    def _keep(self) -> None:
        if self._key == "name":
            if self.name is not None or not (name := str(self._value.value)):
                raise ValueError(self._key)
            self.name = name
            self.has_begun = self._arguments is not None
        elif self._key in ARGUMENTS and self._value.first == '"':
            self._arguments = _object_in(str(self._value.value))
            self.has_begun = self.name is not None

    def _end(self) -> None:
        if self.name is None:
            raise ValueError("a call without a name")
        self.is_over = self.has_begun = True
        self._arguments = "{}" if self._arguments is None else self._arguments


def _object_in(text: str) -> str:
    """A text that has an object, as a client will parse it; a ValueError says that it has none."""
    try:
        found = json.loads(text or "{}")
    except RecursionError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(text)
    return text or "{}"


class NamedArguments:
    """A call written as the name, a mark, and the arguments."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.has_begun = self.is_over = self.is_broken = False
        self._before = ""
        self._arguments = JsonValue()
        self._handed_out = 0

    def take(self, text: str) -> int:
        for place, character in enumerate(text):
            if self.is_over or self.is_broken:
                return place
            if not self.has_begun:
                self._take_name(character)
            elif self._arguments.characters or character not in BLANKS:
                self._take_argument(character)
            if self.is_broken:
                return place
        return len(text)

    def new_arguments(self) -> str:
        new, self._handed_out = self._arguments.characters[self._handed_out :], len(self._arguments.characters)
        return "".join(new)

    def _take_name(self, character: str) -> None:
        self._before += character
        if self._before.endswith(NAME_ENDS):
            self.name = self._before.removesuffix(NAME_ENDS).partition(ID_BEGINS)[0].strip()
            self.has_begun, self.is_broken = bool(self.name), not self.name
        elif len(self._before) > LONGEST_NAME or "{" in self._before or "\n" in self._before.strip():
            self.is_broken = True

    def _take_argument(self, character: str) -> None:
        if not self._arguments.characters and character != "{":
            self.is_broken = True
            return
        self._arguments.take(character)
        self.is_over = self._arguments.is_over
