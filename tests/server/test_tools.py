"""Tools for OpenAI's own client: vLLM's own examples, streams in OpenAI's order, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel

from h2o_flexgen.jobs.line_fields import ModelNames, Options
from h2o_flexgen.jobs.openai_answers import Answers
from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.completion import AnswerMessage, Completion
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.server.answer_chunks import AnswerChunks, TokenPiece
from h2o_flexgen.server.body_fields import read_asked
from h2o_flexgen.text import answer_reader
from h2o_flexgen.text.answer_reader import AnswerPart, AnswerReader
from h2o_flexgen.text.dialogue import Template
from h2o_flexgen.text.prompts import Prompt
from tests.helpers.tool_templates import HERMES, MAY_THINK, MISTRAL, QWEN_THINKS, THINKS, named
from tests.server.served import MODEL, Served, served

pytest.importorskip("llguidance", reason="needs the extra [grammar]")

DRAWN: dict[str, Any] = {"model": MODEL, "temperature": 0.8, "seed": 7}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 9},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
ASK: list[Any] = [
    {"role": "user", "content": "What is the temperature in Dallas?"},
]


@pytest.fixture(scope="module")
def server(demo: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(demo, room=(400, 90), data=tmp_path_factory.mktemp("data"), template=HERMES) as server:
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client


def asked(**beside: Any) -> dict[str, Any]:
    return {**DRAWN, "messages": ASK, "tools": [WEATHER, NOW], **beside}


def is_sound(call: Any) -> bool:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "now":
        return arguments == {}
    return call.function.name == "get_current_weather" and arguments.keys() == {"city", "unit"} and len(arguments["city"]) < 10


def test_a_tool_that_must_be_called_is_called_and_its_answer_is_read(client: OpenAI) -> None:
    answer = client.chat.completions.create(**asked(tool_choice=named("get_current_weather")))
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert is_sound(call) and call.type == "function" and call.id.startswith("call_")
    told = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "It is 98 degrees."}
    before, then = (
        client.chat.completions.create(**asked(messages=messages, tool_choice="none", max_tokens=5))
        for messages in (ASK, [*ASK, choice.message, told])
    )
    assert then.choices[0].finish_reason == "length" and then.choices[0].message.tool_calls is None
    assert answer.usage.prompt_tokens > then.usage.prompt_tokens > before.usage.prompt_tokens, "tools; the call; neither"


def test_calls_that_must_come_are_of_the_tools_that_there_are(client: OpenAI) -> None:
    answer = client.chat.completions.create(**asked(tool_choice="required", n=4, max_tokens=90))
    for choice in answer.choices:
        calls = choice.message.tool_calls or []
        assert choice.message.content is None or not calls
        assert choice.finish_reason in ("tool_calls", "length")
        assert all(map(is_sound, calls if choice.finish_reason == "tool_calls" else calls[:-1]))
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or []]
    assert len(ids) == len(set(ids)) >= 4
    one = client.chat.completions.create(**asked(tool_choice="required", parallel_tool_calls=False, n=4, max_tokens=90))
    assert {len(choice.message.tool_calls or []) for choice in one.choices} == {1}


def test_a_streamed_call_is_the_whole_one_in_pieces(client: OpenAI) -> None:
    given = asked(tool_choice="required", n=2, max_tokens=80, logprobs=True)
    whole = client.chat.completions.create(**given)
    chunks = list(client.chat.completions.create(**given, stream=True))
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert [one.finish_reason for one in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        assert not any(one.delta.content for one in own), "all that is said are calls"
        deltas = [delta for one in own for delta in one.delta.tool_calls or []]
        assert [delta.index for delta in deltas] == sorted(delta.index for delta in deltas)
        for index, call in enumerate(choice.message.tool_calls or []):
            first, *others = [delta for delta in deltas if delta.index == index]
            assert first.id == call.id and call.id.startswith("call_") and first.type == "function"
            assert first.function.name == call.function.name and first.function.arguments == ""
            assert all(other.id is None and other.function.name is None for other in others) and len(others) > 1
            assert "".join(other.function.arguments for other in others) == call.function.arguments
        steps = [step.token for one in own if one.logprobs for step in one.logprobs.content]
        assert steps == [step.token for step in choice.logprobs.content]


def test_ids_of_calls_are_those_of_the_seed_and_the_turn(client: OpenAI) -> None:
    """Requests without a seed have answers of their own, and so their calls have ids of their own."""

    def ids(**beside: Any) -> list[str]:
        given = asked(tool_choice=named("now"), max_tokens=90, **beside)
        (choice,) = client.chat.completions.create(**given).choices
        chunks = client.chat.completions.create(**given, stream=True)
        streamed = [call.id for chunk in chunks for call in chunk.choices[0].delta.tool_calls or [] if call.id]
        return [*streamed, *(call.id for call in choice.message.tool_calls or [])]

    seeded, unseeded = ids(), [*ids(seed=None), *ids(seed=None, temperature=0)]
    other = [*ids(seed=8), *ids(messages=[*ASK, {"role": "user", "content": "And now?"}])]
    assert len(seeded) == 2 and len({*seeded}) == 1
    assert len({*unseeded}) == len(unseeded) == 4 and len({*other}) == 2 and not {*seeded} & {*unseeded, *other}


def test_a_function_of_a_class_as_the_client_parses_it(client: OpenAI) -> None:
    class Go(BaseModel):
        """Goes there."""

        is_far: bool

    given = {**DRAWN, "messages": ASK, "tools": [pydantic_function_tool(Go)], "tool_choice": "required"}
    answer = client.chat.completions.parse(**given, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Go)
    with client.chat.completions.stream(**given, parallel_tool_calls=False) as stream:
        events = list(stream)
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [type(event.parsed_arguments) for event in done] == [Go]
    strict = client.chat.completions.create(**{**given, "tool_choice": "auto"}, max_tokens=10)
    assert strict.choices[0].finish_reason == "length" and strict.choices[0].message.content, "it may say something else"


def test_a_mark_in_an_answer_that_may_call_nothing_is_text(client: OpenAI) -> None:
    marked = {"structured_outputs": {"regex": '<tool_call>\\{"name": "now"\\}</tool_call>'}}
    text = client.chat.completions.create(**DRAWN, messages=ASK, extra_body=marked).choices[0].message
    assert text.content == '<tool_call>{"name": "now"}</tool_call>' and text.tool_calls is None


def test_python_calls_tools_the_same_way(demo: LLM) -> None:
    params = SamplingParams(max_tokens=90, temperature=0.8, seed=3)
    given: dict[str, Any] = {"chat_template": HERMES, "tools": [WEATHER, NOW], "tool_choice": named("now")}
    heard = []
    (found,) = demo.chat(ASK, params, **given, on_completion=heard.append)
    assert found.message is not None and found.text.startswith("<tool_call>") and found.finish_reason == "stop"
    (call,) = found.message.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("now", {})
    assert [one.message for one in heard] == [found.message] == [found.outputs[0].message]
    told = {"role": "tool", "tool_call_id": call.id, "content": "Noon."}
    (then,) = demo.chat([*ASK, found.message.written, told], params, **given)
    assert then.message is not None and then.message.tool_calls[0].id != call.id, "a conversation has an id once"
    assert demo.chat(ASK, params, **given)[0].message == found.message
    (plain,) = demo.chat(ASK, SamplingParams(max_tokens=3))
    assert plain.message is not None and plain.message.content == plain.text
    with pytest.raises(ValueError, match="tools need a chat template"):
        demo.chat(ASK, params, tools=[NOW])


@pytest.mark.parametrize(
    ("body", "param", "begin"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools", "tools[0].function.name is missing"),
        ({"tools": [NOW], "tool_choice": named("then")}, "tool_choice", "tool_choice names 'then', and tools are now"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice is 'required', and there are no tools"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "odd", "parameters": {"uniqueItems": True}}}],
                "tool_choice": "required",
            },
            "tools",
            "tools[0].function.parameters has keywords that are not supported",
        ),
        (
            {"tools": [NOW], "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "structured_outputs has a regex, and tools stand beside JSON alone",
        ),
        ({"functions": [{"name": "now"}]}, "functions", "unknown field 'functions': it is called tools"),
        ({"function_call": "auto"}, "function_call", "unknown field 'function_call': it is called tool_choice"),
    ],
)
def test_what_is_wrong_with_tools_is_told(client: OpenAI, body: Mapping[str, Any], param: str, begin: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=ASK, extra_body=body)
    assert refused.value.body["message"].startswith(begin) and refused.value.param == param  # type: ignore[index]


def test_tools_are_for_chats_and_for_templates_that_have_them(client: OpenAI, demo: LLM) -> None:
    with pytest.raises(BadRequestError, match="tools are for chats"):
        client.completions.create(model=MODEL, prompt="x", extra_body={"tools": [NOW]})
    lacks = pytest.raises(BadRequestError, match="tools need a chat template that writes calls as Mistral")
    with served(demo, room=(400, 20)) as plain, plain.client() as other, lacks:
        other.chat.completions.create(model=MODEL, messages=ASK, tools=[NOW])  # type: ignore[list-item]


def test_lines_of_a_batch_call_tools(server: Served, client: OpenAI) -> None:
    bodies = [
        {"messages": ASK, "tools": [NOW], "tool_choice": "required", "parallel_tool_calls": False},
        {"messages": ASK, "tools": [{"type": "function", "function": {}}]},
    ]
    lines = [
        {"custom_id": f"line {number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    file = client.files.create(file=("in.jsonl", json.dumps(lines[0]).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    server.until(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed"))
    ended = client.batches.retrieve(batch.id)
    assert ended.status == "completed" and ended.output_file_id is not None
    (record,) = map(json.loads, client.files.content(ended.output_file_id).text.splitlines())
    (choice,) = record["response"]["body"]["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "now"
    bad = client.files.create(file=("in.jsonl", json.dumps(lines[1]).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=bad.id, endpoint="/v1/chat/completions", completion_window="24h")
    server.until(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed"))
    (error,) = client.batches.retrieve(batch.id).errors.data  # type: ignore[union-attr]
    assert "tools[0].function.name is missing" in error.message


# -- what the demo model would not say by itself -----------------------------------------------------------------------------

TEXTS = [
    (HERMES, 'Let me see.\n<tool_call>\n{"name": "now", "arguments": {"a": "<"}}\n</tool_call>\n', "stop"),
    (
        HERMES,
        'Two: <tool_call>{"name": "now"}</tool_call><tool_call>{"name": "get_current_weather", "arguments": {"c',
        "length",
    ),
    (HERMES, "No <call> at all <tool_", "stop"),
    (QWEN_THINKS, "<think>\nHm.\n</think>\n\nNine.", "stop"),
    (QWEN_THINKS, "<think>\nHm <", "length"),
    (MISTRAL, '[TOOL_CALLS][{"name": "now", "arguments": {}}]', "stop"),
]


@pytest.mark.parametrize(("template", "text", "reason"), TEXTS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_stream_says_what_the_whole_answer_says(template: str, text: str, reason: str, size: int, demo: LLM) -> None:
    answers = Answers(MODEL, Template(demo.tokenizer, template=template))
    body = {"messages": ASK, "tools": [NOW, WEATHER]}
    asked = read_asked(json.dumps(body).encode(), True, Options(SamplingParams()), ModelNames(MODEL))
    whole = Completion(0, "?", (1,), text, (2,), None, reason)
    (choice,) = answers.body("name", 17, [(asked.lines[0], whole)])["choices"]  # type: ignore[misc]
    chunks, deltas = AnswerChunks(answers, "name", 17, asked, [""], [Prompt("?", (1,))]), []
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    ends = [None] * (len(pieces) - 1) + [reason]
    told = [TokenPiece(0, 0, 5, piece, None, end, None) for piece, end in zip(pieces, ends)]
    for chunk in [*chunks.begin(), *(chunk for one in told for chunk in chunks.of(one))]:
        (found,) = ChatCompletionChunk.model_validate(chunk).choices
        deltas.append(found.delta.model_dump(exclude_none=True))
    assert found.finish_reason == choice["finish_reason"] and not found.delta.model_dump(exclude_none=True)
    joined: dict[str, Any] = {}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            joined[name] = joined.get(name, "") + delta.get(name, "")
        for call in delta.get("tool_calls", []):
            calls = joined.setdefault("tool_calls", {})
            known = calls.setdefault(call["index"], {**call, "function": {"arguments": "", **call["function"]}})
            known["function"]["arguments"] += call["function"]["arguments"]
    message = choice["message"]
    assert (joined["content"], joined["reasoning_content"]) == (message["content"] or "", message.get("reasoning_content", ""))
    made = [{name: value for name, value in call.items() if name != "index"} for call in joined.get("tool_calls", {}).values()]
    assert made == message.get("tool_calls", [])
    assert len({call["id"] for call in made}) == len(made)


class SaysHalfACharacter(AnswerReader):
    """Reads a call with half a pair of characters, whatever the model has said."""

    def add(self, text: str) -> list[AnswerPart]:
        return super().add("")

    def end(self, is_cut: bool) -> list[AnswerPart]:
        return [*super().add('<tool_call>{"name": "a\\ud800", "arguments": {}}</tool_call>'), *super().end(False)]


def test_half_a_character_comes_through(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_reader, "AnswerReader", SaysHalfACharacter)
    given: dict[str, Any] = {"messages": ASK, "tools": [NOW], "max_tokens": 2, "model": MODEL}
    (call,) = client.chat.completions.create(**given).choices[0].message.tool_calls or []
    chunks = [*client.chat.completions.create(**given, stream=True)]
    calls = [one for chunk in chunks for choice in chunk.choices for one in choice.delta.tool_calls or []]
    own: Any = [{"type": "function", **NOW["function"]}]
    (item,) = client.responses.create(model=MODEL, input=ASK, tools=own, max_output_tokens=2).output
    assert call.function.name == calls[0].function.name == item.name == "a\ud800"


def test_thoughts_are_told_apart_whole_streamed_and_in_batches(demo: LLM, tmp_path: Path) -> None:
    given: dict[str, Any] = {"messages": ASK, "max_tokens": 6, "temperature": 0}
    with served(demo, room=(100, 20), data=tmp_path, template=THINKS) as server, server.client() as client:
        answer = client.chat.completions.create(model=MODEL, **given).choices[0]
        chunks = list(client.chat.completions.create(model=MODEL, **given, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": given}
        file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        server.until(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed"))
        output = client.batches.retrieve(batch.id).output_file_id
        record = json.loads(client.files.content(output or "").text)
    thought = answer.message.reasoning_content
    assert answer.message.content is None and answer.finish_reason == "length" and len(thought) > 6
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == thought
    assert not any(delta.content for delta in deltas)
    assert record["response"]["body"]["choices"][0]["message"] == answer.message.model_dump(exclude_unset=True)
    (found,) = demo.chat(ASK, SamplingParams(max_tokens=6), chat_template=THINKS)
    assert found.message == AnswerMessage(None, thought) and found.text.strip() == thought


def test_a_model_may_be_told_not_to_think(demo: LLM) -> None:
    given: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 6, "temperature": 0}
    with served(demo, room=(100, 20), template=MAY_THINK) as server, server.client() as client:
        thought = client.chat.completions.create(**given).choices[0].message
        chats = [
            client.chat.completions.create(**given, extra_body={"chat_template_kwargs": {"enable_thinking": False}}),
            client.chat.completions.create(**given, reasoning_effort="none"),
        ]
        effort: Any = {"effort": "none"}
        answer = client.responses.create(model=MODEL, input=ASK, max_output_tokens=6, temperature=0, reasoning=effort)
    assert thought.content is None and thought.reasoning_content
    texts = {chat.choices[0].message.content for chat in chats}
    assert texts == {answer.output_text} and answer.output_text
    settings = {"enable_thinking": False}
    (found,) = demo.chat(ASK, SamplingParams(max_tokens=6), chat_template=MAY_THINK, chat_template_kwargs=settings)
    assert found.message is not None and found.message.content == found.text.lstrip() == answer.output_text
