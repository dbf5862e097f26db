"""Tools of a chat in OpenAI's form: functions that the model may ask for, which of them it must or may ask for, and how many at
once. What is not known is refused by name. An answer that calls tools is held to a grammar, in the form that the model was
taught: from its beginning or behind its thoughts if it must call, or else from the mark of a call on."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from h2o_flexgen.core.allowed_values import TRUTH
from h2o_flexgen.core.hints import did_you_mean, refuse_unknown, shown
from h2o_flexgen.sampling.structured_outputs import StructuredOutputsParams
from h2o_flexgen.text.answer_forms import AFTER_NAMES, NAME_ENDS, AnswerForm, MarkedForm
from h2o_flexgen.text.grammar import JSON_OPTIONS, NotHeld, for_library, json_options
from h2o_flexgen.text.tokenizer import Tokenizer

TOOLS, CHOICE, PARALLEL = "tools", "tool_choice", "parallel_tool_calls"
AUTO, NONE, REQUIRED = "auto", "none", "required"
FUNCTION, ALLOWED = "function", "allowed_tools"
MOST_TOOLS = 128  # of a chat, as OpenAI has it
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
A_TOOL = '{"type": "function", "function": {"name": "...", "parameters": {...}}}'
A_CHOICE = f'"{AUTO}", "{NONE}", "{REQUIRED}" or {{"type": "function", "function": {{"name": "..."}}}}'
AN_ALLOWED = '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", ...}]}}'
NO_PARAMETERS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tool:
    """A function. Its arguments are an object of the schema `parameters`."""

    name: str
    description: str | None
    parameters: Mapping[str, object]
    is_strict: bool
    place: str  # of its schema in the request, for errors

    @property
    def written(self) -> Mapping[str, object]:
        """The tool as templates know it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": FUNCTION, FUNCTION: {"name": self.name, **described, "parameters": self.parameters}}


