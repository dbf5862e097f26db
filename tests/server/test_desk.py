"""Requests that are given up or have to wait, and what is left of a block that fails: no other request notices."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest
import uvicorn

from h2o_flexgen.engine.job import Request
from h2o_flexgen.jobs.openai_answers import Answers
from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.sampling.sampler import Sampler
from h2o_flexgen.server.desk import RequestListener
from h2o_flexgen.session.loaded_model import LoadedModel
from h2o_flexgen.text.prompts import read_prompts
from tests.helpers.patience import PATIENCE_SECONDS
from tests.server.served import GEN_LEN, MODEL, Served, served

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


class Asking(threading.Thread):
    """A client in a thread of its own, and what it heard."""

    def __init__(self, server: Served, **fields: Any) -> None:
        super().__init__()
        self.heard: Any = None
        self._server, self._fields = server, {**GREEDY, **fields}
        self.start()

    def run(self) -> None:
        try:
            with self._server.client() as client:
                self.heard = client.completions.create(**self._fields)
        except openai.APIError as error:
            self.heard = error

    @property
    def answer(self) -> Any:
        self.join(PATIENCE_SECONDS)
        assert not self.is_alive()
        return self.heard


def ended(server: Served) -> Any:
    return server.counts.totals()["completions"]


def test_a_client_that_goes_away_in_the_middle_frees_its_seats(llm: LLM) -> None:
    with served(llm) as server, server.client() as client:
        with server.held():
            stream = client.completions.create(**GREEDY, prompt="x", max_tokens=GEN_LEN, stream=True)
            next(iter(stream))
            assert server.desk.now.rows_seated == 1 and server.desk.now.kv_bytes > 0
            stream.close()
            server.until(lambda: ended(server) == {"abort": 1})
        server.until(lambda: server.desk.now.rows_seated == 0)
        assert server.counts.totals()["generated_tokens"] < GEN_LEN
        assert client.completions.create(**GREEDY, prompt="x", max_tokens=3).usage.completion_tokens == 3


def test_a_client_that_goes_away_before_its_turn_leaves_the_queue(llm: LLM) -> None:
    body = {"prompt": ["x"] * 6, "max_tokens": 2}
    with served(llm) as server:
        with server.held():
            first = Asking(server, prompt="x", max_tokens=GEN_LEN)
            assert server.counts.is_held.wait(PATIENCE_SECONDS)
            with socket_of(server, body) as waiting:
                server.until(lambda: server.desk.now.rows_waiting == 6)
                waiting.close()
                server.until(lambda: server.desk.now.rows_waiting == 0)
        assert first.answer.usage.completion_tokens == GEN_LEN
        assert ended(server) == {"abort": 6, "length": 1}


def socket_of(server: Served, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request was sent, whose answer was not read."""
    raw = socket.create_connection((server.place.host, server.place.port))
    content = json.dumps(body).encode()
    headers = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    raw.sendall(f"POST /v1/completions HTTP/1.1\r\n{headers}\r\n\r\n".encode() + content)
    return raw


def test_whoever_comes_while_the_queue_is_full_is_told_when_to_ask_again(llm: LLM) -> None:
    with served(llm, most_waiting=2) as server:
        with server.held():
            seated = Asking(server, prompt="x", n=4, temperature=1, max_tokens=2)
            assert server.counts.is_held.wait(PATIENCE_SECONDS)
            first = Asking(server, prompt="x", max_tokens=2)
            server.until(lambda: server.desk.now.rows_waiting == 1)
            with server.http() as http:
                answer = http.post("/v1/completions", json={"prompt": "x", "n": 2})
            second = Asking(server, prompt="x", max_tokens=2)
            server.until(lambda: server.desk.now.rows_waiting == 2)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "2"
        said = answer.json()["error"]
        assert (said["type"], said["code"]) == ("rate_limit_error", "queue_full")
        room = "1 completions wait for a seat, and 2 may: there is no room for 2 more"
        assert said["message"] == f"{room}; ask again in 2 s"
        assert all(one.answer.usage.completion_tokens == 2 for one in (first, second)) and len(seated.answer.choices) == 4


