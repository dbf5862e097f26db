"""Items of Responses: they become the messages that a chat would have, and one line says what is wrong with another."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_flexgen.server.response_fields import read_items
from h2o_flexgen.text.prompts import read_chat
from tests.helpers.refusals import one_line
from tests.helpers.tool_templates import called


def in_parts(kind: str, *texts: str) -> list[dict[str, Any]]:
    return [{"type": kind, "text": text} for text in texts]


def call(identity: str, name: str = "go") -> dict[str, Any]:
    return {"type": "function_call", "call_id": identity, "name": name, "arguments": '{"a": 1}', "id": "fc_1"}


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": "Short."},
        {"role": "user", "content": in_parts("input_text", "Go ", "on."), "type": "message"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": in_parts("reasoning_text", "Hm."),
            "encrypted_content": None,
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": in_parts("output_text", "So."),
        },
        call("one"),
        call("two", "stay"),
        {"type": "function_call_output", "call_id": "two", "output": "9"},
        {"type": "function_call_output", "call_id": "one", "output": in_parts("input_text", "1", "0")},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    both = called(("one", "go", '{"a": 1}'), ("two", "stay", '{"a": 1}'))
    assert read_items(items, "Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Short."},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "reasoning_content": "Hm.", "content": "So.", "tool_calls": both},
        {"role": "tool", "tool_call_id": "two", "name": "stay", "content": "9"},
        {"role": "tool", "tool_call_id": "one", "name": "go", "content": "10"},
        {"role": "assistant", "content": "No."},
    ]
    assert len(read_chat("input", read_items(items))) == 6, "all are messages of chats"


def test_a_text_is_a_message_and_two_answers_are_two() -> None:
    assert read_items("Hi") == [{"role": "user", "content": "Hi"}]
    twice = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert read_items(twice) == twice
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": in_parts("reasoning_text", "Hm.")}
    (one,) = read_chat("input", read_items([thought]))
    assert one == {"role": "assistant", "content": "", "reasoning_content": "Hm."}


@pytest.mark.parametrize(
    ("items", "begin"),
    [
        (5, "input is 5; allowed is a text, or a list of items"),
        ([5], "input[0] is 5; allowed is an item"),
        ([{"type": "item_reference", "id": "a"}], "input[0] is of the type 'item_reference'; known are message, function_call"),
        ([{"content": "a"}], "input[0] is of the type None; known are"),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}],
            "input[0].content[0] is {'image_url': 'a'",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "usr", "content": "b"}],
            "input[1] has the role 'usr'; allowed are system, ",
        ),
        ([{"role": "tool", "content": "a"}], "input[0] has the role 'tool'; allowed are system, developer, user, assistant"),
        ([{"role": ["user"], "content": "a"}], "input[0] has the role ['user']; allowed are"),
        ([{**call("a"), "arguments": "[1]"}], "input[0] has the arguments '[1]'; allowed is an object"),
        ([call("a"), {**call("b"), "arguments": "{"}], "input[1] has the arguments '{'; allowed is an object"),
        ([{"role": "user", "content": 5}], "input[0].content is 5; allowed is a text, or a list"),
        ([{"role": "user", "content": "a", "name": "b"}], "unknown field of input[0] (type message) 'name'"),
        ([{"type": "function_call_output", "call_id": "a", "output": "b"}], "input[0].call_id is 'a', and no item before it"),
        ([{"type": "function_call", "call_id": "a", "arguments": "{}"}], "input[0].name is None; allowed is a text"),
        ([{"type": "reasoning", "summary": in_parts("summary_text", "a")}], "input[0].summary is [{'text': 'a'"),
        (
            [{"type": "reasoning", "summary": [], "encrypted_content": "a"}],
            "unknown field of input[0] (type reasoning) 'encryp",
        ),
    ],
)
def test_what_is_wrong_is_one_line(items: Any, begin: str) -> None:
    assert one_line(lambda: read_items(items)).startswith(begin)


def test_instructions_are_a_text() -> None:
    assert one_line(lambda: read_items("a", ["b"])) == "instructions is ['b']; allowed is a text"
