"""Records: OpenAI's forms, log-probabilities as it has them, and that nothing in them is left to chance."""

from __future__ import annotations

import json
from typing import Any

from h2o_flexgen.jobs.line import LineReader
from h2o_flexgen.jobs.openai_answers import Answers, RecordMaker, as_line, is_refusal, refusal
from h2o_flexgen.sampling.completion import Completion, Output, StepLogprobs, TokenLogprob
from h2o_flexgen.text.dialogue import Script, Template
from h2o_flexgen.text.tokenizer import NoTokenizer
from tests.helpers.tool_templates import QWEN_THINKS, tool
from tests.jobs.made import BYTES, DEFAULTS

MAKER = RecordMaker(Answers("tiny", Script(BYTES)), 17)
IDS = tuple(BYTES.encode("Hi"))
A, B = BYTES.encode("ab")


def step(token: int, logprob: float, *top: tuple[int, float]) -> StepLogprobs:
    return StepLogprobs(TokenLogprob(token, logprob), tuple(TokenLogprob(*one) for one in top))


def completion(**changes: Any) -> Completion:
    given = {"index": 0, "prompt": "Hi", "prompt_token_ids": IDS, "text": "ab", "token_ids": (A, B), "logprobs": None}
    return Completion(**{**given, "finish_reason": "length", **changes})


def answer(fields: dict[str, Any], made: Completion, maker: RecordMaker = MAKER) -> dict[str, Any]:
    line = LineReader(True, DEFAULTS).read(json.dumps({"prompt": "Hi"} | fields).encode())
    return json.loads(as_line(maker.answer("mine", line, made)))


def test_a_completion() -> None:
    record = answer({}, completion())
    short = record["id"].removeprefix("batch_req_")
    assert record == {
        "id": f"batch_req_{short}",
        "custom_id": "mine",
        "response": {
            "status_code": 200,
            "request_id": f"req_{short}",
            "body": {
                "id": f"cmpl-{short}",
                "object": "text_completion",
                "created": 17,
                "model": "tiny",
                "choices": [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
                "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
            },
        },
        "error": None,
    }
    assert not is_refusal(record) and answer({}, completion()) == record


def test_thoughts_and_calls_of_a_chat() -> None:
    maker = RecordMaker(Answers("tiny", Template(BYTES, template=QWEN_THINKS)), 17)
    text = '<think>Hm.</think>So:\n<tool_call>\n{"name": "go", "arguments": {"a": 1}}\n</tool_call>'
    fields = {"prompt": None, "messages": [{"role": "user", "content": "Hi"}], "tools": [tool("go")]}
    record, again = (answer(fields, completion(text=text, finish_reason="stop"), maker) for _ in range(2))
    assert record == again, "no id is drawn"
    (choice,) = record["response"]["body"]["choices"]
    (call,) = choice["message"].pop("tool_calls")
    later = answer(fields, completion(text=text, finish_reason="stop", prompt_token_ids=(*IDS, A)), maker)
    (other,) = later["response"]["body"]["choices"][0]["message"]["tool_calls"]
    assert other["id"] != call["id"], "a talk that goes on in another job has an id once"
    assert choice["message"] == {"role": "assistant", "content": "So:", "reasoning_content": "Hm."}
    assert call.pop("id").startswith("call_") and choice["finish_reason"] == "tool_calls"
    assert call == {"type": "function", "function": {"name": "go", "arguments": '{"a": 1}'}}


def test_metadata_come_back() -> None:
    body = answer({"metadata": {"batch": "7"}}, completion())["response"]["body"]
    assert body.pop("metadata") == {"batch": "7"}
    assert body == answer({}, completion())["response"]["body"], "and change nothing else"


def test_an_echo_with_log_probabilities_begins_with_the_prompt() -> None:
    steps = step(A, -1.0, (A, -1.0), (B, -2.0)), step(B, float("-inf"), (A, -0.5))
    made = completion(logprobs=steps, prompt_logprobs=(None, step(IDS[1], -3.0, (A, -0.25))))
    (choice,) = answer({"echo": True, "logprobs": 2}, made)["response"]["body"]["choices"]
    assert choice["text"] == "Hiab"
    assert choice["logprobs"] == {
        "tokens": ["H", "i", "a", "b"],
        "token_logprobs": [None, -3.0, -1.0, -9999.0],
        "top_logprobs": [None, {"a": -0.25, "i": -3.0}, {"a": -1.0, "b": -2.0}, {"a": -0.5, "b": -9999.0}],
        "text_offset": [0, 1, 2, 3],
    }


def test_a_prompt_that_is_only_scored_ends_by_its_length() -> None:
    made = completion(token_ids=(), text="", logprobs=(), prompt_logprobs=(None, step(IDS[1], -3.0)), finish_reason="scored")
    body = answer({"echo": True, "logprobs": 0, "max_tokens": 0}, made)["response"]["body"]
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -3.0]
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("Hi", "length")
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}


def test_a_chat_with_two_answers() -> None:
    other = Output(1, "b", (B,), (step(B, -0.5, (A, -0.25)),), "stop", "x")
    made = completion(logprobs=(step(A, -1.0), step(B, -2.0)), others=(other,))
    chat = {"prompt": None, "messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
    body = answer(chat, made)["response"]["body"]
    assert (body["object"], body["id"][:9], body["usage"]["completion_tokens"]) == ("chat.completion", "chatcmpl-", 3)
    first, second = body["choices"]
    assert first["message"] == {"role": "assistant", "content": "ab"}
    assert second == {
        "index": 1,
        "message": {"role": "assistant", "content": "b"},
        "logprobs": {
            "content": [
                {
                    "token": "b",
                    "logprob": -0.5,
                    "bytes": [98],
                    "top_logprobs": [{"token": "a", "logprob": -0.25, "bytes": [97]}],
                }
            ],
            "refusal": None,
        },
        "finish_reason": "stop",
        "stop_reason": "x",
    }


def test_token_ids_are_there_where_they_are_asked_for_or_are_all_there_is(tmp_path: Any) -> None:
    (choice,) = answer({"return_token_ids": True}, completion())["response"]["body"]["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (list(IDS), [A, B])
    without = RecordMaker(Answers("tiny", Script(NoTokenizer(tmp_path))), 17)
    (choice,) = answer({}, completion(prompt=None, text=""), without)["response"]["body"]["choices"]
    assert choice["token_ids"] == [A, B]


def test_a_refusal_has_the_reason_in_both_places() -> None:
    record = refusal("mine", "line 3: it is not JSON")
    assert is_refusal(record) and record["error"] == {"code": "invalid_request", "message": "line 3: it is not JSON"}
    assert json.loads(as_line(record)) == record
    response = record["response"]
    assert isinstance(response, dict) and response["status_code"] == 400
    assert response["body"]["error"]["message"] == "line 3: it is not JSON"


def test_a_record_is_one_line_whatever_is_in_it() -> None:
    record = refusal("a\nb\u2028\ud800é", "x")
    line = as_line(record)
    assert line.count(b"\n") == 1 and line.endswith(b"\n") and "é".encode() in line
    assert json.loads(line) == record
