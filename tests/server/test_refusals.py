"""What is refused: in OpenAI's form, with what is wrong, the value, and what to do."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest

from h2o_flexgen.llm import LLM
from h2o_flexgen.server.app import Hosts
from h2o_flexgen.server.listening import Limits
from tests.helpers.patience import PATIENCE_SECONDS
from tests.helpers.tiny import VOCAB
from tests.server.served import MODEL, PROMPT_LEN, Served, served

KEY = "a-key-of-some-length"
BEYOND_ASCII = "schlüssel-à"  # the last byte is a space in latin-1


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Served]:
    with served(llm) as server:
        yield server


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http


def error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"} and set(answer.json()["error"]) == {"message", "type", "param", "code"}
    found: dict[str, Any] = answer.json()["error"]
    assert "\n" not in found["message"]
    return found


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"temperature": "hot"}, "temperature", "temperature is 'hot'; allowed is a number from 0 to 100; 0 is greedy"),
        ({"temprature": 1}, "temprature", "unknown field 'temprature'; did you mean temperature?"),
        ({"prompt": None}, "prompt", 'prompt is missing; a request has a "prompt"'),
        ({"prompt": [[1], []]}, "prompt", "prompt is empty; it needs at least one token"),
        ({"prompt": [VOCAB]}, None, f"the prompt has the token id {VOCAB}"),
        ({"messages": []}, "messages", "messages stands beside prompt"),
        ({"n": 200}, "n", "n is 200; allowed is 128 at most"),
        ({"prompt": ["x"] * 30, "n": 100}, "prompt", "prompt asks for 3000 completions at once; allowed are 2048"),
        ({"logprobs": 50}, "logprobs", "logprobs is 50; allowed is 20 at most"),
        ({"stream": "yes"}, "stream", "stream is 'yes'; allowed is true or false"),
        ({"stream_options": {}}, "stream_options", "stream_options is for a streamed answer"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "unknown field of stream_options 'usage'"),
        ({"suffix": "x"}, "suffix", "suffix is 'x'; texts are only continued at their end"),
        ({"best_of": 3}, "best_of", "best_of is 3; make n completions"),
        ({"stop": ""}, "stop", "stop is ''; allowed is a text that is not empty"),
        ({"stop": ["a", ""]}, "stop", "stop is ['a', '']; allowed is a text that is not empty"),
        ({"user": 5}, "user", "user is 5; allowed is a text"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "parallel_tool_calls is 'no'; allowed is true or false"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": 1}},
            "stream_options",
            "stream_options.include_obfuscation is 1",
        ),
    ],
)
def test_a_wrong_field_is_named(http: httpx.Client, fields: dict[str, Any], param: str | None, said: str) -> None:
    found = error(http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **fields}), 400)
    assert found["message"].startswith(said) and (found["type"], found["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages", "message 0 of messages has the role 'wizard'"),
        ({"messages": [{"role": "user", "contnt": "x"}]}, "messages", "unknown field of message 0 of messages (role user)"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21; allowed is 20 at most"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "top_logprobs is -1; allowed is a whole number from 0 to"),
        ({"logprobs": 2}, "logprobs", "logprobs is 2; allowed is true or false"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens is -1; allowed is a whole number"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0, which is for prompts"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named_as_it_was_given(
    http: httpx.Client, fields: dict[str, Any], param: str, said: str
) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    found = error(http.post("/v1/chat/completions", json={**chat, **fields}), 400)
    assert found["message"].startswith(said) and found["param"] == param


def test_what_changes_no_answer_is_let_pass(http: httpx.Client) -> None:
    ignored = {"user": "me", "store": False, "metadata": {"a": "b"}, "parallel_tool_calls": True, "reasoning_effort": "low"}
    ignored |= {"service_tier": "auto", "safety_identifier": "a", "prompt_cache_key": "b", "prompt_cache_retention": "24h"}
    ignored |= {"verbosity": "medium"}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tools": [], "response_format": {"type": "text"}}
    answers = [http.post("/v1/chat/completions", json={**more, **chat, "temperature": 0}) for more in (ignored, {})]
    assert [one.status_code for one in answers] == [200, 200]
    assert answers[0].json()["metadata"] == {"a": "b"} and answers[0].json()["choices"] == answers[1].json()["choices"]


def test_a_context_too_long_is_refused_with_the_numbers(http: httpx.Client, server: Served) -> None:
    long = [5] * (PROMPT_LEN + 1)
    found = error(http.post("/v1/completions", json={"prompt": long}), 400)
    assert found["code"] == "context_length_exceeded"
    assert found["message"] == f"the prompt has {PROMPT_LEN + 1} tokens, and no more than {PROMPT_LEN} are taken"
    found = error(http.post("/v1/completions", json={"prompt": "x", "max_tokens": 49}), 400)
    assert found["message"] == "max_tokens is 49; a seat has room for 48 at most"
    for name in ("max_tokens", "max_completion_tokens"):
        found = error(http.post("/v1/completions", json={"prompt": "x", name: 49}), 400)
        assert (found["param"], found["code"]) == (name, "context_length_exceeded")
        assert found["message"].startswith(f"{name} is 49; a seat has room for 48 at most")
    error(http.post("/v1/completions", json={"prompt": [[5], long]}), 400)
    assert server.desk.now.waiting == server.desk.now.running == 0, "all prompts of a body, or none"


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (b"{", "invalid_json", "the body cannot be read: it is not JSON"),
        (b'{"prompt": "\xff"}', "invalid_json", "the body cannot be read: it is not UTF-8 text (byte 12)"),
        (b'{"prompt": "\\ud800"}', "invalid_json", "the body cannot be read: it is not JSON: a text contains an unpaired"),
        (b"[" * 100_000, "invalid_json", "the body cannot be read: it is not JSON: brackets are nested too deeply"),
        (b'{"n": 1, "n": 2}', "invalid_json", "the body cannot be read: it is not JSON: 'n' stands there twice"),
        (b"[1]", None, "the body is [1]; it is an object with the fields of a request"),
        (b"", "invalid_json", "the body cannot be read"),
    ],
)
def test_what_is_no_request_is_told_so(http: httpx.Client, body: bytes, code: str | None, said: str) -> None:
    found = error(http.post("/v1/completions", content=body, headers={"content-type": "application/json; charset=utf-8"}), 400)
    assert found["message"].startswith(said) and found["code"] == code


def test_a_page_of_a_browser_cannot_ask_without_being_allowed(http: httpx.Client) -> None:
    found = error(http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"}), 415)
    assert found["message"] == "the content type is 'text/plain'; send application/json"


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "a.localhost:1", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000", "[::ffff:127.0.0.1]"]
)
def test_requests_to_this_machine_are_answered(http: httpx.Client, host: str) -> None:
    assert http.get("/health", headers={"host": host}).status_code == 200


NO_NAMES = ["a@localhost", "localhost/evil", "localhost?x", "localhost#x", "local host", "localhost:x", "[::1]x"]


@pytest.mark.parametrize(
    "host", ["evil.example:80", "localhost.evil.example", "10.0.0.1", "0.0.0.0", "[::2]", "[::1", "", *NO_NAMES]
)
def test_requests_to_another_name_that_leads_here_are_not(http: httpx.Client, host: str) -> None:
    for path in ("/health", "/metrics", "/v1/models"):
        found = error(http.get(path, headers={"host": host}), 421)
        assert found["code"] == "unknown_host" and f"which is not called {host!r}; ask localhost" in found["message"]


def test_which_names_are_known_depends_on_where_it_listens() -> None:
    assert Hosts("Here.lan").admit("here.lan:8000") and Hosts("here.lan").admit("localhost.")
    assert not Hosts("here.lan").admit("there.lan") and not Hosts("127.0.0.1").admit(None)
    assert Hosts().admit("whatever.it.is.called") and Hosts().admit(None)


def test_a_page_of_another_site_is_not_allowed_to_ask_or_to_read(http: httpx.Client) -> None:
    wish = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    before = http.options("/v1/completions", headers={**wish, "access-control-request-headers": "content-type"})
    for answer in (before, http.get("/metrics", headers=wish), http.get("/v1/models", headers=wish)):
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert error(before, 405)


def test_other_models_paths_and_methods_are_refused(http: httpx.Client, server: Served) -> None:
    found = error(http.post("/v1/completions", json={"model": "tinny", "prompt": "x"}), 404)
    assert (found["code"], found["param"]) == ("model_not_found", "model")
    assert found["message"] == "the model 'tinny' is not here; ask for 'tiny'; did you mean tiny?"
    assert error(http.get("/v1/models/a/b"), 404)["code"] == "model_not_found"
    assert error(http.get("/v1/images"), 404)["message"] == "GET '/v1/images' is nothing that this server knows"
    for path, meant in (
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/score", "/v1/score"),
        ("/v1/health", "/health"),
    ):
        told = error(http.post(path, json={}), 404)["message"]
        assert told == f"POST '{path}' is nothing that this server knows; did you mean {meant}?"
    answer = http.get("/v1/completions")
    assert error(answer, 405)["code"] == "method_not_supported" and "POST" in answer.headers["allow"]
    with server.client() as client, pytest.raises(openai.NotFoundError, match="the model 'other' is not here"):
        client.completions.create(model="other", prompt="x")


def test_a_client_without_a_key_is_told_so(llm: LLM) -> None:
    with served(llm, keys=("another-key", KEY, BEYOND_ASCII)) as server:
        for wrong in ("wrong", KEY[:-1], KEY + "x"):
            with server.client(wrong) as client, pytest.raises(openai.AuthenticationError):
                client.models.list()
        with server.http() as http:
            assert error(http.get("/v1/models"), 401)["code"] == "invalid_api_key"
            found = error(http.get("/v1/models", headers={"authorization": f"Basic {KEY}"}), 401)
            assert found["message"].startswith("no such API key") and KEY not in found["message"]
            assert error(http.get("/v1/nothing"), 401), "it does not say what there is"
            assert http.get("/health").status_code == 200
            for given, status in ((BEYOND_ASCII, 200), (BEYOND_ASCII[:-1], 401)):
                assert http.get("/v1/models", headers={"authorization": f"Bearer {given}".encode()}).status_code == status
        with server.client(KEY) as client:
            assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).choices


# -- what takes too much -----------------------------------------------------------------------------------------------


def test_a_body_of_a_hundred_megabytes_is_refused_and_never_held(llm: LLM) -> None:
    piece = b" " * (1 << 20)
    with served(llm, limits=Limits(body_bytes=1000)) as server, server.http() as http:
        answer = http.post("/v1/completions", content=(piece for _ in range(100)), headers={"content-type": "application/json"})
        found = error(answer, 413)
        assert found["message"] == "the body has more than 1.00 kB, which is the limit here; ask in parts"
        asks_first = {"content-type": "application/json", "expect": "100-continue", "content-length": "100000000"}
        with socket.create_connection((server.place.host, server.place.port)) as raw:
            raw.sendall(head("POST /v1/completions", asks_first))
            assert raw.recv(1000).startswith(b"HTTP/1.1 413"), "and it need not be sent"
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def head(line: str, headers: dict[str, str]) -> bytes:
    named = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{line} HTTP/1.1\r\nhost: localhost\r\n{named}\r\n".encode()


def test_slow_clients_are_not_waited_for(llm: LLM) -> None:
    with served(llm, limits=Limits(head_seconds=0.05)) as server:
        where = (server.place.host, server.place.port)
        for begun in (b"", b"POST /v1/completions HTTP/1.1\r\nhost"):
            with socket.create_connection(where) as raw:
                raw.sendall(begun)
                assert closed(raw)
        raw = socket.create_connection(where)  # a connection that was used once; a busy machine may need several to be in time
        while not is_answered(raw):
            raw.close()
            raw = socket.create_connection(where)
        with raw, suppress(ConnectionError):
            raw.sendall(b"GET /hea")
            assert closed(raw)
    with served(llm, limits=Limits(body_seconds=0.05)) as server, server.connected() as raw:
        raw.sendall(head("POST /v1/completions", {"content-type": "application/json", "content-length": "9"}) + b"{")
        told = b"".join(iter(lambda: raw.recv(1000), b""))
        assert told.startswith(b"HTTP/1.1 408") and b"the body did not come to its end in 0.05 s" in told


def is_answered(raw: socket.socket) -> bool:
    told = b""
    with suppress(ConnectionError):
        raw.sendall(head("GET /health", {}))
        while not told.endswith(b'{"status":"ok"}'):
            told += (piece := raw.recv(1000))
            if not piece:
                return False
    return told.startswith(b"HTTP/1.1 200")


def closed(raw: socket.socket) -> bool:
    """Whether the other side ends the connection without a word."""
    try:
        return raw.recv(1000) == b""
    except ConnectionResetError:
        return True


def test_a_client_that_never_reads_is_not_waited_for(llm: LLM) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 40, "stream": True, "logprobs": 20}).encode()
    asking = head("POST /v1/completions", {"content-type": "application/json", "content-length": str(len(body))}) + body
    limits = Limits(connections=1, unread_seconds=0.2, idle_seconds=10 * PATIENCE_SECONDS)
    with served(llm, limits=limits) as server, socket.socket() as unread:
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # as little as may be
        unread.connect((server.place.host, server.place.port))
        unread.sendall(asking)

        def is_another_let_in() -> bool:
            with server.connected() as other:
                return is_answered(other)

        server.until(lambda: server.counts.totals()["completions"] == {"length": 1})
        server.until(is_another_let_in)


def test_connections_are_bounded_in_number(llm: LLM) -> None:
    with served(llm, limits=Limits(connections=2)) as server:
        where = (server.place.host, server.place.port)
        first, second = (socket.create_connection(where) for _ in range(2))
        for raw in (first, second):
            assert is_answered(raw)
        with socket.create_connection(where) as third:
            assert closed(third)
        first.close()
        assert is_answered(second)
        second.close()


PROMPT = b'{"prompt": "x", "max_tokens": 1}'
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(PROMPT), PROMPT)
BEHIND = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def answers_of_connection(server: Served, sent: bytes) -> list[bytes]:
    """All answers up to the end of the connection."""
    told = b""
    with server.connected() as raw:
        raw.settimeout(PATIENCE_SECONDS)
        raw.sendall(sent)
        with suppress(ConnectionError):  # not all that was sent is read
            told = b"".join(iter(lambda: raw.recv(4000), b""))
    return told.split(b"HTTP/1.1 ")[1:]


@pytest.mark.parametrize(
    ("version", "lengths", "body"),
    [
        ("1.1", {"content-length": "5", "transfer-encoding": "chunked"}, CHUNKED),
        ("1.1", {"transfer-encoding": "Chunked", "Content-Length": str(len(CHUNKED))}, CHUNKED),
        ("1.0", {"transfer-encoding": "chunked", "connection": "keep-alive"}, CHUNKED),
        ("1.1", {"content-length": "5", "Content-Length": "6"}, PROMPT),
        ("1.1", {"content-length": f"{len(PROMPT)}, 5"}, PROMPT),
        ("1.1", {"content-length": f"+{len(PROMPT)}"}, PROMPT),
        ("1.1", {"transfer-encoding": "chunked, identity"}, CHUNKED),
        ("1.1", {"transfer-encoding": "gzip, chunked"}, CHUNKED),
        ("1.1", {"transfer-encoding": ""}, PROMPT),
        ("1.1", {"transfer-encoding": "chunked"}, b"0x" + CHUNKED),
        ("1.1", {"transfer-encoding": "chunked"}, CHUNKED.replace(b"\r\n", b"\n", 1)),
        ("1.1", {"transfer-encoding": "chunked"}, CHUNKED.replace(b"\r\n0", b"xx0")),
    ],
    ids=repr,
)
def test_where_the_end_of_a_body_is_unclear_nothing_behind_it_is_answered(
    server: Served, version: str, lengths: dict[str, str], body: bytes
) -> None:
    asking = head("POST /v1/completions", {"content-type": "application/json", **lengths}).replace(b"1.1", version.encode(), 1)
    told = answers_of_connection(server, asking + body + BEHIND)
    assert len(told) == 1 and told[0].startswith(b"400 ") and b"connection: close" in told[0].lower()


def test_a_request_with_two_lengths_is_told_what_to_send(server: Served) -> None:
    lengths = {"content-length": "0", "transfer-encoding": "chunked"}
    [told] = answers_of_connection(server, head("GET /health", lengths) + b"0\r\n\r\n" + BEHIND)
    assert b'"code":"unclear_body_length"' in told and b"send Content-Length alone" in told


NEGATIVE = b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n"


@pytest.mark.parametrize("noise", [b"\0" * 300, b"GET\r\n\r\n", b"x" * (1 << 17), NEGATIVE])
def test_what_is_no_http_ends_the_connection(server: Served, noise: bytes) -> None:
    told = b""
    with socket.create_connection((server.place.host, server.place.port)) as raw:
        with suppress(ConnectionError):  # it may end before all was sent, or read
            raw.sendall(noise)
            told = raw.recv(1000)
        assert told == b"" or told.startswith(b"HTTP/1.1 400")
    with server.http() as http:
        assert http.get("/health").status_code == 200
