"""Grammars of answers that call tools, in the form that the model was taught. An answer that must call is held from its
beginning, or behind its thoughts; one that may call is held from the mark of a call on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from h2o_flexgen.sampling.structured_outputs import StructuredOutputsParams
from h2o_flexgen.text.answer_forms import AFTER_NAMES, NAME_ENDS, AnswerForm, MarkedForm
from h2o_flexgen.text.grammar import JSON_OPTIONS, NotHeld, for_library, json_options
from h2o_flexgen.text.tokenizer import Tokenizer
from h2o_flexgen.text.tools import TOOLS, Tool, ToolUse

HEAD = "%llguidance {}"
ANY, NO_OBJECT, BLANKS = r"ANY: /(.|\n)*/", r"NO_OBJECT: /[^ \n{](.|\n)*/", r"BLANKS: /[ \n]{0,4}/"
# Some operators of grammars are slow to compile, so their signs are looked for; in schemas they are text.
SIGNS = {"&": "\\u0026", "~": "\\u007e"}


def held_to_calls(
    use: ToolUse,
    form: AnswerForm,
    begins_thinking: bool,
    tokenizer: Tokenizer,
    otherwise: StructuredOutputsParams | None = None,
) -> StructuredOutputsParams:
    """What an answer is held to that calls these tools. `otherwise`: the JSON that it is if it calls none."""
    assert form.calls is not None, "the form has calls"
    for tool in use.callable:
        _check(tool, tokenizer)
    if otherwise is not None:
        tokenizer.grammars.check(otherwise)
    rules = [*_Grammar(use, form.calls, form.thoughts, begins_thinking, tokenizer, otherwise).rules()]
    made = StructuredOutputsParams(grammar="\n".join([HEAD, *rules, ANY, NO_OBJECT, BLANKS]))
    try:
        tokenizer.grammars.check(made)
    except NotHeld as error:
        raise ValueError(f"{TOOLS} {error.why}") from error  # no client has given this grammar
    return made


def _check(tool: Tool, tokenizer: Tokenizer) -> None:
    """Refuses a schema to which no arguments can be held."""
    try:
        tokenizer.grammars.check_part(StructuredOutputsParams(json=tool.parameters))
    except NotHeld as error:
        raise ValueError(f"{tool.place} {error.why}") from error


@dataclass(frozen=True)
class _Grammar:
    use: ToolUse
    form: MarkedForm
    thoughts: MarkedForm | None
    begins_thinking: bool
    tokenizer: Tokenizer
    otherwise: StructuredOutputsParams | None

    def rules(self) -> Iterator[str]:
        """The rules of a grammar in Lark's form, the first one first."""
        before = "" if self.thoughts is None else "thought " if self.begins_thinking else "thoughts? "
        if self.use.must_call:
            yield f"start: {before}{self._all_calls}"
        elif self.otherwise is None:
            yield f"start: {before}{self._text_with_calls}"
        else:
            yield f"start: {before}({self._all_calls} | otherwise)"
            yield f"otherwise: %json {_written(self.otherwise.schema, json_options(self.otherwise))}"
        if self.thoughts is not None:
            yield f"thoughts: {self._mark(self.thoughts.opens)} thought"
            yield "thought: thought_text BLANKS"
            yield self._up_to("thought_text", self.thoughts.closes)
        yield self._up_to("text", self.form.opens)
        yield f"calls: {self._within_marks}"
        yield f"tool: {' | '.join(f'tool_{place}' for place in range(len(self.use.callable)))}"
        for place, tool in enumerate(self.use.callable):
            yield f"tool_{place}: {self._call_of(tool, place)}"
            yield f"arguments_{place}: %json {_written(tool.parameters, JSON_OPTIONS)}"

    @property
    def _all_calls(self) -> str:
        if self.form.may_begin_bare:
            return "calls"
        opens, blank = self._mark(self.form.opens), json.dumps(self.form.blank)
        first = f"{opens} calls"
        return first if self._calls_one or self.form.between else f"{first} ({blank} {first})*"

    @property
    def _text_with_calls(self) -> str:
        if self.form.may_begin_bare:
            return "BLANKS (calls | NO_OBJECT)?"
        return f"(text calls){'?' if self._calls_one else '*'} ANY"

    @property
    def _calls_one(self) -> bool:
        return self.use.calls_one or self.form.is_single

    @property
    def _within_marks(self) -> str:
        """What stands behind the mark that opens calls."""
        blank, between = json.dumps(self.form.blank), self.form.between
        calls = "tool" if self._calls_one or not between else f"tool ({json.dumps(f'{between} ')} tool)*"
        opens, closes = self.form.inner
        inner = f'" "? {json.dumps(opens)} {calls} {json.dumps(closes)}' if opens else calls
        return f"{blank} {inner} {blank} {self._mark(self.form.closes)}"

    def _call_of(self, tool: Tool, place: int) -> str:
        if self.form.encloses == AFTER_NAMES:
            return f"{json.dumps(tool.name)} {self._mark(NAME_ENDS)} arguments_{place}"
        begin = f'{{"name": {json.dumps(tool.name)}, "{self.form.arguments}": '
        return f'{json.dumps(begin)} arguments_{place} "}}"'

    def _up_to(self, rule: str, mark: str) -> str:
        """A rule for a text that ends with its first mark. A special token is in no text, so it needs no care."""
        is_special = self.tokenizer.special_id(mark) is not None
        return f"{rule}{'' if is_special else '[lazy]'}: ANY {self._mark(mark)}"

    def _mark(self, text: str) -> str:
        """A mark: a text, or the special token that is written so."""
        special = self.tokenizer.special_id(text)
        return json.dumps(text) if special is None else f"<[{special}]>"


def _written(schema: object, options: Mapping[str, object]) -> str:
    """A schema as it stands in a grammar."""
    text = json.dumps({**for_library(schema), "x-guidance": options})
    for sign, escaped in SIGNS.items():
        text = text.replace(sign, escaped)
    return text
