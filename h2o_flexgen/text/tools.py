"""Tools of a chat in OpenAI's form: functions that the model may ask for, which of them it must or may ask for, and how many at
once. What is not known is refused by name."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from h2o_flexgen.core.allowed_values import TRUTH
from h2o_flexgen.core.hints import did_you_mean, refuse_unknown, shown

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
