"""Answers to OpenAI's own client: whatever is asked beside it, each request gets what the model says to it alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.params import SamplingParams
from tests.helpers.contract import Case, Checkpoints
from tests.helpers.tiny import VOCAB
from tests.server.served import GEN_LEN, MODEL, PROMPT_LEN, Served, served

IDS = {"return_token_ids": True}
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Served]:
    with served(llm) as server:
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    drawn = random.Random(seed)
    return [[drawn.randrange(4, VOCAB) for _ in range(drawn.randrange(2, PROMPT_LEN))] for _ in range(count)]


@pytest.mark.parametrize("kind", ["opt", "qwen3"])
@pytest.mark.parametrize("shares", [(100, 0, 100, 0, 100, 0), (0, 40, 0, 50, 0, 50)])
def test_many_clients_at_once_each_hear_what_the_resident_loop_says(
    kind: str, shares: tuple[int, ...], checkpoints: Checkpoints, offload: Path
) -> None:
    lengths = (5, 9, 2, 7, 4, 3)
    case = Case(kind, percent=shares, lengths=lengths, gpu_batch_size=3, num_gpu_batches=1)

    async def ask(server: Served) -> list[Any]:
        async with server.async_client() as client:
            each = (client.completions.create(**GREEDY, prompt=one, max_tokens=4, extra_body=IDS) for one in case.prompts)
            return await asyncio.gather(*each)

    with case.open(checkpoints, offload) as llm, served(llm) as server:
        answers = asyncio.run(ask(server))
    for place, answer in enumerate(answers):
        alone = [int(step[0].argmax()) for step in checkpoints.resident_logits(case, (place,))]
        assert answer.choices[0].token_ids == alone


def test_two_hundred_clients_at_once_streamed_and_whole(server: Served, llm: LLM) -> None:
    asked = prompts(200)

    async def one(client: Any, place: int) -> list[int]:
        given = {**GREEDY, "prompt": asked[place], "max_tokens": 3, "extra_body": IDS}
        if place % 2:
            answer = await client.completions.create(**given)
            return list(answer.choices[0].token_ids)
        chunks = [chunk async for chunk in await client.completions.create(**given, stream=True)]
        return [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", ())]

    async def all_at_once() -> list[list[int]]:
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, place) for place in range(len(asked))))

    found = asyncio.run(all_at_once())
    with LLM(llm.name, dtype="float32", tokenizer="bytes", device="cpu", gpu_batch_size=50) as other:
        alone = other.generate(asked, SamplingParams(max_tokens=3))
    assert found == [list(each.token_ids) for each in alone]
    assert server.desk.now.rows_seated == server.desk.now.rows_waiting == 0


def test_a_streamed_text_is_the_whole_one_in_pieces(client: OpenAI) -> None:
    given = {"model": MODEL, "prompt": "The ferry", "max_tokens": 20, "seed": 3, "n": 2, "logprobs": 2}
    whole = client.completions.create(**given)
    streamed = list(client.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    *chunks, last = streamed
    assert last.choices == [] and last.usage == whole.usage and all(chunk.usage is None for chunk in chunks)
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(one.text for one in own) == choice.text
        assert [one.finish_reason for one in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            pieces = [item for one in own if one.logprobs is not None for item in getattr(one.logprobs, name)]
            expected = getattr(choice.logprobs, name)
            assert len(pieces) == len(expected) == 20
            is_measured = name.endswith("logprobs")  # the last bits depend on what is computed beside a row
            assert all(one == (pytest.approx(other) if is_measured else other) for one, other in zip(pieces, expected)), name
    assert whole.choices[0].text != whole.choices[1].text


def test_several_greedy_completions_are_equal_as_openai_has_them(client: OpenAI) -> None:
    given: dict[str, Any] = {**GREEDY, "prompt": "The ferry", "max_tokens": 9, "n": 3}
    whole = [choice.text for choice in client.completions.create(**given).choices]
    pieces = ["", "", ""]
    for chunk in client.completions.create(**given, stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    alone = client.completions.create(**{**given, "n": 1, "stop": ["a", "b", "c", "d", "never"]}).choices[0].text
    assert len(whole) == 3 and set(whole) == set(pieces) and len(set(whole)) == 1
    assert whole[0].startswith(alone), "five stops are no more than four"


def test_a_chat_whole_and_streamed(client: OpenAI) -> None:
    given: dict[str, Any] = {**GREEDY, "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 6}
    whole = client.chat.completions.create(**given, logprobs=True, top_logprobs=1)
    (choice,) = whole.choices
    assert choice.message.role == "assistant" and len(choice.logprobs.content) == 6
    assert all(len(step.top_logprobs) == 1 for step in choice.logprobs.content)
    chunks = list(client.chat.completions.create(**given, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert whole.usage.completion_tokens == 6 and {chunk.id for chunk in chunks} == {chunks[0].id}


def test_a_developer_is_what_the_system_was(client: OpenAI) -> None:
    def answer(role: str) -> tuple[str | None, int]:
        messages: Any = [{"role": role, "content": "ab"}, {"role": "user", "content": "c", "name": "A"}]
        found = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=4)
        return found.choices[0].message.content, found.usage.prompt_tokens

    assert answer("developer") == answer("system") != answer("user")


def test_what_a_request_leaves_open_is_as_openai_has_it(client: OpenAI) -> None:
    assert client.completions.create(model=MODEL, prompt="a").usage.completion_tokens == 16
    chat = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}])
    assert chat.usage.completion_tokens == GEN_LEN
    drawn = {client.completions.create(model=MODEL, prompt="a").choices[0].text for _ in range(3)}
    assert len(drawn) == 3, "a temperature of 1 draws"


def test_a_seed_repeats_an_answer_whoever_came_before(client: OpenAI) -> None:
    given = {"model": MODEL, "prompt": ["a", "a"], "seed": 7}
    first, second = (client.completions.create(**given) for _ in range(2))
    assert [one.text for one in first.choices] == [one.text for one in second.choices]
    assert first.choices[0].text != first.choices[1].text, "two prompts of one body draw apart"
    assert first.id != second.id


def test_prompts_are_texts_or_token_ids_or_lists_of_them(client: OpenAI, llm: LLM) -> None:
    texts = ["The ferry", "A boat"]
    ids = [llm.tokenizer.encode(text) for text in texts]
    several = client.completions.create(**GREEDY, prompt=texts, max_tokens=5)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.usage.prompt_tokens == sum(map(len, ids))
    said = [choice.text for choice in several.choices]
    assert said == [one.text for one in client.completions.create(**GREEDY, prompt=ids, max_tokens=5).choices]
    assert said[:1] == [one.text for one in client.completions.create(**GREEDY, prompt=ids[0], max_tokens=5).choices]
    assert said[1:] == [one.text for one in client.completions.create(**GREEDY, prompt=texts[1], max_tokens=5).choices]


def test_prompts_are_scored_as_lm_eval_asks_for_it(client: OpenAI, llm: LLM) -> None:
    asked = prompts(3, seed=1)
    given = {**GREEDY, "prompt": asked, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
    answer = client.completions.create(**given)
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, logprobs=1)
    for choice, own in zip(answer.choices, llm.generate(asked, params)):
        wanted = [None if step is None else step.chosen.logprob for step in own.prompt_logprobs or ()]
        assert choice.logprobs.token_logprobs[0] is None and len(choice.logprobs.tokens) == len(wanted) + 1
        assert choice.logprobs.token_logprobs[1:-1] == pytest.approx(wanted[1:], abs=1e-4)
    (streamed,) = {chunk.choices[0].text for chunk in client.completions.create(**{**given, "prompt": asked[0]}, stream=True)}
    assert streamed == answer.choices[0].text, "an echo with log-probabilities comes whole"
    only = client.completions.create(**{**given, "max_tokens": 0})
    assert only.usage.completion_tokens == 0 and only.choices[1].finish_reason == "length"
    begun = [chunk.choices[0].text for chunk in client.completions.create(**GREEDY, prompt="Hi", echo=True, stream=True)]
    assert begun[0] == "Hi"


def test_stops_end_a_text_and_are_not_in_it(client: OpenAI) -> None:
    whole = client.completions.create(**GREEDY, prompt="The ferry", max_tokens=20).choices[0].text
    stop = whole[4:6]
    cut = client.completions.create(**GREEDY, prompt="The ferry", max_tokens=20, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")
    streamed = client.completions.create(**GREEDY, prompt="The ferry", max_tokens=20, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut.text


def test_all_sampling_fields_are_taken(client: OpenAI) -> None:
    beyond = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True, **IDS}
    beyond |= {"allowed_token_ids": [40, 41, 42], "no_repeat_ngram_size": 30}
    given = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "top_p": 0.9, "logit_bias": {"41": -100}}
    answer = client.completions.create(model=MODEL, prompt="a", max_tokens=9, user="me", **given, extra_body=beyond)
    assert set(answer.choices[0].token_ids) <= {40, 42} and len(answer.choices[0].token_ids) == 9


def test_the_model_and_the_state_are_told(llm: LLM) -> None:
    with served(llm) as server, server.http() as http, server.client() as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).owned_by == "h2o_flexgen"
        assert http.get("/health").json() == {"status": "ok"}
        before = metrics(http.get("/metrics").text)
        client.completions.create(**GREEDY, prompt=[5, 6, 7], max_tokens=4)
        server.until(lambda: server.counts.totals()["passes"] == 4)  # the last is counted when the answer is under way
        after = metrics(http.get("/metrics").text)
    gained = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    assert gained.pop('h2o_flexgen_lane_busy_seconds_total{lane="compute"}') > 0
    assert gained == {
        "h2o_flexgen_prompt_tokens_total": 3,
        "h2o_flexgen_generation_tokens_total": 4,
        "h2o_flexgen_passes_total": 4,
        'h2o_flexgen_answers_total{status="200"}': 2,
        'h2o_flexgen_completions_total{finish_reason="length"}': 1,
    }
    assert after["h2o_flexgen_seats"] == 4 and after["h2o_flexgen_kv_held_bytes"] == 0


def test_what_was_computed_for_others_is_told(llm: LLM) -> None:
    head = [random.Random(8).randrange(4, VOCAB) for _ in range(40)]
    with served(llm, room=(64, 8)) as server, server.http() as http, server.client() as client:
        usages = []
        for place, options in enumerate(({"n": 2, "temperature": 1}, {"temperature": 0}, {"temperature": 0})):
            given = {"model": MODEL, "prompt": [*head, place], "max_tokens": 2, **options}
            usages.append(client.completions.create(**given).usage)
        *_, last = client.completions.create(**given, stream=True, stream_options={"include_usage": True})
        server.until(lambda: server.counts.totals()["passes"] == 8)
        told = metrics(http.get("/metrics").text)
    assert [usage.prompt_tokens for usage in usages] == [41] * 3
    assert [usage.prompt_tokens_details.cached_tokens for usage in (*usages, last.usage)] == [0, 40, 40, 40]
    assert told["h2o_flexgen_shared_prompt_tokens_total"] == 4 * 40
    assert told["h2o_flexgen_prompt_tokens_total"] == 5 * 41 - 4 * 40


def metrics(text: str) -> dict[str, float]:
    """Every sample, read as Prometheus does; each has its help and its type before it."""
    found, described = dict[str, float](), set[str]()
    for line in text.splitlines():
        if line.startswith("# "):
            described.add(line.split()[2])
        else:
            name, value = line.rsplit(" ", 1)
            assert name.partition("{")[0] in described
            found[name] = float(value)
    return found
