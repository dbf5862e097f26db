"""Messages of chats: a stored conversation is read as templates know it, and one line says what is wrong with another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage
from transformers.utils.chat_template_utils import render_jinja_template

from h2o_flexgen.text.chat_template import render
from h2o_flexgen.text.dialogue import PlainStyle, Script
from h2o_flexgen.text.prompts import read_chat
from h2o_flexgen.text.tokenizer import ByteTokenizer, ChatInput
from tests.helpers.refusals import one_line

ARGUMENTS = {"place": "pier \N{SNOWMAN}", "days": [1, 2.5], "deep": {"a": None}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": json.dumps(ARGUMENTS)}}
STORED: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "When does "}, {"type": "text", "text": "it go?"}], "name": "Ann"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": None, "function_call": None},
    {"role": "tool", "tool_call_id": "call_1", "content": "at nine"},
    {"role": "assistant", "content": "At nine.", "annotations": [], "reasoning_content": "hm"},
]
# as the templates of Qwen and Llama look at messages
TEMPLATE = (
    "{% if messages[0].role != 'system' %}[default]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}"
    "{% if m.reasoning_content is string %}({{ m.reasoning_content }}){% endif %}{{ m.tool_call_id }}{{ m.name }}"
    "{% if 'tool_calls' in m %}{% for call in m.tool_calls %}{% set call = call.function %}"
    "{{ call.name }}{{ call.arguments | tojson }}"
    "{% for name, value in call.arguments.items() %}{{ name }}={{ value }};{% endfor %}{% endfor %}{% endif %}{% endfor %}"
)


def read(*messages: object) -> list[Mapping[str, Any]]:
    return read_chat("messages", messages)


def test_a_stored_conversation_is_what_templates_of_the_library_take() -> None:
    known = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "When does it go?", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {"name": "look_up", "arguments": ARGUMENTS}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "at nine"},
        {"role": "assistant", "content": "At nine.", "reasoning_content": "hm"},
    ]
    assert read(*STORED) == known
    [expected], _ = render_jinja_template([known], chat_template=TEMPLATE)
    written = render(TEMPLATE, read(*STORED), {})
    assert written == expected and "[default]" not in written and 'look_up{"place": "pier' in written


def test_what_the_client_of_openai_has_got_can_be_sent_again() -> None:
    for content, calls in (("Hi", None), (None, [CALL])):
        got = ChatCompletionMessage.model_validate({"role": "assistant", "content": content, "tool_calls": calls})
        assert read(got.model_dump()) == read({"role": "assistant", "content": content, "tool_calls": calls})
    assert read({"role": "assistant", "content": None, "refusal": "No."})[0]["content"] == "No."


def test_the_names_of_before_are_those_of_now() -> None:
    call = {"name": "look_up", "arguments": ""}
    said, told = read(
        {"role": "assistant", "function_call": call}, {"role": "function", "name": "look_up", "content": "at nine"}
    )
    assert said["tool_calls"] == [{"type": "function", "function": {"name": "look_up", "arguments": {}}}]
    assert told == {"role": "tool", "name": "look_up", "content": "at nine"}


def test_a_style_that_cannot_write_calls_down_does_not_leave_them_out() -> None:
    for style in (Script, PlainStyle):
        for place, said in ((2, "tool_calls need a chat template"), (3, "role 'tool' needs a chat template")):
            assert said in one_line(
                lambda style=style, place=place: style(ByteTokenizer(300)).whole(ChatInput(read(STORED[place])))
            )


def user(**more: object) -> dict[str, object]:
    return {"role": "user", "content": "x", **more}


def calls(*given: object, **more: object) -> dict[str, object]:
    return {"role": "assistant", "tool_calls": list(given), **more}


def function(**given: object) -> dict[str, object]:
    return {"function": given}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("x", "is 'x'; write {\"role\""),
        (user(role="wizard"), "has the role 'wizard'; allowed are system, developer, user, assistant, tool, function"),
        (user(role="asistant"), "function; did you mean assistant?"),
        (user(role=None), "has the role None; allowed are"),
        (user(role=["user"]), "has the role ['user']; allowed are"),
        (user(content=None), "it has no content"),
        ({"role": "assistant", "content": None}, "it has no content"),
        (calls(), "it has no content"),
        (user(content=5), "has the content 5; only text is read"),
        (user(content=[{"type": "image_url", "image_url": "x"}]), "'image_url'}; only text is read"),
        (user(content=[{"type": "text", "text": 5}]), "has the part {'text': 5, 'type': 'text'}; only text is read"),
        (user(content=[{"type": "text", "text": "x", "txt": 1}]), "unknown field of a part of message 0 of messages 'txt'"),
        (user(nmae="Ann"), "unknown field of message 0 of messages (role user) 'nmae'; did you mean name?"),
        (user(wibble=1, wobble=2), "(role user) 'wibble', and 'wobble'"),
        (user(name=5), "has the name 5; allowed is a text"),
        (user(tool_calls=[CALL]), "(role user) 'tool_calls': only a message of the assistant has calls"),
        (user(tool_call_id="a"), "'tool_call_id': only a message of a tool has one"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "has the tool_call_id 5; allowed is a text"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "'audio': only text is read"),
        ({"role": "assistant", "content": "x", "refusal": 5}, "has the refusal 5; allowed is a text"),
        ({"role": "assistant", "content": "x", "annotations": "a"}, "has the annotations 'a'; allowed is a list"),
        ({"role": "assistant", "tool_calls": "x"}, "has the tool_calls 'x'; allowed is a list"),
        (calls(CALL, function_call={"name": "x"}), "has tool_calls and function_call; give one of them"),
        (calls("x"), "call 0 of message 0 of messages is 'x'; it is {\"id\""),
        (calls(CALL, function(arguments="{}")), "call 1 of message 0 of messages is {'function': {'arguments': '{}'}}; it is"),
        (calls({**CALL, "type": "custom"}), "has the type 'custom'; allowed is function"),
        (calls({**CALL, "id": 5}), "has the id 5; allowed is a text"),
        (calls({**CALL, "nmae": 5}), "unknown field of call 0 of message 0 of messages 'nmae'"),
        (calls(function(name="a", argument="{}")), "'argument'; did you mean arguments?"),
        (calls(function(name="a", arguments="{'a': 1}")), "has the arguments \"{'a': 1}\"; allowed is an object, or one"),
        (calls(function(name="a", arguments="[1]")), "has the arguments '[1]'; allowed is an object"),
        (calls(function(name="a", arguments='{"a": NaN}')), "has the arguments '{\"a\": NaN}'; allowed is an object"),
        (calls(function(name="a", arguments='{"a": "\\ud800"}')), "allowed is an object, or one written as JSON"),
        (calls(function(name="a", arguments="[" * 100_000)), "allowed is an object, or one written as JSON"),
    ],
)
def test_a_refusal_names_the_message_and_what_is_allowed(message: object, said: str) -> None:
    told = one_line(lambda: read(message))
    assert said in told and "message 0 of messages" in told
