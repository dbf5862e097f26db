"""Forms of answers: how models write thoughts and calls of tools between their texts. A chat template shows which form its
model was taught, since it writes earlier calls in the same way."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

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
