"""Tools of chats: what a request may say of them, and one line that says what is wrong with another."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_flexgen.text.tools import ToolUse, read_tool_use
from tests.helpers.refusals import one_line
from tests.helpers.tool_templates import CLOSED, named, tool

TWO = [tool("go"), tool("stay", strict=True)]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*map(named, names)]}}


def read(tools: object, choice: object = None, parallel: object = None) -> ToolUse:
    found = read_tool_use(tools, choice, parallel)
    assert found is not None
    return found


def test_what_may_be_called_and_what_the_model_is_told_of() -> None:
    use = read(TWO)
    assert [one.name for one in use.callable] == ["go", "stay"] and use.shown == tuple(
        {"type": "function", "function": {"name": name, "description": "a & b", "parameters": CLOSED}}
        for name in ("go", "stay")
    )
    assert (use.must_call, use.calls_one, use.has_strict) == (False, False, True)
    assert read(TWO[:1]).has_strict is False and read(TWO, "required").must_call
    assert read(TWO, None, False).calls_one
    only = read(TWO, named("go"))
    assert [one.name for one in only.callable] == ["go"] and only.must_call and only.calls_one and len(only.shown) == 2
    some = read(TWO, allowed("required", "stay"), False)
    assert [one.name for one in some.callable] == ["stay"] and some.must_call and some.calls_one and len(some.shown) == 1
    assert not read(TWO, allowed("auto", "stay", "go")).must_call
    none = read(TWO, "none")
    assert none.shown == none.callable == () and not none.must_call
    assert read_tool_use([], "none") is read_tool_use(None) is None


def test_a_tool_without_parameters_takes_none() -> None:
    (one,) = read([{"type": "function", "function": {"name": "now", "parameters": None}}]).tools
    assert one.parameters == {"type": "object", "properties": {}, "additionalProperties": False} and one.description is None
    assert "description" not in one.written["function"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("tools", "choice", "begin"),
    [
        ([{"type": "function", "function": {"parameters": {}}}], None, "tools[0].function.name is missing"),
        ([*TWO, tool("")], None, "tools[2].function.name is ''; allowed are 1 to 128 letters"),
        ([tool("two words")], None, "tools[0].function.name is 'two words'; allowed"),
        ([tool("go"), tool("go")], None, "tools has 'go' twice"),
        ([{"type": "web_search"}], None, "tools[0] is {'type': 'web_search'}; only functions are known"),
        ([{"type": "function", "name": "go"}], None, "unknown field of tools[0] 'name'"),
        ([{"type": "function", "function": 5}], None, "tools[0].function is 5; a tool is"),
        ([tool("go", {"type": "array"})], None, "tools[0].function.parameters is {'type': 'array'}; allowed is a JSON schema"),
        (
            [tool("go", {"const": float("nan")})],
            None,
            "tools[0].function.parameters is {'const': nan}, which cannot be written",
        ),
        ([tool("go", strict="yes")], None, "tools[0].function.strict is 'yes'; allowed is true or false"),
        ([tool("go", examples=[])], None, "unknown field of tools[0].function 'examples'"),
        ([{"type": "function", "function": {"name": "go", "description": 1}}], None, "tools[0].function.description is 1"),
        ("go", None, "tools is 'go'; allowed is a list"),
        ([*map(tool, map(str, range(129)))], None, "tools has 129 tools; allowed are 128 at most"),
        (TWO, allowed("auto", *["go"] * 129), "tool_choice names 129 tools; allowed are 128 at most"),
        (TWO, "sometimes", "tool_choice is 'sometimes'; allowed is \"auto\""),
        (TWO, named("run"), "tool_choice names 'run', and tools are go, stay"),
        (TWO, named("sta"), "tool_choice names 'sta', and tools are go, stay; did you mean stay?"),
        (TWO, {"type": "function"}, "tool_choice is {'type': 'function'}, without the name of a tool"),
        (TWO, {"type": "function", "name": "go"}, "unknown field of tool_choice 'name': it belongs into function"),
        (TWO, {"type": "allowed_tools"}, "tool_choice is {'type': 'allowed_tools'}; it is {\"type\": \"allowed_tools\", "),
        (TWO, allowed("never", "go"), "tool_choice is {'allowed_tools': {'mode': 'never', "),
        (TWO, allowed("auto"), "tool_choice is {'allowed_tools': {'mode': 'auto', 'tools': []}"),
        (TWO, allowed("auto", "run"), "tool_choice names 'run', and tools are go, stay"),
        (TWO, {"type": "custom", "custom": {}}, "tool_choice is {'custom': {}, 'type': 'custom'}; allowed is"),
        (None, "auto", "tool_choice is 'auto', and there are no tools"),
        ([], named("go"), "tool_choice is {'function': {'name': 'go'}, 'type': 'function'}, and there are no tools"),
    ],
)
def test_what_is_wrong_is_one_line(tools: Any, choice: Any, begin: str) -> None:
    assert one_line(lambda: read_tool_use(tools, choice)).startswith(begin)


def test_how_many_at_once_is_true_or_false() -> None:
    assert one_line(lambda: read_tool_use(TWO, None, "no")) == "parallel_tool_calls is 'no'; allowed is true or false"