@dataclass(frozen=True)
class ToolUse:
    """The tools that a chat may call."""

    tools: tuple[Tool, ...]
    choice: str = AUTO  # or REQUIRED, or NONE
    named: Tool | None = None  # the one that must be called
    is_parallel: bool = True

    @property
    def shown(self) -> tuple[Mapping[str, object], ...]:
        """The tools that the model is told of."""
        return () if self.choice == NONE else tuple(tool.written for tool in self.tools)

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools of which a call may come."""
        if self.named is not None:
            return (self.named,)
        return () if self.choice == NONE else self.tools

    @property
    def must_call(self) -> bool:
        return self.choice == REQUIRED

    @property
    def calls_one(self) -> bool:
        """Whether one call is the most."""
        return self.named is not None or not self.is_parallel

    @property
    def has_strict(self) -> bool:
        """Whether arguments of some tool are promised to be of its schema."""
        return any(tool.is_strict for tool in self.callable)


def read_tool_use(tools: object, choice: object = None, parallel: object = None) -> ToolUse | None:
    """Reads the three fields of a chat; None where there are no tools."""
    return tool_use(read_tools(tools, A_TOOL, _tool), choice, parallel)


def read_tools(given: object, example: str, read: Callable[[str, object], Tool]) -> tuple[Tool, ...]:
    """Reads a list of tools, each with `read`; errors show the `example` of one."""
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ValueError(f"{TOOLS} is {shown(given)}; allowed is a list like [{example}]")
    if len(given) > MOST_TOOLS:
        raise ValueError(f"{TOOLS} has {len(given)} tools; allowed are {MOST_TOOLS} at most")
    return tuple(read(f"{TOOLS}[{place}]", one) for place, one in enumerate(given))


def tool_use(found: tuple[Tool, ...], choice: object, parallel: object) -> ToolUse | None:
    """How these tools are used."""
    is_parallel = parallel is None or bool(TRUTH.value(PARALLEL, parallel))
    _refuse_same_names(found)
    if not found:
        if choice not in (None, NONE):
            raise ValueError(f"{CHOICE} is {shown(choice)}, and there are no {TOOLS}; give {TOOLS}, or leave it out")
        return None
    if isinstance(choice, Mapping) and choice.get("type") == ALLOWED:
        found, choice = _allowed(found, choice)
    if choice is None or isinstance(choice, str):
        return ToolUse(found, _mode(choice), None, is_parallel)
    return ToolUse(found, REQUIRED, _named(found, choice), is_parallel)


def _mode(choice: str | None) -> str:
    if choice not in (None, AUTO, NONE, REQUIRED):
        raise ValueError(f"{CHOICE} is {shown(choice)}; allowed is {A_CHOICE}")
    return choice or AUTO


def _allowed(tools: tuple[Tool, ...], choice: Mapping[str, object]) -> tuple[tuple[Tool, ...], object]:
    """Some of the tools, which are as if they were all, and whether one must be called."""
    refuse_unknown(f"field of {CHOICE}", map(str, choice), ("type", ALLOWED), {})
    given = choice.get(ALLOWED)
    named = given.get(TOOLS) if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or given.get("mode") not in (AUTO, REQUIRED) or not isinstance(named, list) or not named:
        raise ValueError(f"{CHOICE} is {shown(choice)}; it is {AN_ALLOWED}")
    refuse_unknown(f"field of {CHOICE}.{ALLOWED}", map(str, given), ("mode", TOOLS), {})
    if len(named) > MOST_TOOLS:
        raise ValueError(f"{CHOICE} names {len(named)} tools; allowed are {MOST_TOOLS} at most")
    meant = {_named(tools, one).name for one in named}
    return tuple(tool for tool in tools if tool.name in meant), given["mode"]


def _named(tools: Iterable[Tool], choice: object) -> Tool:
    known = {tool.name: tool for tool in tools}
    if not isinstance(choice, Mapping) or choice.get("type") != FUNCTION:
        raise ValueError(f"{CHOICE} is {shown(choice)}; allowed is {A_CHOICE}")
    refuse_unknown(f"field of {CHOICE}", map(str, choice), ("type", FUNCTION), {"name": f"it belongs into {FUNCTION}"})
    function = choice.get(FUNCTION)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(f"{CHOICE} is {shown(choice)}, without the name of a tool; allowed is {A_CHOICE}")
    if name not in known:
        raise ValueError(f"{CHOICE} names {shown(name)}, and {TOOLS} are {', '.join(known)}{did_you_mean(name, known)}")
    return known[name]


def _refuse_same_names(tools: Iterable[Tool]) -> None:
    counts = Counter(tool.name for tool in tools)
    if twice := next((name for name, count in counts.items() if count > 1), None):
        raise ValueError(f"{TOOLS} has {shown(twice)} twice; give each tool a name of its own")


def _tool(what: str, given: object) -> Tool:
    if not isinstance(given, Mapping) or given.get("type") != FUNCTION:
        raise ValueError(f"{what} is {shown(given)}; only functions are known, as {A_TOOL}")
    refuse_unknown(f"field of {what}", map(str, given), ("type", FUNCTION), {})
    if not isinstance(function := given.get(FUNCTION), Mapping):
        raise ValueError(f"{what}.{FUNCTION} is {shown(function)}; a tool is {A_TOOL}")
    return read_function(f"{what}.{FUNCTION}", function)


def read_function(what: str, function: Mapping[str, object]) -> Tool:
    """Reads what is known of a function; `what` begins the error of one that cannot be read."""
    found = {str(name): value for name, value in function.items() if value is not None}
    refuse_unknown(f"field of {what}", found, ("name", "description", "parameters", "strict"), {})
    name, description = found.get("name"), found.get("description")
    if name is None:
        raise ValueError(f"{what}.name is missing; a tool is called by it")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{what}.name is {shown(name)}; allowed are 1 to 128 letters and digits of ASCII, and any of _ . -")
    if description is not None and not isinstance(description, str):
        raise ValueError(f"{what}.description is {shown(description)}; allowed is a text")
    parameters = _parameters(f"{what}.parameters", found.get("parameters", NO_PARAMETERS))
    is_strict = bool(TRUTH.value(f"{what}.strict", found.get("strict", False)))
    return Tool(name, description, parameters, is_strict, f"{what}.parameters")


def _parameters(what: str, given: object) -> Mapping[str, object]:
    if not isinstance(given, Mapping) or given.get("type", "object") != "object":
        raise ValueError(f"{what} is {shown(given)}; allowed is a JSON schema of an object")
    try:
        json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"{what} is {shown(given)}, which cannot be written as JSON; give a JSON schema") from None
    return {"type": "object", **{str(name): value for name, value in given.items()}}


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
