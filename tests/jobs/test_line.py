"""Lines: their three forms, what is wrong with bad ones, and that no bytes make the reader stumble."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as draw

from h2o_flexgen.jobs.line import BadLine, Line, LineReader
from h2o_flexgen.jobs.line_fields import Options
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.dialogue import Script
from tests.jobs.made import BYTES, DEFAULTS

JSON, TEXT = LineReader(True, DEFAULTS), LineReader(False, DEFAULTS)


def read(given: Any) -> Line:
    return JSON.read(given if isinstance(given, bytes) else json.dumps(given).encode())


def batch(url: str = "/v1/completions", custom_id: Any = "a", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def test_the_three_forms() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    line = read(batch(prompt="Hello", max_tokens=5, model="m"))
    assert line == Line("a", "Hello", False, Options(SamplingParams(max_tokens=5)))
    assert read(batch("/v1/chat/completions", messages=messages)) == Line("a", messages, True, DEFAULTS)
    assert read({"prompt": "Hello", "seed": 1}) == Line(None, "Hello", False, Options(SamplingParams(seed=1)))
    assert read({"messages": messages, "custom_id": "b"}) == Line("b", messages, True, DEFAULTS)
    assert TEXT.read(b" {Hello ") == Line(None, " {Hello ", False, DEFAULTS)


def test_a_prompt_may_be_token_ids_or_the_only_one_of_a_list() -> None:
    assert read({"prompt": [1, 2]}).prompt == read({"prompt": [[1, 2]]}).prompt == (1, 2)
    assert read({"prompt": ["Hello"]}).prompt == "Hello"


def test_prompts_are_read_by_the_tokenizer_and_chats_by_their_style() -> None:
    text = read({"prompt": "Hi"}).read_with(BYTES, Script(BYTES))[0]
    assert (text.text, list(text.ids)) == ("Hi", BYTES.encode("Hi"))
    ids = read({"prompt": [7, 8]}).read_with(BYTES, Script(BYTES))[0]
    assert (ids.text, ids.ids) == (None, (7, 8))
    chat = read({"messages": [{"role": "user", "content": "Hi"}]}).read_with(BYTES, Script(BYTES))[0]
    assert chat.text == "User: Hi\nAssistant:"


@pytest.mark.parametrize(
    ("line", "said", "custom_id"),
    [
        (b"{", "it is not JSON", None),
        (b'{"prompt": "\xff"}', "it is not UTF-8 text (byte 12)", None),
        (b'{"custom_id": "a", "prompt": "\\ud800"}', "a text contains an unpaired surrogate", None),
        (b'{"a": 1, "a": 2}', "'a' stands there twice", None),
        (b"[" * 100_000, "brackets are nested too deeply", None),
        ([1, 2], "it is [1, 2]; a line is", None),
        ({"custom_id": "a"}, "prompt is missing; a request has", "a"),
        ({"custom_id": 3, "prompt": "x"}, "custom_id is 3; allowed is a text of 1 to 512 characters", None),
        ({"custom_id": "", "prompt": "x"}, "custom_id is ''", None),
        ({"custom_id": "refused-line-1", "prompt": "x"}, "give another one", None),
        (batch(custom_id=None, prompt="x"), "custom_id is missing", None),
        (batch("/v1/images", input="x"), "url is '/v1/images'; known are", "a"),
        ({**batch(prompt="x"), "method": "GET"}, "method is 'GET'; only \"POST\" is known", "a"),
        ({**batch(), "body": "x"}, "body is 'x'; it is the request, an object", "a"),
        ({**batch(prompt="x"), "prompt": "y"}, "unknown field 'prompt'", "a"),
        (batch(messages=[]), "messages is for the other url", "a"),
        (batch(prompt="x", wibble=1), "unknown field 'wibble'", "a"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt stands beside messages", None),
        ({"promt": "x"}, "unknown field 'promt'; did you mean prompt?", None),
        ({"mesages": []}, "unknown field 'mesages'; did you mean messages?", None),
        (batch(promtp="x"), "unknown field 'promtp'; did you mean prompt?", "a"),
        ({"prompt": " "}, "prompt is empty; it needs at least one token", None),
        ({"prompt": []}, "prompt is empty; it needs at least one token", None),
        ({"prompt": ["a", "b"]}, "prompt is a list of 2 prompts; write a line for each", None),
        ({"prompt": [1, "b"]}, "prompt has the token id 'b'; token ids are whole numbers", None),
        ({"prompt": 3}, "prompt is 3", None),
        ({"messages": "x"}, "messages is 'x'; a chat is a list", None),
        ({"messages": []}, "messages is empty", None),
        ({"messages": [{"role": "user"}]}, "message 0 of messages is {'role': 'user'}", None),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "message 0 of messages has the role 'wizard'; allowed are", None),
    ],
)
def test_what_is_wrong_is_said_with_the_id_that_could_be_read(line: Any, said: str, custom_id: str | None) -> None:
    with pytest.raises(BadLine) as caught:
        read(line)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.custom_id == custom_id


VALUES = draw.recursive(
    draw.none() | draw.booleans() | draw.integers() | draw.floats() | draw.text(max_size=5),
    lambda inner: draw.lists(inner, max_size=3) | draw.dictionaries(draw.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
ENVELOPES = ("custom_id", "method", "url", "body")
BODIES = ("prompt", "messages", "role", "content", "model", "stream", "tools", "echo", "n", "max_tokens", "stop", "logit_bias")
NUMBERS = ("seed", "logprobs", "top_logprobs", "temperature", "top_p", "top_k", "min_p")
NAMES = draw.sampled_from((*ENVELOPES, *BODIES, *NUMBERS))
OBJECTS = draw.recursive(draw.dictionaries(NAMES, VALUES), lambda inner: draw.dictionaries(NAMES, inner | VALUES), max_leaves=8)


def is_read_or_refused(reader: LineReader, data: bytes) -> None:
    try:
        line = reader.read(data)
    except BadLine as bad:
        assert str(bad) and "\n" not in str(bad)
    else:
        assert line.prompt


@given(draw.binary(max_size=200))
@example(b"\xef\xbb\xbf{}")
@example(b"1" * 5000)
@example(b'{"prompt": 1e999}')
@example(b"NaN")
def test_any_bytes_are_a_request_or_a_bad_line(data: bytes) -> None:
    is_read_or_refused(JSON, data)
    is_read_or_refused(TEXT, data)


@given(OBJECTS | VALUES)
def test_any_json_is_a_request_or_a_bad_line(document: Any) -> None:
    is_read_or_refused(JSON, json.dumps(document).encode())


@given(draw.dictionaries(NAMES, VALUES), draw.sampled_from(("/v1/completions", "/v1/chat/completions")))
def test_any_body_is_a_request_or_a_bad_line(body: dict[str, Any], url: str) -> None:
    known = {"prompt": "x"} if url == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    is_read_or_refused(JSON, json.dumps({**batch(url), "body": {**body, **known}}).encode())


def test_all_mistakes_of_a_line_are_said_at_once() -> None:
    with pytest.raises(BadLine) as plain:
        read({"custom_id": "a", "prompt": "", "temperature": -1, "wibble": 1})
    assert plain.value.custom_id == "a"
    assert str(plain.value) == (
        "unknown field 'wibble'; also temperature is -1; allowed is a number from 0 to 100; 0 is greedy; "
        "also prompt is empty; it needs at least one token"
    )
    with pytest.raises(BadLine) as enveloped:
        read({**batch(custom_id=5, prompt="a", n=0), "method": "GET", "wibble": 1})
    said = str(enveloped.value).split("; also ")
    assert [one.split(" ")[0] for one in said] == ["custom_id", "unknown", "method", "n"]
