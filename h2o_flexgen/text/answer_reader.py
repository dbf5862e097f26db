"""Answers read while they come: which of the text is said, which is thought, and which tools are called. However a text is cut
into pieces, the parts joined are the same. A mark is never handed out, nor is half of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TypeAlias

from h2o_flexgen.sampling.completion import AnswerMessage, Completion, Output, ToolCall
from h2o_flexgen.text.answer_forms import AFTER_NAMES, BLANKS, ID_LENGTH, AnswerForm, CallObject, NamedArguments, WrittenCall


@dataclass(frozen=True)
class SaidPart:
    text: str


@dataclass(frozen=True)
class ThoughtPart:
    text: str


@dataclass(frozen=True)
class CallPart:
    """A call begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsPart:
    """More of a call's arguments."""

    index: int
    text: str


AnswerPart: TypeAlias = "SaidPart | ThoughtPart | CallPart | ArgumentsPart"


@dataclass(frozen=True)
class AnswerReading:
    """How the answers to one request are read."""

    form: AnswerForm = field(default_factory=AnswerForm)
    names: Collection[str] = ()  # of tools that may be called
    most_calls: int | None = None
    begins_thinking: bool = False  # the prompt ends within thoughts

    def reader(self, identity: str) -> AnswerReader:
        """A reader of one answer. The ids of calls are made of `identity`, which is another one for each answer."""
        return AnswerReader(self, identity)

    def message(self, text: str, is_cut: bool, identity: str) -> AnswerMessage:
        """The message in a whole text; `is_cut`: the model would have gone on."""
        reader = self.reader(identity)
        return message_of([*reader.add(text), *reader.end(is_cut)])


def message_of(parts: Iterable[AnswerPart]) -> AnswerMessage:
    """The message that parts make together."""
    said, thought, calls, written = "", "", list[CallPart](), list[str]()
    for part in parts:
        if isinstance(part, SaidPart):
            said += part.text
        elif isinstance(part, ThoughtPart):
            thought += part.text
        elif isinstance(part, CallPart):
            calls.append(part)
            written.append("")
        else:
            written[part.index] += part.text
    found = tuple(ToolCall(call.id, call.name, arguments) for call, arguments in zip(calls, written))
    return AnswerMessage(None if not said and (thought or found) else said, thought or None, found)


def identity_of(request: int | str, prompt: Sequence[int], number: int) -> str:
    """What the ids of an answer's calls are made of: its request, the tokens of its prompt, and its number among the answers to
    it. A conversation never has a prompt twice, so the ids of a turn are not those of earlier ones."""
    return _digest(f"{request} {tuple(prompt)!r} {number}")


def with_message(completion: Completion, reading: AnswerReading) -> Completion:
    """The completion with the messages that are in its texts."""

    def read(output: Output) -> Output:
        identity = identity_of(completion.index, completion.prompt_token_ids, output.index)
        return replace(output, message=reading.message(output.text, output.finish_reason != "stop", identity))

    first, *others = map(read, completion.outputs)
    return replace(completion, message=first.message, others=tuple(others))


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=ID_LENGTH // 2).hexdigest()


