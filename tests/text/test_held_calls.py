"""Answers that are held to calls of tools: what may come in each form, and what may not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.sampling.structured_outputs import StructuredOutputsParams
from h2o_flexgen.text.answer_reader import AnswerReading
from h2o_flexgen.text.dialogue import Script, Template
from h2o_flexgen.text.grammar import KNOWN_GRAMMARS, MOST_CHARACTERS, _matcher
from h2o_flexgen.text.load_tokenizer import FolderTokenizer
from h2o_flexgen.text.tokenizer import ByteTokenizer
from h2o_flexgen.text.tools import read_tool_use
from tests.helpers.held_texts import random_text
from tests.helpers.real_tokenizers import VOCABS, save_byte_level
from tests.helpers.refusals import one_line
from tests.helpers.tool_templates import (
    CLOSED,
    FORECAST,
    HERMES,
    LLAMA,
    MAGISTRAL,
    MISTRAL,
    NAMES_FIRST,
    QWEN_THINKS,
    TEXT_ARGUMENTS,
    THINKS,
    named,
    tool,
)

pytest.importorskip("llguidance", reason="needs the extra [grammar]")
ASK = [{"role": "user", "content": "Where to?"}]
TOOLS = [tool("go", strict=True), tool("stay")]
HALF_THOUGHT = QWEN_THINKS + "<think>\n"
UNSUPPORTED = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}
CITY = '{"city": "x"}'


def in_object(name: str, arguments: str = "arguments") -> str:
    return f'{{"name": "{name}", "{arguments}": {CITY}}}'


CALLS: dict[str, Callable[..., str]] = {  # how each form writes calls of these tools
    HERMES: lambda *names: "\n".join(f"<tool_call>\n{in_object(name)}\n</tool_call>" for name in names),
    LLAMA: lambda *names: "; ".join(in_object(name, "parameters") for name in names),
    MISTRAL: lambda *names: f"[TOOL_CALLS][{', '.join(map(in_object, names))}]",
    NAMES_FIRST: lambda *names: "".join(f"[TOOL_CALLS]{name}[ARGS]{CITY}" for name in names),
}
SINGLE = (LLAMA,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save_byte_level(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> FolderTokenizer:
    return FolderTokenizer(folder)


@pytest.fixture(scope="module")
def special(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> FolderTokenizer:
    """A tokenizer in which marks of Mistral are special tokens, which texts do not show."""
    made = AutoTokenizer.from_pretrained(str(folder))
    names = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
    made.add_special_tokens({"additional_special_tokens": [AddedToken(name, special=True) for name in names]})
    made.save_pretrained(there := tmp_path_factory.mktemp("special"))
    return FolderTokenizer(there)


def asked(
    tokenizer: FolderTokenizer, template: str, *fields: Any, given: SamplingParams | None = None
) -> tuple[SamplingParams, AnswerReading]:
    style, use, own = Template(tokenizer, template=template), read_tool_use(*fields), given or SamplingParams()
    prompt, params = style.asked(ASK, own, use)
    return params, style.reading(prompt.text, own, use)


def holds(
    tokenizer: FolderTokenizer, template: str, *fields: Any, given: SamplingParams | None = None
) -> Callable[[str], bool]:
    held_to = asked(tokenizer, template, *fields, given=given)[0].held_to
    assert held_to is not None
    return tokenizer.grammars.constraint(held_to, tokenizer.eos_ids).holds


@pytest.mark.parametrize("template", CALLS)
def test_a_call_that_must_come_comes_in_the_form_of_the_template(template: str, tokenizer: FolderTokenizer) -> None:
    write = CALLS[template]
    required = holds(tokenizer, template, TOOLS, "required")
    assert required(write("go")) and required(write("stay"))
    assert required(write("go", "stay", "go")) == (template not in SINGLE)
    wrong = (write("run"), write("go").replace('"x"', "1"), write("go").replace("city", "town"), write("go")[:-1])
    assert required(write("go").replace(': "x', ':"x')) and not required(write("go").replace(': "x', f':{" " * 60}"x'))
    assert not any(map(required, (*wrong, "", "No.", f"Well. {write('go')}")))
    only = holds(tokenizer, template, TOOLS, named("stay"))
    assert only(write("stay")) and not only(write("go")) and not only(write("stay", "stay"))
    one = holds(tokenizer, template, TOOLS, "required", False)
    assert one(write("go")) and not one(write("go", "go"))


@pytest.mark.parametrize("template", CALLS)
def test_a_call_that_may_come_is_held_where_a_tool_is_strict(template: str, tokenizer: FolderTokenizer) -> None:
    write, wrong = CALLS[template], CALLS[template]("go").replace('"x"', "1")
    may = holds(tokenizer, template, TOOLS)
    assert may("") and may("No. [1] {2} <3>") and may(write("go")) and not may(wrong) and not may(write("run"))
    assert template in SINGLE or (may(f"Well. {write('go')}") and not may(f"Well. {wrong}"))
    assert asked(tokenizer, template, TOOLS[1:])[0].held_to is None, "nothing is promised of it"


@pytest.mark.parametrize("template", [template for template in CALLS if template not in SINGLE])
def test_an_answer_of_a_schema_may_call_instead(template: str, tokenizer: FolderTokenizer) -> None:
    schema = SamplingParams(structured_outputs={"json": {"enum": [{"name": "go"}, 5]}})
    write, may = CALLS[template], holds(tokenizer, template, TOOLS[1:], given=schema)
    assert may("5") and may('{"name": "go"}') and may(write("stay"))
    assert not any(map(may, ("6", "", "Well.", write("go"), f"Well. {write('stay')}", f"5{write('stay')}")))
    reading = asked(tokenizer, template, TOOLS[1:], given=schema)[1]
    assert reading.message("5", False, "x").content == "5" and reading.message('{"name": "go"}', False, "x").content
    assert len(reading.message(write("stay"), False, "x").tool_calls) == 1
    must = holds(tokenizer, template, TOOLS, "required", given=schema)
    assert must(write("go")) and not must("5")
    object_of_any_kind = holds(tokenizer, template, TOOLS, given=SamplingParams(structured_outputs={"json_object": True}))
    assert object_of_any_kind('{"a": [1]}') and not object_of_any_kind("[1]")
    odd = one_line(lambda: asked(tokenizer, template, TOOLS, given=SamplingParams(response_format=UNSUPPORTED)))
    assert odd.startswith("structured_outputs cannot be held to: the JSON schema")


def test_signs_in_a_schema_are_no_operators_of_the_grammar(tokenizer: FolderTokenizer) -> None:
    odd = tool("odd", {**FORECAST, "properties": {"a~": {"const": "b&c"}}, "required": ["a~"], "additionalProperties": False})
    held_to = asked(tokenizer, HERMES, [odd], "required")[0].held_to
    assert held_to is not None and not {"&", "~"} & {*str(held_to.grammar)}, "which would be tried in a process of its own"
    call = '<tool_call>\n{"name": "odd", "arguments": {"a~": "b&c"}}\n</tool_call>'
    assert holds(tokenizer, HERMES, [odd], "required")(call)


def test_thoughts_may_come_before_what_is_held(tokenizer: FolderTokenizer) -> None:
    call = CALLS[HERMES]("go")
    required = holds(tokenizer, QWEN_THINKS, TOOLS, "required")
    assert required(call) and required(f"<think>\nHm <tool_call>, a & b.\n</think>\n\n{call}")
    assert not required(f"<think>{call}") and not required(f"Hm.</think>{call}")
    begun = holds(tokenizer, HALF_THOUGHT, TOOLS, "required")
    assert begun(f"Hm.</think>\n\n{call}") and not begun(call)


@pytest.mark.parametrize("template", [*CALLS, QWEN_THINKS, HALF_THOUGHT, MAGISTRAL])
def test_what_comes_at_random_is_read_as_calls(template: str, tokenizer: FolderTokenizer) -> None:
    params, reading = asked(tokenizer, template, TOOLS, "required")
    ended = 0
    for seed in range(4):
        assert params.held_to is not None
        text, is_over = random_text(tokenizer, VOCABS["byte_level"], params.held_to, Random(seed), 300)
        message = reading.message(text, not is_over, "x")
        assert message.content is None or (not is_over and message.content == "")
        assert not is_over or (message.tool_calls and {call.name for call in message.tool_calls} <= {"go", "stay"})
        ended += is_over
    assert ended or "THINK" in template.upper(), "a thought made at random goes on and on"


@pytest.mark.parametrize("template", [MISTRAL, NAMES_FIRST, MAGISTRAL])
def test_marks_that_are_special_tokens_are_held_and_shown(template: str, special: FolderTokenizer) -> None:
    write = CALLS[NAMES_FIRST if template == NAMES_FIRST else MISTRAL]
    params, reading = asked(special, template, TOOLS, "required")
    assert params.held_to is not None and not params.skip_special_tokens
    constraint = special.grammars.constraint(params.held_to, special.eos_ids)
    thought = "[THINK]Hm.[/THINK]" if template == MAGISTRAL else ""
    ids = special.encode_more(f"{thought}{write('go', 'stay')}")
    assert special.special_id("[TOOL_CALLS]") in ids
    for token in ids:
        constraint.take(token)
    assert constraint.is_whole and not constraint.holds("[TOOL_CALLS]"), "it is no text"
    message = reading.message(special.decode(ids, with_special=True), False, "x")
    assert [call.name for call in message.tool_calls] == ["go", "stay"]
    assert message.reasoning_content == ("Hm." if thought else None) and "[TOOL_CALLS]" not in special.decode(ids)


def test_where_no_mark_is_special_texts_are_as_ever(tokenizer: FolderTokenizer) -> None:
    assert asked(tokenizer, HERMES, TOOLS[1:])[0] == SamplingParams()
    assert tokenizer.special_id("</s>") is not None is tokenizer.special_id("hello")


def test_what_no_call_can_be_held_to_is_refused(tokenizer: FolderTokenizer) -> None:
    def refused(*fields: Any, template: str = HERMES) -> str:
        return one_line(lambda: asked(tokenizer, template, *fields))

    odd = [tool("go"), tool("odd", {**FORECAST, "uniqueItems": True})]
    assert refused(odd, "required") == (
        'tools[1].function.parameters has keywords that are not supported: "uniqueItems"; leave them out'
    )
    assert asked(tokenizer, HERMES, odd)[0].held_to is None, "nothing holds a call that may come"
    assert asked(tokenizer, HERMES, odd, named("go"))[0].held_to is not None
    long = tool("go", {**FORECAST, "description": "a" * (MOST_CHARACTERS // 2)})
    assert asked(tokenizer, HERMES, [long], "required")[0].held_to is not None
    two = [long, {**long, "function": {**long["function"], "name": "stay"}}]
    assert refused(two, "required") == f"tools has more than {MOST_CHARACTERS} characters; give a shorter one"
    for template in (TEXT_ARGUMENTS, THINKS):
        assert refused(TOOLS, template=template).startswith("tools need a chat template that writes calls as Mistral")
        assert asked(tokenizer, template, TOOLS, "none")[0] == SamplingParams()
    held = SamplingParams(structured_outputs={"choice": ["a"]})
    said = one_line(lambda: Template(tokenizer, template=HERMES).asked(ASK, held, read_tool_use(TOOLS)))
    assert said.startswith("structured_outputs has a choice, and tools stand beside JSON alone")
    said = one_line(lambda: asked(tokenizer, LLAMA, TOOLS, given=SamplingParams(structured_outputs={"json_object": True})))
    assert said.startswith("structured_outputs stands beside tools, and this model's calls look like other JSON")
    script = one_line(lambda: Script(ByteTokenizer(300)).asked(ASK, SamplingParams(), read_tool_use(TOOLS)))
    assert "this style has none" in script


def test_many_tools_leave_other_grammars_compiled(tokenizer: FolderTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = list[str]()

    def counted(asked: StructuredOutputsParams, tokens: Any) -> Any:
        compiled.append(asked.kind)
        return _matcher(asked, tokens)

    monkeypatch.setattr("h2o_flexgen.text.grammar._matcher", counted)
    other = StructuredOutputsParams(regex="some other text")
    tokenizer.grammars.check(other)
    titled = [{**CLOSED, "title": f"schema {number}"} for number in range(KNOWN_GRAMMARS + 1)]
    many = [tool(f"go_{number}", schema, strict=True) for number, schema in enumerate(titled)]
    asked(tokenizer, HERMES, many)
    assert compiled == ["regex", *["json"] * len(many), "grammar"]
    asked(tokenizer, HERMES, many)
    tokenizer.grammars.check(other)
    assert len(compiled) == len(many) + 2, "all is known"


def test_an_answer_that_is_held_to_something_else_is_not_read_further(tokenizer: FolderTokenizer) -> None:
    held = SamplingParams(structured_outputs={"regex": "<think>a"})
    reading = Template(tokenizer, template=THINKS).reading("<think>\n", held)
    assert reading.message("<think>a", False, "x").content == "<think>a"
