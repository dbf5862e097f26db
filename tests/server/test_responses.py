"""Responses for OpenAI's own client: what a chat says in items, streams in OpenAI's order, and no field that is ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_type_hints

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import BaseModel, TypeAdapter

from h2o_flexgen.jobs.line_fields import ModelNames, Options
from h2o_flexgen.jobs.openai_answers import Answers
from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.server.answer_chunks import TokenPiece
from h2o_flexgen.server.problems import Refused, broken
from h2o_flexgen.server.response_fields import read_response
from h2o_flexgen.server.response_writer import ResponseWriter
from h2o_flexgen.text.dialogue import Template
from h2o_flexgen.text.prompts import Prompt
from tests.helpers.tool_templates import HERMES, QWEN_THINKS, THINKS
from tests.server.served import MODEL, Served, served

pytest.importorskip("llguidance", reason="needs the extra [grammar]")

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
GO: dict[str, Any] = {
    "type": "function",
    "name": "go",
    "parameters": {
        "type": "object",
        "properties": {"is_far": {"type": "boolean"}},
        "required": ["is_far"],
        "additionalProperties": False,
    },
    "strict": True,
}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MADE_UP = ("id", "created_at", "completed_at", "call_id", "item_id", "parsed_arguments")


@pytest.fixture(scope="module")
def server(demo: LLM) -> Iterator[Served]:
    with served(demo, room=(400, 90), template=HERMES) as server:
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client


def without_ids(said: Any) -> Any:
    """What is said, without what is made up for each answer."""
    if isinstance(said, Mapping):
        return {name: without_ids(value) for name, value in said.items() if name not in MADE_UP}
    return [without_ids(one) for one in said] if isinstance(said, list) else said


def written(answer: Response) -> dict[str, Any]:
    found: dict[str, Any] = without_ids(answer.model_dump(exclude_unset=True))
    return found


def test_an_answer_is_that_of_a_chat(client: OpenAI) -> None:
    asked = {**GREEDY, "max_output_tokens": 9}
    answer = client.responses.create(**asked, input="Where to?", instructions="Be brief.", user="me", metadata={"a": "b"})
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where to?"}]
    chat = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=9)
    assert answer.output_text == chat.choices[0].message.content and answer.output_text
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (chat.usage.prompt_tokens, 9)
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert (answer.temperature, answer.max_output_tokens, answer.instructions) == (0, 9, "Be brief.")
    assert (answer.user, answer.metadata, answer.tool_choice, answer.model) == ("me", {"a": "b"}, "auto", MODEL)
    Response.model_validate(answer.model_dump())
    again = client.responses.create(**asked, input=[{"role": "system", "content": "Be brief."}, *messages[1:]])
    assert again.output_text == answer.output_text and again.id != answer.id


def test_a_stream_has_the_events_of_openai_in_their_order(client: OpenAI) -> None:
    asked = {**GREEDY, "input": "Where to?", "max_output_tokens": 9}
    events = list(client.responses.create(**asked, stream=True))
    for number, event in enumerate(events):
        assert event.sequence_number == number
        EVENT.validate_python(event.model_dump())
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    whole = client.responses.create(**asked)
    assert "".join(deltas) == events[-4].text == whole.output_text and len(deltas) > 2
    assert written(events[-1].response) == written(whole)
    assert events[0].response.status == "in_progress" and events[0].response.output == [] == events[2].item.content


def test_a_tool_is_called_and_its_answer_is_read(client: OpenAI) -> None:
    asked = {**GREEDY, "tools": [GO], "tool_choice": {"type": "function", "name": "go"}}
    answer = client.responses.create(**asked, input="Where to?")
    (call,) = answer.output
    assert (call.type, call.name, call.status, answer.status) == ("function_call", "go", "completed", "completed")
    assert json.loads(call.arguments).keys() == {"is_far"} and answer.output_text == ""
    (tool,) = answer.tools
    assert (tool.name, tool.strict, tool.parameters) == ("go", True, GO["parameters"])
    chat = client.chat.completions.create(
        **GREEDY,
        messages=[{"role": "user", "content": "Where to?"}],
        tools=[{"type": "function", "function": {name: value for name, value in GO.items() if name != "type"}}],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (same,) = chat.choices[0].message.tool_calls or []
    assert same.function.arguments == call.arguments and chat.usage.prompt_tokens == answer.usage.input_tokens
    some: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "go"}]}
    both: Any = [GO, {**GO, "name": "stay"}]
    again = client.responses.create(**GREEDY, input="Where to?", tools=both, tool_choice=some, parallel_tool_calls=False)
    assert [(item.type, item.name) for item in again.output] == [("function_call", "go")]
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "It is nine miles."}
    items: Any = [{"role": "user", "content": "Where to?"}, *answer.output, told]
    then = client.responses.create(**GREEDY, tools=[GO], tool_choice="none", input=items, max_output_tokens=4)
    assert then.output_text and then.usage.input_tokens > 30, "the call and what it gave are in the prompt"


def test_a_streamed_call(client: OpenAI) -> None:
    asked = {**GREEDY, "tools": [GO], "tool_choice": "required", "parallel_tool_calls": False, "input": "Where to?"}
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert kinds == [
        *("created", "in_progress", "output_item.added"),
        *["function_call_arguments.delta"] * len(deltas),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    (call,) = stream.get_final_response().output
    assert "".join(deltas) == call.arguments == events[-3].arguments and len(deltas) > 1
    assert events[2].item.arguments == "" and events[2].item.call_id == call.call_id
    assert written(events[-1].response)["output"] == written(client.responses.create(**asked))["output"]


def test_a_class_as_the_client_parses_it(client: OpenAI) -> None:
    class Step(BaseModel):
        is_done: bool

    answer = client.responses.parse(**GREEDY, input="Go on.", text_format=Step)
    assert isinstance(answer.output_parsed, Step) and answer.status == "completed"
    assert answer.text.format.type == "json_schema"
    either = client.responses.parse(**GREEDY, input="Go on.", text_format=Step, tools=[GO])
    assert isinstance(either.output_parsed, Step) or [item.type for item in either.output] == ["function_call"]
    some = client.responses.create(
        **GREEDY, input="An object", text={"format": {"type": "json_object"}, "verbosity": "medium"}, max_output_tokens=30
    )
    assert some.output_text.startswith("{")
    unsaid: Any = {"format": None, "verbosity": None}
    plain = client.responses.create(**GREEDY, input="Go on.", text=unsaid, max_output_tokens=2)
    assert plain.text.model_dump(exclude_unset=True) == {"format": {"type": "text"}}


# -- what the demo model would not say by itself -----------------------------------------------------------------------------

TEXTS = [
    (
        HERMES,
        'See.\n<tool_call>\n{"name": "go", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>{"name": "go"}</tool_call>',
        "stop",
    ),
    (QWEN_THINKS, "<think>\nHm.\n</think>\n\nNine.", "stop"),
    (QWEN_THINKS, '<think>Hm.</think><tool_call>{"name": "go", "arguments": {"a"', "length"),
    (HERMES, "", "stop"),
]
ITEMS = [["message", "function_call", "function_call"], ["reasoning", "message"], ["reasoning", "function_call"], ["message"]]


def writer(demo: LLM, template: str) -> ResponseWriter:
    answers = Answers(MODEL, Template(demo.tokenizer, template=template))
    asked = read_response(
        json.dumps({"input": "?", "tools": [{**GO, "strict": False}]}).encode(), Options(SamplingParams()), ModelNames(MODEL)
    )
    return ResponseWriter(answers, "name", 17, asked, Prompt("?", (1,)))


@pytest.mark.parametrize(("template", "text", "reason", "kinds"), [(*one, kinds) for one, kinds in zip(TEXTS, ITEMS)])
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_stream_comes_to_the_whole_answer(
    template: str, text: str, reason: str, kinds: Sequence[str], size: int, demo: LLM
) -> None:
    completion = Completion(0, "?", (1,), text, (2,), None, reason)
    whole = writer(demo, template).whole([completion])
    assert [item["type"] for item in whole["output"]] == kinds  # type: ignore[attr-defined]
    assert whole["status"] == ("completed" if reason == "stop" else "incomplete")
    own = writer(demo, template)
    pieces = [text[place : place + size] for place in range(0, len(text), size)] or [""]
    ends = [None] * (len(pieces) - 1) + [reason]
    told = [TokenPiece(0, 0, 5, piece, None, end, None) for piece, end in zip(pieces, ends)]
    events = [*own.begin(), *(event for one in told for event in own.of(one)), *own.end([completion])]
    read = [EVENT.validate_python({**event, "sequence_number": 0}) for event in events]
    assert events[-1]["response"] == whole
    added = [event.item for event in read if event.type == "response.output_item.added"]
    done = [event.item for event in read if event.type == "response.output_item.done"]
    assert [item.id for item in added] == [item.id for item in done] == [item["id"] for item in whole["output"]]  # type: ignore[attr-defined]
    assert [item.model_dump(exclude_unset=True) for item in done] == whole["output"]
    for item in done:
        pieces = [event.delta for event in read if getattr(event, "item_id", "") == item.id and event.type.endswith(".delta")]
        assert "".join(pieces) == (item.arguments if item.type == "function_call" else item.content[0].text)


def test_thoughts_are_an_item_which_may_be_given_again(demo: LLM) -> None:
    with served(demo, room=(200, 20), template=THINKS) as server, server.client() as client:
        asked = {**GREEDY, "max_output_tokens": 8}
        answer = client.responses.create(**asked, input="Where to?")
        kinds = [event.type for event in client.responses.create(**asked, input="Where to?", stream=True)]
        items: Any = [{"role": "user", "content": "Where to?"}, *answer.output, {"role": "user", "content": "?"}]
        then = client.responses.create(**asked, input=items)
    (thought,) = answer.output
    assert thought.type == "reasoning" and thought.content[0].text and answer.output_text == ""
    assert answer.usage.output_tokens_details.reasoning_tokens == 8
    assert "response.reasoning_text.delta" in kinds and "response.reasoning_text.done" in kinds
    assert then.usage.input_tokens > answer.usage.input_tokens


def test_an_answer_that_breaks_off_ends_with_an_event(demo: LLM) -> None:
    own = writer(demo, HERMES)
    event = EVENT.validate_python({**own.failed(broken("out of luck")), "sequence_number": 0})
    assert (event.type, event.response.status, event.response.error.message) == ("response.failed", "failed", "out of luck")
    assert own.event({"type": "a"}) == b'event: a\ndata: {"type": "a", "sequence_number": 0}\n\n'


# -- what is refused ---------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "unknown field 'previous_response_id': nothing is kept"),
    ({"conversation": "conv_1"}, "conversation", "unknown field 'conversation': nothing is kept"),
    ({"store": True}, "store", "store is true; nothing is kept between requests"),
    ({"background": True}, "background", "background is true; answers come at once"),
    ({"truncation": "auto"}, "truncation", "truncation is 'auto'; nothing of a chat is left out"),
    ({"include": ["reasoning.encrypted_content"]}, "include", "include is ['reasoning.encrypted_content']; all that there"),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs is 2; log-probabilities are those of /v1/chat/completions"),
    ({"max_tool_calls": 1}, "max_tool_calls", "unknown field 'max_tool_calls': tools are called by the client"),
    ({"prompt": {"id": "p"}}, "prompt", "unknown field 'prompt': there are no stored prompts"),
    ({"n": 2}, "n", "unknown field 'n': there is one answer"),
    ({"messages": []}, "messages", "unknown field 'messages': it is called input"),
    ({"max_tokens": 5}, "max_tokens", "unknown field 'max_tokens': it is called max_output_tokens"),
    ({"max_output_tokens": "5"}, "max_output_tokens", "max_output_tokens is '5'; allowed is a whole number"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0; an answer has a token at least"),
    ({"max_output_tokens": 5000}, "max_output_tokens", "max_output_tokens"),
    ({"temperature": "hot"}, "temperature", "temperature is 'hot'; allowed is a number"),
    ({"reasoning": {"summary": "auto"}}, "reasoning", "unknown field of reasoning 'summary': there are no summaries"),
    ({"reasoning": {"effort": 3}}, "reasoning", "reasoning.effort is 3; allowed is a text"),
    ({"text": {"verbosity": 3}}, "text", "text.verbosity 3 is unknown; known: low, medium, high"),
    ({"text": {"verbosity": "low"}}, "text", "text.verbosity is 'low', "),
    ({"service_tier": "flex"}, "service_tier", "service_tier is 'flex'; all requests are alike; leave it out"),
    ({"reasoning": "low"}, "reasoning", "reasoning is 'low'; allowed is an object"),
    ({"text": {"format": {"type": "xml"}}}, "text", "text.format.type 'xml' is unknown; known: text"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        "text",
        "text.format.schema is null; allowed is a JSON schema",
    ),
    (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"uniqueItems": True}}}},
        "text",
        "text.format cannot be held to: the JSON schema",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools[0] is {'type': 'web_search'}; only functions are known"),
    ({"tools": [GO] * 129}, "tools", "tools has 129 tools; allowed are 128 at most"),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0].name is missing"),
    ({"tools": [GO, GO]}, "tools", "tools has 'go' twice"),
    ({"tools": [{**GO, "async": True}]}, "tools", "unknown field of tools[0] 'async'"),
    ({"tools": [{**GO, "parameters": {"uniqueItems": True}}]}, "tools", "tools[0].parameters has keywords that are not"),
    (
        {"tools": [GO], "tool_choice": {"type": "function", "name": "no"}},
        "tool_choice",
        "tool_choice names 'no', and tools are",
    ),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice is 'required', and there are no tools"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream_options is for a streamed answer"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options", "unknown field of stream_options 'include"),
    ({"input": None}, "input", "input is missing; it is a text, or a list of items"),
    ({"input": [{"role": "pirate", "content": "a"}]}, "input", "input[0] has the role 'pirate'"),
    ({"input": [{"type": "computer_call"}]}, "input", "input[0] is of the type 'computer_call'"),
    ({"instructions": ["a"]}, "instructions", "instructions is ['a']; allowed is a text"),
]


@pytest.mark.parametrize(("body", "param", "begin"), REFUSED)
def test_what_is_not_honoured_is_refused_by_name(client: OpenAI, body: dict[str, Any], param: str, begin: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        client.responses.create(model=MODEL, input="Hi", extra_body=body)
    assert refused.value.body["message"].startswith(begin)  # type: ignore[index]
    assert refused.value.param == param


def test_what_changes_nothing_is_let_pass(client: OpenAI) -> None:
    neutral = {"store": False, "background": False, "truncation": "disabled", "include": [], "top_logprobs": 0, "prompt": None}
    unused = {"service_tier": "auto", "safety_identifier": "a", "prompt_cache_key": "a", "prompt_cache_retention": "24h"}
    beyond = {"top_k": 1, "seed": 3, "min_tokens": 2}
    asked = {"model": MODEL, "input": "Hi", "max_output_tokens": 3}
    effort: Any = {"reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}}
    answer = client.responses.create(**asked, **effort, extra_body={**neutral, **unused, **beyond})
    assert answer.output_text == client.responses.create(**asked, temperature=0).output_text
    assert (answer.service_tier, answer.reasoning.effort) == ("auto", "low")
    with pytest.raises(NotFoundError):
        client.responses.retrieve(answer.id)


def test_each_official_field_is_known_or_refused() -> None:
    """None is ignored: a value that no field has is refused, wherever it stands."""
    for name in {*get_type_hints(ResponseCreateParamsBase), "stream"} - {"metadata", "model"}:
        body = {"input": "Hi", name: {"no": "such value"}}
        with pytest.raises(Refused) as refused:
            read_response(json.dumps(body).encode(), Options(SamplingParams()), ModelNames(MODEL))
        assert name in refused.value.problem.message and refused.value.problem.status == 400