class AnswerReader:
    def __init__(self, reading: AnswerReading, identity: str) -> None:
        self.calls = 0  # that were told
        self._reading, self._identity = reading, identity
        self._form, self._thoughts = reading.form.calls, reading.form.thoughts
        self._held = ""  # text of which is not known yet what it is
        self._parts: list[AnswerPart] = []
        self._call: WrittenCall = CallObject()
        self._call_text = ""  # the mark and the beginning of the call, which are text if it turns out to be none
        self._is_told = False  # of the call, that it has begun
        self._has_arguments = False  # some of the call's were told
        self._drops_blanks = False  # behind the marks of thoughts
        self._step: Callable[[], bool] = self._at_beginning
        if reading.begins_thinking and self._thoughts is not None:
            self._begin_thoughts()

    def add(self, text: str) -> list[AnswerPart]:
        """Adds a piece of the text; returns what has become certain with it."""
        self._held += text
        while self._step():
            pass
        return self._handed_out()

    def end(self, is_cut: bool) -> list[AnswerPart]:
        """The last parts. `is_cut`: the model would have gone on, so the beginning of a mark or a call is left out."""
        if self._step == self._at_beginning:
            self._held = "" if is_cut and self._held.strip(BLANKS) else self._held
            self._step = self._in_text
            self._in_text()
        if self._is_told and not self._has_arguments and not is_cut:
            self._tell_arguments("{}")
        rest = self._held
        if self._step in (self._in_thoughts, self._in_text) and is_cut:
            rest = rest[: len(rest) - _begun(rest, self._mark)]
        if self._step == self._in_thoughts:
            self._think(rest.rstrip(BLANKS))
        elif self._step == self._in_text and (rest.strip(BLANKS) or not self.calls):
            self._say(rest)
        elif self._step in (self._before_calls, self._in_call) and not (is_cut or self._is_told):
            self._say(self._call_text + rest)
        self._held = ""
        return self._handed_out()

    def _handed_out(self) -> list[AnswerPart]:
        parts, self._parts = self._parts, []
        return parts

    # -- steps: each looks at what is held, and returns whether there is more to be done ------------------------------------

    def _at_beginning(self) -> bool:
        """Nothing but blanks was read: here thoughts may begin, and calls without a mark."""
        text = self._held.lstrip(BLANKS)
        if self._thoughts is not None and text.startswith(self._thoughts.opens):
            self._held = text[len(self._thoughts.opens) :]
            return self._begin_thoughts()
        if not text or (self._thoughts is not None and self._thoughts.opens.startswith(text)):
            return False
        if self._form is not None and self._form.may_begin_bare and text[0] == "{":
            if self._drops_blanks:
                self._held, self._drops_blanks = text, False
            self._begin_call("")
        else:
            self._step = self._in_text
        return True

    def _in_thoughts(self) -> bool:
        self._drop_blanks()
        before, found, behind = self._held.partition(self._mark)
        certain = before[: len(before) - (0 if found else _begun(before, self._mark))].rstrip(BLANKS)
        self._think(certain)
        if not found:
            self._held = before[len(certain) :]
            return False
        self._held, self._thoughts, self._drops_blanks = behind, None, True
        self._step = self._at_beginning
        return True

    def _in_text(self) -> bool:
        self._drop_blanks()
        before, found, behind = self._held.partition(self._mark) if self._mark else (self._held, "", "")
        certain = before if found else before[: len(before) - _begun(before, self._mark)]
        if self._form is not None:
            certain = certain.rstrip(BLANKS)  # before a call they are no text
        self._say(certain)
        self._held = behind if found else before[len(certain) :]
        if found:
            self._begin_call(self._mark)
        return bool(found)

    def _before_calls(self) -> bool:
        """The mark was read, and the further one was not."""
        assert self._form is not None, "a call has a form"
        text, mark = self._held.lstrip(BLANKS), self._form.inner[0]
        if not text:
            return False
        if not text.startswith(mark):
            return self._no_call()
        size = len(self._held) - len(text) + len(mark)
        self._call_text, self._held = self._call_text + self._held[:size], self._held[size:]
        self._step = self._in_call
        return True

    def _in_call(self) -> bool:
        size = self._call.take(self._held)
        self._call_text, self._held = self._call_text + self._held[:size], self._held[size:]
        if self._call.has_begun:
            if self._is_other_object():
                return self._no_call()
            self._tell()
        if self._call.is_broken:
            self._step = self._behind_broken
            return True if self._is_told else self._no_call()
        if self._call.is_over:
            self._step = self._behind_call
        return self._call.is_over

    def _behind_call(self) -> bool:
        assert self._form is not None, "a call has a form"
        text, marks = self._held.lstrip(BLANKS), (self._form.between, self._form.inner[1], self._form.closes)
        found = next((mark for mark in marks if mark and text.startswith(mark)), None)
        if found is None:
            if any(mark and mark.startswith(text) for mark in marks):
                return False
            self._step = self._in_text  # the model has left out the mark
        elif found == self._form.between:
            self._held = text[len(found) :]
            self._new_call(found)
            self._step = self._in_call
        else:
            self._held = text[len(found) :]
            self._step = self._behind_call if found == self._form.inner[1] and self._form.closes else self._in_text
        return True

    def _behind_broken(self) -> bool:
        """A call was told and is broken: all is left out up to the mark that closes it."""
        assert self._form is not None, "a call has a form"
        _, found, behind = self._held.partition(self._form.closes) if self._form.closes else ("", "", "")
        if found:
            self._held, self._step = behind, self._in_text
        return bool(found)

    # -- helpers -----------------------------------------------------------------------------------------------------------

    @property
    def _mark(self) -> str:
        """The mark that ends what is read: thoughts, or a text."""
        if self._step == self._in_thoughts:
            assert self._thoughts is not None, "thoughts have a form"
            return self._thoughts.closes
        return "" if self._form is None else self._form.opens

    def _begin_thoughts(self) -> bool:
        self._step, self._drops_blanks = self._in_thoughts, True
        return True

    def _begin_call(self, mark: str) -> None:
        assert self._form is not None, "a call has a form"
        self._new_call(mark)
        self._step = self._before_calls if self._form.inner[0] else self._in_call

    def _new_call(self, mark: str) -> None:
        assert self._form is not None, "a call has a form"
        self._call = NamedArguments() if self._form.encloses == AFTER_NAMES else CallObject()
        self._call_text, self._is_told, self._has_arguments = mark, False, False

    def _is_other_object(self) -> bool:
        """Whether what is read has no mark, and names no tool: any object may have such names."""
        assert self._form is not None, "a call has a form"
        is_bare = self._form.may_begin_bare and not self._call_text.startswith(self._form.opens)
        return is_bare and self._call.name not in self._reading.names

    def _no_call(self) -> bool:
        self._say(self._call_text)
        self._step = self._in_text
        return True

    def _tell(self) -> None:
        """Hands out what is new of the call, if it is not one too many."""
        if not self._is_told:
            self._is_told = True
            self.calls += 1
            if self._is_wanted:
                self._parts.append(CallPart(self.calls - 1, self._id(self.calls - 1), self._call.name or ""))
        self._tell_arguments(self._call.new_arguments())

    def _tell_arguments(self, new: str) -> None:
        self._has_arguments |= bool(new)
        if new and self._is_wanted:
            self._parts.append(ArgumentsPart(self.calls - 1, new))

    @property
    def _is_wanted(self) -> bool:
        """Whether the call that was told last is not one too many."""
        most = self._reading.most_calls
        return most is None or self.calls <= most

    def _id(self, index: int) -> str:
        assert self._form is not None, "a call has a form"
        made = _digest(f"{self._identity} {index}")
        return f"call_{made}" if self._form.id_length == ID_LENGTH else made[: self._form.id_length]

    def _drop_blanks(self) -> None:
        if self._drops_blanks:
            self._held = self._held.lstrip(BLANKS)
            self._drops_blanks = not self._held

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(SaidPart(text))

    def _think(self, text: str) -> None:
        if text:
            self._parts.append(ThoughtPart(text))


def _begun(text: str, mark: str) -> int:
    """The length of the longest end of the text with which the mark begins."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)
