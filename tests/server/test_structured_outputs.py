"""Answers to OpenAI's own client that are held to something: vLLM's own examples, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

from h2o_flexgen.llm import LLM
from tests.server.served import MODEL, Served, served

pytest.importorskip("llguidance", reason="needs the extra [grammar]")

DRAWN: dict[str, Any] = {"model": MODEL, "temperature": 0.8, "seed": 7}
SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""


class CarType(str, Enum):
    sedan = "sedan"
    suv = "SUV"
    truck = "Truck"
    coupe = "Coupe"


class CarDescription(BaseModel):
    brand: str
    model: str
    car_type: CarType


@pytest.fixture(scope="module")
def server(demo: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(demo, room=(128, 120), data=tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_one_of_several_texts(client: OpenAI) -> None:
    labels = {"structured_outputs": {"choice": ["positive", "negative"]}}
    given = {**DRAWN, "messages": said("Classify this sentiment: vLLM is wonderful!"), "n": 4, "extra_body": labels}
    answer = client.chat.completions.create(**given)
    assert {choice.message.content for choice in answer.choices} <= {"positive", "negative"}
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_a_regular_expression_with_a_stop(client: OpenAI) -> None:
    prompt = "Generate an email address for Alan Turing, who works in Enigma. End in .com and new line."
    body = {"structured_outputs": {"regex": r"\w{1,12}@\w{1,9}\.com\n"}}
    answer = client.completions.create(**DRAWN, prompt=prompt, stop=["\n"], extra_body=body, max_tokens=60)
    assert re.fullmatch(r"\w{1,12}@\w{1,9}\.com\n", answer.choices[0].text) and answer.choices[0].finish_reason == "stop"


def test_a_schema_of_a_class_as_openai_and_as_vllm_ask_for_it(client: OpenAI) -> None:
    schema = CarDescription.model_json_schema()
    for name in ("brand", "model"):
        schema["properties"][name]["maxLength"] = 8
    schema["additionalProperties"] = False
    asked = {"type": "json_schema", "json_schema": {"name": "car-description", "schema": schema}}
    messages = said("Generate a JSON with the brand, model and car_type of the most iconic car from the 90's")
    first = client.chat.completions.create(**DRAWN, messages=messages, response_format=asked)  # type: ignore[arg-type]
    CarDescription.model_validate_json(first.choices[0].message.content or "")
    other = client.chat.completions.create(**DRAWN, messages=messages, extra_body={"structured_outputs": {"json": schema}})
    assert other.choices[0].message.content == first.choices[0].message.content
    chunks = list(client.chat.completions.create(**DRAWN, messages=messages, response_format=asked, stream=True))  # type: ignore[call-overload]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == first.choices[0].message.content and chunks[-1].choices[0].finish_reason == "stop"


def test_a_class_as_the_client_parses_it(client: OpenAI) -> None:
    class Step(BaseModel):
        is_done: bool
        car: CarType | None

    answer = client.chat.completions.parse(**DRAWN, messages=said("Go on."), response_format=Step)
    assert answer.choices[0].finish_reason == "stop" and isinstance(answer.choices[0].message.parsed, Step)


def test_a_grammar(client: OpenAI) -> None:
    body = {"structured_outputs": {"grammar": SQL}}
    messages = said("Generate an SQL query to show the 'username' and 'email' from the 'users' table.")
    answer = client.chat.completions.create(**DRAWN, messages=messages, extra_body=body)
    assert re.fullmatch("SELECT col_[12]  from table_[12]  where col_[12] = [12] ", answer.choices[0].message.content or "")


def test_any_object(client: OpenAI) -> None:
    for most in (10, 100):
        answer = client.chat.completions.create(
            **DRAWN, messages=said("An object"), response_format={"type": "json_object"}, max_tokens=most
        )
        text, reason = answer.choices[0].message.content or "", answer.choices[0].finish_reason
        assert text.startswith("{") and (reason == "length" or isinstance(json.loads(text), dict))


@pytest.mark.parametrize(
    ("body", "param", "begin"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "response_format.type 'xml' is unknown; known: text"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "response_format.json_schema is null; write"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}},
            "response_format",
            "response_format cannot be held to: the JSON schema '{\"uniqueItems\": true}' has keywords that are not supported",
        ),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "structured_outputs cannot be held to: the regular"),
        (
            {"structured_outputs": {"grammar": "start: start"}},
            "structured_outputs",
            "structured_outputs cannot be held to: the",
        ),
        (
            {"structured_outputs": {"regx": "a"}},
            "structured_outputs",
            "unknown field of structured_outputs 'regx'; did you mean regex?",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "response_format",
            "response_format stands beside structured_outputs; give one of them",
        ),
        ({"guided_choice": ["a"]}, "guided_choice", "unknown field 'guided_choice': write structured_outputs="),
    ],
)
def test_what_no_text_can_be_held_to_is_refused(client: OpenAI, body: dict[str, Any], param: str | None, begin: str) -> None:
    for ask in (
        lambda: client.chat.completions.create(model=MODEL, messages=said("x"), extra_body=body),
        lambda: client.completions.create(model=MODEL, prompt="x", extra_body=body),
    ):
        with pytest.raises(BadRequestError) as refused:
            ask()
        assert refused.value.body["message"].startswith(begin) and refused.value.param == param  # type: ignore[index]


def test_lines_of_a_batch_are_held_to_it_each(server: Served, client: OpenAI, tmp_path: Path) -> None:
    bodies = [
        {"messages": said("x"), "structured_outputs": {"choice": ["red", "blue"]}},
        {
            "messages": said("x"),
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}},
        },
        {"messages": said("x"), "structured_outputs": {"regex": "(a"}},
        {"messages": said("x"), "max_tokens": 2},
    ]
    lines = [
        {"custom_id": f"line {number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    server.until(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed"))
    ended = client.batches.retrieve(batch.id)
    assert ended.status == "completed" and ended.output_file_id is not None and ended.error_file_id is not None
    found = {one["custom_id"]: one for one in map(json.loads, client.files.content(ended.output_file_id).text.splitlines())}
    texts = [found[f"line {number}"]["response"]["body"]["choices"][0]["message"]["content"] for number in (0, 1)]
    assert texts[0] in ("red", "blue") and texts[1] in ("1", "2") and len(found) == 3
    (error,) = map(json.loads, client.files.content(ended.error_file_id).text.splitlines())
    assert error["custom_id"] == "line 2" and "the regular expression '(a' is refused" in error["error"]["message"]
