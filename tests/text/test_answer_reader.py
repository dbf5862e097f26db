"""Answers read while they come: whichever way a text is cut into pieces, the message is the same, and marks are in no text."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from h2o_flexgen.sampling.completion import AnswerMessage
from h2o_flexgen.text.answer_forms import FORMS, form_of
from h2o_flexgen.text.answer_reader import AnswerPart, AnswerReading, ArgumentsPart, CallPart, SaidPart, message_of
from tests.helpers.tool_templates import (
    HERMES,
    LLAMA,
    MAGISTRAL,
    MISTRAL,
    NAMES_FIRST,
    QWEN_THINKS,
    TEXT_ARGUMENTS,
    THINKS,
)

NAMES = ("go", "stay")
Expected = tuple[str | None, str | None, list[tuple[str, str]]]  # content, thoughts, names and arguments of calls
HARD = '{"a": "} \\" </tool_call> [", "b": [1, {"c": null}]}'
LLAMA_THINKS = LLAMA + "{# <think> #}"
ODD_ARGUMENTS = [
    f'<tool_call>{{"name": "go", "arguments": {json.dumps(text)}}}</tool_call>' for text in ("hello", "[1]", "5", '{"x": ')
]
WHOLE: list[tuple[str, str, Expected]] = [
    (HERMES, "Just a text, with < and > and {braces}.", ("Just a text, with < and > and {braces}.", None, [])),
    (HERMES, f'<tool_call>\n{{"name": "go", "arguments": {HARD}}}\n</tool_call>', (None, None, [("go", HARD)])),
    (
        HERMES,
        'Let me see.\n\n<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"x": 1}, "name": "stay"}</tool_call>\n',
        ("Let me see.", None, [("go", "{}"), ("stay", '{"x": 1}')]),
    ),
    (HERMES, '<tool_call>{"name": "go"}</tool_call> and so on', (" and so on", None, [("go", "{}")])),
    (HERMES, '<tool_call>{"name": "go", "arguments": "{\\"x\\": 1}"}</tool_call>', (None, None, [("go", '{"x": 1}')])),
    (HERMES, '<tool_call>{"name": "other", "arguments": {}} then', (" then", None, [("other", "{}")])),
    (HERMES, '<tool_call>{"nome": "go"}</tool_call>', ('<tool_call>{"nome": "go"}</tool_call>', None, [])),
    (HERMES, '<tool_call>{"arguments": 5, "name": "go"}', ('<tool_call>{"arguments": 5, "name": "go"}', None, [])),
    *((HERMES, text, (text, None, [])) for text in ODD_ARGUMENTS),
    (HERMES, '<tool_call>{"name": "go", "arguments": ""}</tool_call>', (None, None, [("go", "{}")])),
    (HERMES, "<tool_call>go()</tool_call>", ("<tool_call>go()</tool_call>", None, [])),
    (HERMES, '<tool_call>{"name": "go", "arguments": {"a": 1}, 5}</tool_call>ok', ("ok", None, [("go", '{"a": 1}')])),
    (HERMES, "  spaces, and the half of a mark: <tool_ca", ("  spaces, and the half of a mark: <tool_ca", None, [])),
    (LLAMA, f'{{"name": "go", "parameters": {HARD}}}', (None, None, [("go", HARD)])),
    (LLAMA, ' {"type": "function", "name": "go", "parameters": {}}', (None, None, [("go", "{}")])),
    (LLAMA, '<|python_tag|>{"name": "far", "parameters": {}}', (None, None, [("far", "{}")])),
    (
        LLAMA,
        '{"name": "go", "parameters": {"a": 1}}; {"name": "stay", "arguments": {"b": 2}}',
        (None, None, [("go", '{"a": 1}'), ("stay", '{"b": 2}')]),
    ),
    (LLAMA, '{"name": "Ann", "age": 3}', ('{"name": "Ann", "age": 3}', None, [])),
    (LLAMA, '{"name": "Ann", "parameters": {}}', ('{"name": "Ann", "parameters": {}}', None, [])),
    (LLAMA_THINKS, '<think>a</think>{"name": "zz"} bar', ('{"name": "zz"} bar', "a", [])),
    (LLAMA_THINKS, '<think>a</think>\n\n{"x": 1}', ('{"x": 1}', "a", [])),
    (LLAMA_THINKS, '<think>a</think>\n\n{"name": "go"}', (None, "a", [("go", "{}")])),
    (LLAMA, 'So: {"name": "go", "parameters": {}}', ('So: {"name": "go", "parameters": {}}', None, [])),
    (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "go", "arguments": {HARD}, "id": "123456789"}}, {{"name": "stay", "arguments": {{}}}}]',
        (None, None, [("go", HARD), ("stay", "{}")]),
    ),
    (MISTRAL, "Well.[TOOL_CALLS]{}", ("Well.[TOOL_CALLS]{}", None, [])),
    (MISTRAL, "[1] and [2, 3", ("[1] and [2, 3", None, [])),
    (
        NAMES_FIRST,
        f"Well. [TOOL_CALLS]go[ARGS]{HARD}[TOOL_CALLS]stay[CALL_ID]123456789[ARGS] {{}}",
        ("Well.", None, [("go", HARD), ("stay", "{}")]),
    ),
    (NAMES_FIRST, "[TOOL_CALLS]go[ARGS]", (None, None, [("go", "{}")])),
    (NAMES_FIRST, "Well.[TOOL_CALLS]go[ARGS] a city", ("Well.", None, [("go", "{}")])),
    (NAMES_FIRST, "[TOOL_CALLS]go{}", ("[TOOL_CALLS]go{}", None, [])),
    (QWEN_THINKS, "<think>\nHm, <tool_call>?\n</think>\n\nNine.", ("Nine.", "Hm, <tool_call>?", [])),
    (
        QWEN_THINKS,
        '\n<think>\n\n</think>\n\n<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>',
        (None, None, [("go", "{}")]),
    ),
    (QWEN_THINKS, "No thought. </think> <think>", ("No thought. </think> <think>", None, [])),
    (MAGISTRAL, '[THINK]Hm.[/THINK][TOOL_CALLS][{"name": "go", "arguments": {}}]', (None, "Hm.", [("go", "{}")])),
    (THINKS, "Hm.\n</think>\n\nNine.", ("Nine.", "Hm.", [])),
]


def reading(template: str, most: int | None = None) -> AnswerReading:
    return AnswerReading(form_of(template), NAMES, most, begins_thinking=template == THINKS)


def shown(message: AnswerMessage) -> Expected:
    return message.content, message.reasoning_content, [(call.name, call.arguments) for call in message.tool_calls]


def in_pieces(how: AnswerReading, pieces: Sequence[str], is_cut: bool = False) -> list[AnswerPart]:
    reader = how.reader("answer 0")
    return [part for piece in pieces for part in reader.add(piece)] + reader.end(is_cut)


@pytest.mark.parametrize(("template", "text", "expected"), WHOLE)
def test_the_message_of_a_text_however_it_is_cut(template: str, text: str, expected: Expected) -> None:
    how = reading(template)
    message = how.message(text, False, "answer 0")
    assert shown(message) == expected
    for place in range(len(text) + 1):
        assert message_of(in_pieces(how, (text[:place], text[place:]))) == message
    assert message_of(in_pieces(how, list(text))) == message


@pytest.mark.parametrize(("template", "text", "expected"), WHOLE)
def test_a_text_that_was_cut_off_shows_no_half_of_a_mark(template: str, text: str, expected: Expected) -> None:
    how = reading(template)
    for end in range(len(text) + 1):
        parts = in_pieces(how, list(text[:end]), is_cut=True)
        content, thoughts, calls = shown(message_of(parts))
        assert (expected[0] or "").startswith((content or "").rstrip()), "blanks before a mark are not known as such"
        assert (thoughts or "") == (expected[1] or "")[: len(thoughts or "")]
        assert [name for name, _ in calls] == [name for name, _ in expected[2]][: len(calls)]
        assert all(whole.startswith(begun) for (_, begun), (_, whole) in zip(calls, expected[2]))
        assert message_of(parts) == how.message(text[:end], True, "answer 0")


def test_parts_come_as_early_as_they_are_certain() -> None:
    reader = reading(HERMES).reader("answer 0")
    assert reader.add("See: <") == [SaidPart("See:")], "a mark may follow"
    assert reader.add("b>") == [SaidPart(" <b>")]
    assert reader.add(' <tool_call>{"name": "go", "arguments": ') == [], "it may still be none"
    call, first = reader.add('{"a')
    assert isinstance(call, CallPart) and (call.index, call.name) == (0, "go") and first == ArgumentsPart(0, '{"a')
    assert reader.add('": 1}') == [ArgumentsPart(0, '": 1}')]
    assert reader.add("}</tool_call>") == reader.end(is_cut=False) == [] and reader.calls == 1


def test_more_calls_than_are_wanted_are_left_out() -> None:
    text = 'Ok. <tool_call>{"name": "go", "arguments": {"a": 1}}</tool_call> <tool_call>{"name": "go", "arguments": {"b": 2}}'
    how = reading(HERMES, most=1)
    for pieces in ([text], list(text)):
        assert shown(message_of(in_pieces(how, pieces))) == ("Ok.", None, [("go", '{"a": 1}')])


def test_arguments_too_deep_to_be_parsed_are_no_call() -> None:
    text = f'<tool_call>{{"name": "go", "arguments": "{"[" * 100_000}"}}</tool_call>'
    assert shown(reading(HERMES).message(text, False, "x")) == (text, None, [])


def test_a_call_too_many_has_no_arguments_either() -> None:
    found = reading(NAMES_FIRST, most=1).message('[TOOL_CALLS]go[ARGS]{"a": 1}[TOOL_CALLS]stay[ARGS]', False, "x")
    assert shown(found) == (None, None, [("go", '{"a": 1}')])


def test_calls_are_known_by_ids_of_their_own() -> None:
    two = '<tool_call>{"name": "go"}</tool_call><tool_call>{"name": "go"}</tool_call>'
    first, again, other = (reading(HERMES).message(two, False, name).tool_calls for name in ("x 0", "x 0", "x 1"))
    assert first == again and len({call.id for call in (*first, *other)}) == 4
    assert all(call.id.startswith("call_") for call in first)
    (short,) = reading(MISTRAL).message('[TOOL_CALLS][{"name": "go"}]', False, "x").tool_calls
    assert len(short.id) == 9 and short.id.isalnum(), "its template takes no other"


@pytest.mark.parametrize(
    ("template", "calls", "thoughts"),
    [
        (HERMES, "Hermes or Qwen", None),
        (LLAMA, "Llama 3.1", None),
        (MISTRAL, "Mistral", None),
        (NAMES_FIRST, "Mistral with names first", None),
        (QWEN_THINKS, "Hermes or Qwen", "think"),
        (THINKS, None, "think"),
        (MAGISTRAL, "Mistral", "Magistral"),
        (TEXT_ARGUMENTS, None, None),
        ('<tool_call>\n<function=example_function_name>\n{"name"', None, None),  # as Qwen3-Coder's
        ('<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> {"name"', None, None),  # as GLM's
        ('{{- "<tool_call>\n" }}\n    {{- \'{"name": <function-name>, "arguments": <args-dict>}', "Hermes or Qwen", None),
    ],
)
def test_a_template_shows_the_form(template: str, calls: str | None, thoughts: str | None) -> None:
    found = form_of(template)
    assert (found.calls and found.calls.name, found.thoughts and found.thoughts.name) == (calls, thoughts)


def test_each_row_of_the_table_was_read() -> None:
    of_templates = [form_of(template) for template, _, expected in WHOLE if expected[1] or expected[2]]
    assert {form for one in of_templates for form in (one.calls, one.thoughts) if form} == {*FORMS}


def test_a_message_can_be_given_again() -> None:
    told = reading(QWEN_THINKS).message('<think>Hm.</think><tool_call>{"name": "go"}</tool_call>', False, "x").written
    function = {"name": "go", "arguments": "{}"}
    (call,) = told["tool_calls"]  # type: ignore[misc]
    assert (told["role"], told["content"], told["reasoning_content"]) == ("assistant", None, "Hm.")
    assert call["function"] == function and call["type"] == "function"
    assert reading(HERMES).message("Hi", False, "x").written == {"role": "assistant", "content": "Hi"}
