"""Embeddings as OpenAI's client asks for them, alone and in batches: they are those of `LLM.embed`."""

from __future__ import annotations

import json
from array import array
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from h2o_flexgen.llm import LLM
from tests.server.served import MODEL, PROMPT_LEN, Served, served
from tests.server.test_batches import batch_of, ended

INPUTS = ["The ferry", "A boat", "It rains all day"]
URL = "/v1/embeddings"


@pytest.fixture(scope="module")
def server(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(llm, data=tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[float]]:
    with LLM(llm.name, dtype="float32", tokenizer="bytes", device="cpu") as other:
        return [list(one.embedding) for one in other.embed(INPUTS, pooling="mean")]


def near(found: list[float], wanted: list[float]) -> bool:
    return found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_the_client_gets_the_vectors_of_the_engine(encoding: Any, client: OpenAI, alone: list[list[float]]) -> None:
    given: Any = {"model": MODEL, "input": INPUTS, "user": "me", "extra_body": {"pooling": "mean"}, **encoding}
    answer = client.embeddings.create(**given)
    assert answer.model == MODEL and [one.index for one in answer.data] == [0, 1, 2]
    tokens = sum(map(len, INPUTS))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    assert not hasattr(answer.usage, "completion_tokens")
    for one, wanted in zip(answer.data, alone, strict=True):
        vector: Any = one.embedding  # a text where the client was told to ask for one
        assert isinstance(vector, str) == (encoding.get("encoding_format") == "base64")
        assert near(list(array("f", b64decode(vector))) if isinstance(vector, str) else vector, wanted)


def test_an_input_is_a_text_or_token_ids_or_a_list_of_such(client: OpenAI, llm: LLM) -> None:
    ids = llm.tokenizer.encode(INPUTS[0])
    each: list[Any] = [INPUTS[0], ids, [INPUTS[0]], [ids, ids]]
    found = [client.embeddings.create(model=MODEL, input=one).data for one in each]
    assert [len(data) for data in found] == [1, 1, 1, 2]
    assert all(near(one.embedding, found[0][0].embedding) for data in found for one in data)


def test_a_prompt_that_is_cut_says_so(client: OpenAI) -> None:
    long = "x" * (PROMPT_LEN + 3)
    (cut,) = client.embeddings.create(model=MODEL, input=long, extra_body={"truncate": True}).data
    (whole,) = client.embeddings.create(model=MODEL, input="xx", extra_body={"truncate": 5}).data
    assert (cut.truncated_tokens, whole.truncated_tokens) == (3, 0)  # type: ignore[attr-defined]
    (short,) = client.embeddings.create(model=MODEL, input="x" * PROMPT_LEN).data
    assert near(cut.embedding, short.embedding) and not hasattr(short, "truncated_tokens")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"dimensions": 8}, "dimensions", "vectors are as wide as the model"),
        ({"encoding_format": "int8"}, "encoding_format", "known: float, base64"),
        ({"input": []}, "input", "it needs at least one token"),
        ({"input": ""}, "input", "it needs at least one token"),
        ({"input": None}, "input", "input is missing"),
        ({"pooling": "max"}, "pooling", "known: last, mean, cls"),
        ({"normalize": 1}, "normalize", "normalize is 1"),
        ({"truncate": -1}, "truncate", "truncate is -1"),
        ({"user": 5}, "user", "user is 5"),
        ({"temperature": 0}, "temperature", "unknown field 'temperature'"),
        ({"input": "x" * (PROMPT_LEN + 1)}, None, f"no more than {PROMPT_LEN} are taken"),
        ({"input": [[1]] * 2049}, "input", "allowed are 2048"),
    ],
)
def test_what_is_not_taken_is_refused_in_one_line(fields: Any, param: str | None, words: str, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model=MODEL, input="Hi", extra_body=fields)  # type: ignore[call-overload]
    error: Any = refused.value.body
    assert words in error["message"] and "\n" not in error["message"]
    assert error["param"] == param


def test_another_model_is_not_here(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="the model 'other' is not here"):
        client.embeddings.create(model="other", input="Hi")


def test_a_batch_answers_as_the_server_does(server: Served, client: OpenAI, alone: list[list[float]]) -> None:
    bodies: list[dict[str, Any]] = [{"input": one, "pooling": "mean"} for one in INPUTS]
    batch = ended(server, client, batch_of(client, [*bodies, {"input": "x" * 99, "truncate": 4}], URL))
    assert batch.status == "completed", batch.errors
    told = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    found = {one["custom_id"]: one["response"]["body"] for one in told}
    for place, wanted in enumerate(alone):
        assert near(found[str(place)]["data"][0]["embedding"], wanted)
    assert found["3"]["data"][0]["truncated_tokens"] == 95 and found["3"]["object"] == "list"


def test_a_bad_line_of_a_batch_fails_it(server: Served, client: OpenAI) -> None:
    bodies = [{"input": "Hi", "model": "other"}, {"input": ["a", "b"]}, {"prompt": "a"}]
    batch = ended(server, client, batch_of(client, bodies, URL))
    assert batch.status == "failed"
    said = [one.message for one in batch.errors.data]
    assert ["is not here" in said[0], "write a line for each" in said[1], "unknown field 'prompt'" in said[2]] == [True] * 3