def test_rows_in_the_background_take_no_room_from_others(llm: LLM) -> None:
    with served(llm, most_waiting=1) as server:
        with server.held():
            behind = [server.desk.prepare(asked_alone(llm), unheard()) for _ in range(6)]
            server.desk.admit(behind, in_background=True)
            assert server.counts.is_held.wait(PATIENCE_SECONDS)
            assert server.desk.now.rows_seated == 4
            others = Asking(server, prompt="x", n=4, temperature=1, max_tokens=2)
            server.until(lambda: server.desk.now.rows_waiting == 4)
        assert len(others.answer.choices) == 4


def asked_alone(llm: LLM) -> Request:
    (prompt,) = read_prompts(["x"], llm.tokenizer)
    return Request(prompt, SamplingParams(max_tokens=4))


def unheard() -> RequestListener:
    return RequestListener(None, lambda completion: None, lambda problem, error: None)


def test_a_body_for_which_there_can_be_no_room_is_refused_for_ever(llm: LLM) -> None:
    with served(llm, most_waiting=1) as server, server.http() as http:
        answer = http.post("/v1/completions", json={"prompt": ["x"] * 3, "n": 2})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "too_many_completions"
        said = "6 completions are asked for at once, and there are 4 seats, and 1 may wait; ask in parts"
        assert answer.json()["error"]["message"] == said and server.desk.now.rows_waiting == 0
        assert http.post("/v1/completions", json={"prompt": ["x"] * 5, "max_tokens": 1}).status_code == 200


def test_after_it_is_closed_only_admitted_requests_are_served(llm: LLM) -> None:
    with served(llm) as server:
        with server.held():
            seated = Asking(server, prompt="x", max_tokens=5)
            assert server.counts.is_held.wait(PATIENCE_SECONDS)
            waiting = Asking(server, prompt=["x"] * 5, max_tokens=2)
            server.until(lambda: server.desk.now.rows_waiting == 5)
            server.desk.close()
            with server.http() as http:
                assert http.get("/health").status_code == 503
                refused = http.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "ending"
        assert seated.answer.usage.completion_tokens == 5 and len(waiting.answer.choices) == 5


def test_a_request_that_is_handed_back_is_told_so(llm: LLM) -> None:
    with served(llm) as server:
        with server.held():
            first = Asking(server, prompt="x", max_tokens=GEN_LEN)
            assert server.counts.is_held.wait(PATIENCE_SECONDS)
            waiting = Asking(server, prompt=["x"] * 5, max_tokens=2)
            server.until(lambda: server.desk.now.rows_waiting == 5)
            server.counts.ends_at_once = True
        for one in (first, waiting):
            assert isinstance(one.answer, openai.InternalServerError) and one.answer.status_code == 503
            assert one.answer.code == "ending"
        assert ended(server) == {"error": 6}


def breaking(
    monkeypatch: pytest.MonkeyPatch, is_broken: Callable[[Any, Any], bool], break_: Callable[[Any, int], None]
) -> None:
    sample = Sampler.sample

    def broken(self: Sampler, logits: Any, params: Any, rows: Any, steps: Any, *others: Any, **more: Any) -> Any:
        for place in range(len(rows)):
            if is_broken(params[place], steps[place]):
                break_(logits, place)
        return sample(self, logits, params, rows, steps, *others, **more)

    monkeypatch.setattr(Sampler, "sample", broken)


def test_a_block_that_fails_is_told_to_its_clients_and_the_next_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(logits: Any, place: int) -> None:
        raise OSError(5, "Input/output error")

    with served(llm) as server, server.client() as client:
        with monkeypatch.context() as broken:
            breaking(broken, lambda params, step: step == 2, fail)
            with pytest.raises(openai.InternalServerError, match="Input/output error") as caught:
                client.completions.create(**GREEDY, prompt="x", max_tokens=4)
            assert caught.value.code == "computation_failed" and caught.value.type == "server_error"
            stream = client.completions.create(**GREEDY, prompt="x", max_tokens=4, stream=True)
            with pytest.raises(openai.APIError, match="Input/output error"):
                assert len(list(stream)) < 4
        assert client.completions.create(**GREEDY, prompt="x", max_tokens=4).usage.completion_tokens == 4
        assert len(server.told) == 2 and ended(server) == {"error": 2, "length": 1}


def test_a_block_that_fails_leaves_requests_without_a_seat_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(logits: Any, place: int) -> None:
        raise OSError(5, "Input/output error")

    breaking(monkeypatch, lambda params, step: params.top_k == 17 and step == 2, fail)
    with served(llm) as server:
        with server.held():
            lost = Asking(server, prompt="x", n=4, temperature=1, max_tokens=4, extra_body={"top_k": 17})
            assert server.counts.is_held.wait(PATIENCE_SECONDS)
            waiting = Asking(server, prompt=["x"] * 3, max_tokens=4)
            server.until(lambda: server.desk.now.rows_waiting == 3)
        assert isinstance(lost.answer, openai.InternalServerError) and "Input/output error" in str(lost.answer)
        assert len(waiting.answer.choices) == 3 and ended(server) == {"error": 4, "length": 3} and len(server.told) == 1


def test_a_block_that_cannot_even_begin_is_told_to_all_that_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **given: Any) -> Any:
        raise OSError(28, "No space left on device")

    with served(llm) as server, server.client() as client:
        with monkeypatch.context() as broken:
            broken.setattr(LoadedModel, "ready", fail)
            for _ in range(2):  # more than there are seats; and the server goes on
                with pytest.raises(openai.InternalServerError, match="No space left"):
                    client.completions.create(model=MODEL, prompt="x", n=6, max_tokens=4)
        assert client.completions.create(**GREEDY, prompt="x", max_tokens=4).usage.completion_tokens == 4
        assert len(server.told) == 2


def test_a_request_that_breaks_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(logits: Any, place: int) -> None:
        logits[place] = float("nan")

    texts = ["The ferry", "A boat", "It rains"]
    alone = llm.generate(texts, SamplingParams(max_tokens=12))
    breaking(monkeypatch, lambda params, step: params.top_k == 17 and step == 3, overflow)
    with served(llm) as server:
        with server.held():
            others = [Asking(server, prompt=text, max_tokens=12, seed=1) for text in texts]
            assert server.counts.is_held.wait(PATIENCE_SECONDS)
            broken = Asking(server, prompt="x", max_tokens=9, seed=1, extra_body={"top_k": 17})
            server.until(lambda: server.desk.now.rows_waiting + server.desk.now.rows_seated == 4)
        assert isinstance(broken.answer, openai.InternalServerError) and broken.answer.code == "request_failed"
        assert "logits of the prompt at step 3 have the maximum nan" in str(broken.answer)
        assert [one.answer.choices[0].text for one in others] == [one.text for one in alone]
        assert ended(server) == {"error": 1, "length": 3}


def test_a_bug_in_an_answer_is_told_in_openais_form(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "body", lambda *_: 1 / 0)
    with served(llm) as server, server.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "the server has failed: ZeroDivisionError"
        assert server.counts.totals()["answers"] == {"500": 1}


def test_where_answering_ends_by_itself_the_desk_does_too(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(self: uvicorn.Server) -> None:
        raise RuntimeError("the loop is lost")

    monkeypatch.setattr(uvicorn.Server, "main_loop", lost)
    with pytest.raises(RuntimeError, match="the loop is lost"), served(llm) as server:
        server.until(lambda: server.desk.is_closed)
