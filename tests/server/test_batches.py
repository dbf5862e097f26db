"""Batches: what they answer is what the server answers, whatever cuts them off, and whatever is asked meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest
from openai import OpenAI
from psutil import Process

from h2o_flexgen.engine.job import Request
from h2o_flexgen.jobs.index import InputPart
from h2o_flexgen.jobs.openai_answers import as_line
from h2o_flexgen.jobs.output import Recording, Settings
from h2o_flexgen.jobs.recovery import AppendFile, Finished
from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.server import batch_threads
from h2o_flexgen.server.batch_threads import BatchRun, BatchWork
from h2o_flexgen.server.listening import Limits
from h2o_flexgen.server.service import Service
from h2o_flexgen.server.stored_batches import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    ENDED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    Batches,
    DataFolder,
    StoredBatch,
    StoredFiles,
    data_folder,
)
from tests.helpers.patience import PATIENCE_SECONDS
from tests.server.served import GEN_LEN, MODEL, PROMPT_LEN, SEED, Served, served
from tests.server.test_desk import Asking, breaking
from tests.server.test_refusals import error

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MODEL_ALONE: Settings = {"model": MODEL}
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 5}
DRAWN = [
    {"prompt": "The ferry", "max_tokens": 9},
    {"prompt": [5, 6, 7], "n": 3, "max_tokens": 4, "logprobs": 1},
    {"prompt": "A boat", "seed": 3},
    {"prompt": "It rains", "temperature": 0, "max_tokens": GEN_LEN},
    *({"prompt": f"Boat {place}", "max_tokens": 1 + place % 7} for place in range(20)),
]

SEEDED = 2  # the place of the one that brings a seed


@pytest.fixture(scope="module")
def server(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(llm, data=tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client


def line(name: str, body: dict[str, Any], url: str = COMPLETIONS) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def batch_of(client: OpenAI, bodies: Sequence[Any], endpoint: Any = COMPLETIONS, **fields: Any) -> Any:
    """A batch of requests that are called by their places; of what is no object, as it is."""
    lines = [one if isinstance(one, str) else json.dumps(line(str(at), one, endpoint)) for at, one in enumerate(bodies)]
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def ended(server: Served, client: OpenAI, batch: Any) -> Any:
    server.until(lambda: client.batches.retrieve(batch.id).status in ENDED)
    return client.batches.retrieve(batch.id)


def records(client: OpenAI, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    found = [json.loads(one) for one in client.files.content(file_id).text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


def texts(body: Any) -> list[Any]:
    return [(choice.get("text") or choice.get("message"), choice["finish_reason"]) for choice in body["choices"]]


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_answers_are_those_of_the_server(server: Served, client: OpenAI, endpoint: str) -> None:
    given = [{"prompt": text} for text in ("The ferry", "A boat", "It rains", "x" * 30, "One", "Two")]
    if endpoint == CHAT:
        given = [{"messages": [{"role": "user", "content": one["prompt"][:3]}]} for one in given]
    bodies = [{**GREEDY, **one} for one in given]
    made = batch_of(client, bodies, endpoint, metadata={"of": "tests"})
    assert (made.object, made.status, made.metadata, made.endpoint) == ("batch", "validating", {"of": "tests"}, endpoint)
    batch = ended(server, client, made)
    assert batch.status == "completed" and batch.error_file_id is None and batch.errors is None
    assert batch.request_counts.model_dump() == {"total": 6, "completed": 6, "failed": 0}
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    found = records(client, batch.output_file_id)
    with server.http() as http:
        for place, body in enumerate(bodies):
            alone, own = http.post(endpoint, json=body).json(), found[str(place)]
            assert own["error"] is None and own["response"]["status_code"] == 200
            assert own["response"]["body"]["choices"] == alone["choices"]
            assert own["response"]["body"]["usage"] == alone["usage"]
    file = client.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert file in list(client.files.list(purpose="batch_output"))


def test_requests_are_as_the_server_has_them(server: Served, client: OpenAI) -> None:
    """What is left open, and a seed of its own, do what they do when a request comes alone."""
    bodies = [{"prompt": "x", "seed": 3}, {"prompt": "x", "parallel_tool_calls": True}, {"prompt": ["x"], "n": 2, "seed": 4}]
    found = records(client, ended(server, client, batch_of(client, bodies)).output_file_id)
    with server.http() as http:
        for place in (0, 2):
            assert texts(found[str(place)]["response"]["body"]) == texts(http.post(COMPLETIONS, json=bodies[place]).json())
    assert found["1"]["response"]["body"]["usage"]["completion_tokens"] == 16


def opened() -> list[str]:
    return [one.path for one in Process().open_files()]


def test_bad_lines_are_named_and_nothing_is_run(server: Served, client: OpenAI) -> None:
    bad = {
        2: ("{", "it is not JSON"),
        3: (json.dumps({"prompt": "x"}), "it is no request of a batch; write an object with custom_id, method, url, body"),
        4: (json.dumps(line("c", {"messages": []}, CHAT)), f'url is "{CHAT}", but this batch is for "{COMPLETIONS}"'),
        5: (json.dumps(line("d", {"prompt": "x", "model": "tinny"})), "the model 'tinny' is not here; ask for 'tiny'"),
        6: (json.dumps(line("0", {"prompt": "x"})), "its custom_id '0' is that of line 1, too"),
        7: (json.dumps(line("f", {"prompt": "x", "n": 200})), "n is 200; allowed is 128 at most"),
        8: (json.dumps(line("g", {"prompt": "x", "stream": True})), "stream is true; records come whole"),
        9: (json.dumps(line("h", {"prompt": ["x", "y"]})), "prompt is a list of 2 prompts; write a line for each"),
        10: (json.dumps(line("i", {"prompt": "x" * 3000})), "it is longer than 2.00 kB"),
    }
    with served(server.llm, data=server.data / "bad", limits=Limits(body_bytes=2000)) as other, other.client() as client:
        batch = ended(other, client, batch_of(client, [{"prompt": "x"}, *(text for text, _ in bad.values())]))
        assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
        told = {one.line: one.message for one in batch.errors.data}
        for number, (_, said) in bad.items():
            assert told.pop(number).startswith(f"line {number}: {said}")
        assert not told and {one.code for one in batch.errors.data} == {"invalid_request"}
        (only,) = ended(other, client, batch_of(client, [""])).errors.data
        assert only.message == "in.jsonl is empty; write a request per line" and only.line is None
        assert other.counts.totals()["passes"] == 0
        other.until(lambda: not [one for one in map(Path, opened()) if one.suffix == ".jsonl" and server.data in one.parents])


def test_many_bad_lines_are_counted(server: Served, client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_threads, "NAMED", 2)
    errors = ended(server, client, batch_of(client, ["{"] * 5)).errors.data
    assert [one.line for one in errors] == [1, 2, None] and errors[-1].message == "and 3 more lines cannot be run"


def test_a_request_that_is_too_long_has_an_error_of_its_own(server: Served, client: OpenAI) -> None:
    bodies = [
        {"prompt": "x"},
        {"prompt": [5] * (PROMPT_LEN + 1)},
        {"prompt": "x", "max_tokens": GEN_LEN + 1},
        {"prompt": [10**6]},
    ]
    batch = ended(server, client, batch_of(client, bodies))
    assert batch.status == "completed" and batch.request_counts.model_dump() == {"total": 4, "completed": 1, "failed": 3}
    assert records(client, batch.output_file_id).keys() == {"0"}
    found = records(client, batch.error_file_id)
    assert {name: one["response"]["status_code"] for name, one in found.items()} == {"1": 400, "2": 400, "3": 400}
    assert [found[name]["error"]["code"] for name in "123"] == ["context_length_exceeded"] * 2 + ["invalid_request"]
    long = f"line 2: the prompt has {PROMPT_LEN + 1} tokens, and no more than {PROMPT_LEN} are taken"
    assert found["1"]["error"]["message"] == found["1"]["response"]["body"]["error"]["message"] == long
    assert found["3"]["error"]["message"].startswith("line 4: the prompt has the token id 1000000")


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"completion_window": "1h"}, 400, "completion_window is '1h'; allowed is \"24h\""),
        ({"endpoint": "/v1/images"}, 400, "endpoint is '/v1/images'; allowed is"),
        ({"input_file_id": None}, 400, "input_file_id is null; allowed is the id of a file"),
        ({"input_file_id": "file-x"}, 404, "there is no file 'file-x'"),
        ({"metadata": {"a": 1}}, 400, "metadata is {'a': 1}; allowed are 16 texts of 512 characters"),
        ({"metadata": {str(key): "" for key in range(17)}}, 400, "metadata is {"),
        ({"output_expires_after": {}}, 400, "unknown field 'output_expires_after': nothing expires here"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(server: Served, fields: dict[str, Any], status: int, said: str) -> None:
    sound = {"input_file_id": "file-x", "endpoint": COMPLETIONS, "completion_window": "24h"}
    with server.http() as http:
        assert error(http.post("/v1/batches", json={**sound, **fields}), status)["message"].startswith(said)
        assert error(http.get("/v1/batches/batch_x"), 404)["code"] == "batch_not_found"


def test_batches_are_listed_by_pages_and_read_only_what_is_for_them(server: Served, client: OpenAI) -> None:
    made = [batch_of(client, [{"prompt": "x", "max_tokens": 1}]) for _ in range(3)]
    done = [ended(server, client, one) for one in made]
    assert [one.id for one in client.batches.list(limit=2)][:3] == [one.id for one in reversed(made)]
    with pytest.raises(openai.BadRequestError, match="is 'batch_output'; a batch reads one of 'batch'"):
        client.batches.create(input_file_id=done[0].output_file_id, endpoint=COMPLETIONS, completion_window="24h")
    with server.http() as http:
        told = http.get("/metrics").text
    assert 'h2o_flexgen_batches{status="in_progress"} 0\n' in told
    counted = [one for one in client.batches.list() if one.status == "completed"]
    assert f'h2o_flexgen_batches{{status="completed"}} {len(counted)}\n' in told
    completed = sum(one.request_counts.completed for one in client.batches.list())
    assert f'h2o_flexgen_batch_requests_total{{outcome="completed"}} {completed}\n' in told


# -- beside others -----------------------------------------------------------------------------------------------------------


@contextmanager
def in_the_middle(server: Served, client: OpenAI, bodies: Sequence[Any]) -> Iterator[Any]:
    """A context in which some requests of a batch have answers, and others are held."""
    with server.held(after=5):
        batch = batch_of(client, bodies)
        server.until(lambda: server.counts.is_held.is_set())
        server.until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 1)
        yield batch


def test_whoever_asks_comes_first_and_is_not_turned_away(llm: LLM, tmp_path: Path) -> None:
    with served(llm, data=tmp_path, most_waiting=1) as server, server.client() as client:
        with server.held():
            batch = batch_of(client, [{"prompt": "x", "max_tokens": 4}] * 40)
            server.until(lambda: server.desk.now.rows_in_background == 4 and server.counts.is_held.is_set())
            assert server.desk.now.rows_seated == 4 and server.desk.now.rows_waiting == 0
            asked = Asking(server, prompt=["x"] * 5, max_tokens=1)  # as many as have seats or may wait
            server.until(lambda: server.desk.now.rows_waiting == 5)
            with pytest.raises(openai.RateLimitError):
                client.completions.create(**GREEDY, prompt="x")
            with pytest.raises(openai.ConflictError, match="which has not ended; wait for that, or cancel it"):
                client.files.delete(batch.input_file_id)
        assert asked.answer.usage.completion_tokens == 5
        assert client.batches.retrieve(batch.id).request_counts.completed < 40
        assert ended(server, client, batch).request_counts.completed == 40
        assert client.files.delete(batch.input_file_id).deleted


def test_a_batch_that_is_cancelled_keeps_what_it_has(llm: LLM, tmp_path: Path) -> None:
    with served(llm, data=tmp_path) as server, server.client() as client:
        bodies = [{"prompt": "x", "max_tokens": GEN_LEN}] * 3 + [{"prompt": "x", "max_tokens": 1}] * 30
        with in_the_middle(server, client, bodies) as running:
            waiting = batch_of(client, [{"prompt": "x"}])
            server.until(lambda: client.batches.retrieve(waiting.id).status == "in_progress")
            assert client.batches.cancel(waiting.id).status == "cancelled", "it had not begun"
            assert client.batches.cancel(running.id).status == "cancelling"
        batch = ended(server, client, running)
        assert batch.status == "cancelled" and 1 <= batch.request_counts.completed < 33 == batch.request_counts.total
        assert len(records(client, batch.output_file_id)) == batch.request_counts.completed
        server.until(lambda: server.desk.now.rows_seated == 0)
        assert server.desk.now.rows_in_background == 0
        with pytest.raises(openai.ConflictError, match="is cancelled, and can no longer be cancelled"):
            client.batches.cancel(batch.id)
        assert [*(tmp_path / "batches").glob("*.jsonl")] == []


def test_a_batch_that_is_cancelled_when_it_is_about_to_begin_is_not_run(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelling(of: BatchWork, batch: StoredBatch) -> Any:
        assert of.batches.cancel(batch.id).status == "cancelled"
        ended_before.undo()
        return of._begin(batch)

    with served(llm, data=tmp_path) as server, server.client() as client, monkeypatch.context() as ended_before:
        ended_before.setattr(BatchWork, "_begin", cancelling)
        first = batch_of(client, [{"prompt": "x", "max_tokens": 1}] * 9)
        assert ended(server, client, first).status == "cancelled"
        assert ended(server, client, batch_of(client, [{"prompt": "x", "max_tokens": 1}])).status == "completed"
        assert server.counts.totals()["completions"] == {"length": 1}


# -- that are cut off --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(server: Served, client: OpenAI) -> dict[str, Any]:
    """What a batch says that is not cut off."""
    batch = ended(server, client, batch_of(client, DRAWN))
    return records(client, batch.output_file_id)


def test_a_batch_draws_as_a_job_over_its_file_does(llm: LLM, whole: dict[str, Any]) -> None:
    fields = [{"max_tokens": 16, "temperature": 1, **body} for body in DRAWN]
    params = [SamplingParams(**{name: value for name, value in each.items() if name != "prompt"}) for each in fields]
    prompts = [each["prompt"] for each in fields]
    for own in llm.generate_stream(map(Request, prompts, params), seed=SEED):
        said = [text for text, _ in texts(whole[str(own.index)]["response"]["body"])]
        assert own.index == SEEDED or said == [output.text for output in own.outputs]


def close(server: Served) -> None:
    server.desk.close()


def end_at_once(server: Served) -> None:
    server.counts.ends_at_once = True


@pytest.mark.parametrize("cut_off", [close, end_at_once])
def test_a_batch_that_is_cut_off_is_gone_on_with(
    llm: LLM, tmp_path: Path, whole: dict[str, Any], cut_off: Callable[[Served], None]
) -> None:
    with served(llm, data=tmp_path) as server, server.client() as client:
        with in_the_middle(server, client, DRAWN) as made:
            asked = Asking(server, prompt="x", max_tokens=3)
            server.until(lambda: server.desk.now.rows_waiting == 1)
            cut_off(server)
        assert asked.answer.usage.completion_tokens == 3 if cut_off is close else asked.answer.code == "ending"
        (found,) = (tmp_path / "batches").glob("*.jsonl")
        before = found.read_bytes()
        assert 1 <= len(before.splitlines()) < len(DRAWN)
    with served(llm, data=tmp_path) as server, server.client() as client:
        batch = ended(server, client, made)
        assert client.files.content(batch.output_file_id).content.startswith(before), "what was there stays"
        found_again = records(client, batch.output_file_id)
    for name, one in whole.items():
        assert texts(found_again[name]["response"]["body"]) == texts(one["response"]["body"])
    assert found_again.keys() == whole.keys() and batch.request_counts.completed == len(DRAWN)


def test_a_batch_does_not_go_on_under_other_settings(llm: LLM, tmp_path: Path) -> None:
    with served(llm, data=tmp_path) as server, server.client() as client:
        bodies = [{"prompt": "x", "max_tokens": 1}] * 5 + [{"prompt": "x", "max_tokens": GEN_LEN}] * 10
        with in_the_middle(server, client, bodies) as begun:
            waiting = batch_of(client, [{"prompt": "x"}])
            server.until(lambda: client.batches.retrieve(waiting.id).status == "in_progress")
            server.desk.close()
    with (tmp_path / "batches" / f"{begun.id}.jsonl").open("ab") as killed:
        killed.write(b'{"id": "batch_req_')
    with served(llm, data=tmp_path, settings={"model": MODEL, "kv_policy": "h2o"}) as server, server.client() as client:
        batch = ended(server, client, begun)
        (only,) = batch.errors.data
        said = "it was begun by a server with other options: kv_policy was None and is 'h2o'; send what is left in a new one"
        assert (batch.status, only.code, only.message) == ("failed", "settings_changed", said)
        assert server.told == [f"{batch.id} has failed: {said}"]
        assert 1 <= len(records(client, batch.output_file_id)) == batch.request_counts.completed < 15
        assert ended(server, client, waiting).status == "completed", "it had no answers yet"


# -- what fails --------------------------------------------------------------------------------------------------------------


def test_requests_of_a_block_that_fails_are_tried_again_and_a_broken_one_is_not(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = list[int]()

    def fail(logits: Any, place: int) -> None:
        failed.append(place)
        raise OSError(5, "Input/output error")

    def overflow(logits: Any, place: int) -> None:
        logits[place] = float("nan")

    breaking(monkeypatch, lambda params, step: params.top_k == 17 and step == 2 and len(failed) < 1, fail)
    breaking(monkeypatch, lambda params, step: params.top_k == 18 and step == 2, overflow)
    breaking(monkeypatch, lambda params, step: params.top_k == 19, fail)
    with served(llm, data=tmp_path) as server, server.client() as client:
        bodies = [{"prompt": "x", "max_tokens": 4, "top_k": top_k} for top_k in (17, 18, 5, 6)]
        batch = ended(server, client, batch_of(client, bodies))
        assert len(failed) == 1 and records(client, batch.output_file_id).keys() == {"0", "2", "3"}
        (broken,) = records(client, batch.error_file_id).values()
        assert (broken["custom_id"], broken["response"]["status_code"]) == ("1", 500)
        assert broken["error"]["code"] == "request_failed" and "maximum nan" in broken["error"]["message"]
        batch = ended(server, client, batch_of(client, [{"prompt": "x", "top_k": 19}]))
        (lost,) = records(client, batch.error_file_id).values()
        assert lost["error"]["code"] == "computation_failed" and len(failed) == 3, "it was tried twice"
        assert batch.status == "completed" and batch.output_file_id is None


def test_where_the_disk_fails_batches_rest_and_go_on(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append, failed = AppendFile.append, list[int]()

    def full(file: AppendFile, line: bytes) -> int:
        if not failed:
            failed.append(1)
            raise ValueError("cannot be written") from OSError(28, "No space left on device")
        return append(file, line)

    monkeypatch.setattr(AppendFile, "append", full)
    with served(llm, data=tmp_path, seconds_of_rest=0.01) as server, server.client() as client:
        batch = ended(server, client, batch_of(client, [{"prompt": "x", "max_tokens": 2}] * 9))
        assert batch.status == "completed" and batch.request_counts.completed == 9
        told = f"{batch.id} paused for 0.01 s (No space left on device); fix this and it will retry"
        assert server.told == [told]


def test_where_the_disk_or_the_memory_fails_a_check_is_made_again(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_lines, failures = batch_threads.check_lines, [OSError(5, "Input/output error"), MemoryError()]

    def failing(*given: Any) -> Any:
        if failures:
            raise failures.pop(0)
        return check_lines(*given)

    monkeypatch.setattr(batch_threads, "check_lines", failing)
    with served(llm, data=tmp_path, seconds_of_rest=0.01) as server, server.client() as client:
        batch = ended(server, client, batch_of(client, [{"prompt": "x", "max_tokens": 1}]))
        assert batch.status == "completed"
        why = ("Input/output error", "there is no memory left")
        assert server.told == [f"{batch.id} paused for 0.01 s ({each}); fix this and it will retry" for each in why]


def test_while_one_rests_others_go_on_and_it_can_be_cancelled(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, first_one = batch_threads.JobOutput, list[str]()

    def failing(path: Path, reader: Any) -> Any:
        first_one.append(path.stem)
        if path.stem == first_one[0]:
            raise OSError(5, "Input/output error")
        return output(path, reader)

    monkeypatch.setattr(batch_threads, "JobOutput", failing)
    with served(llm, data=tmp_path) as server, server.client() as client:
        first = batch_of(client, [{"prompt": "x", "max_tokens": 1}])
        server.until(lambda: bool(server.told))
        second = batch_of(client, [{"prompt": "x", "max_tokens": 1}])
        assert ended(server, client, second).status == "completed"
        assert client.batches.retrieve(first.id).status == "in_progress"
        client.batches.cancel(first.id)
        assert ended(server, client, first).status == "cancelled"
        assert server.told == [f"{first.id} paused for 3600 s (Input/output error); fix this and it will retry"]


ENDS = {
    # what a batch of two requests was, and the lines of its records, and how it ends: with so many answers, and because of what
    "whole": (FINALIZING, 2, b"", COMPLETED, 2, ()),
    "cancelled": (CANCELLING, 1, b'{"id": "batch_req_', CANCELLED, 1, ()),
    "damaged": (FINALIZING, 1, b"1\n", FAILED, 1, ("line 2 of its records is damaged",)),
    "too few": (FINALIZING, 1, b"", FAILED, 1, ("it has 2 requests, and 1 records of them are there",)),
    "no input": (IN_PROGRESS, 1, b"1\n", FAILED, 1, ("its input file is no longer there",)),
}


def left_behind(folder: DataFolder, status: str, records: int, rest: bytes, begun: Settings = MODEL_ALONE) -> StoredBatch:
    """A batch of two requests that an earlier server has left in this state. Its input is gone."""
    files = StoredFiles(folder.files)
    with files.new() as new:
        file = files.keep(new, "in.jsonl", "batch")
    batches = Batches(folder.batches, files)
    batch = batches.create(file.id, COMPLETIONS, None, SEED)
    lines = [as_line({"id": f"batch_req_{at}", "custom_id": str(at), "response": {}, "error": None}) for at in range(records)]
    batches.records(batch.id).write_bytes(b"".join(lines) + rest)
    files.lines(file.id).unlink()
    return batches.change(batch.id, lambda one: one.checked_as(InputPart(9, "x"), 2, ()).begins(begun, {}).now(status))


def test_what_an_earlier_server_has_left_comes_to_its_end(llm: LLM, tmp_path: Path) -> None:
    """None is checked again that needs no input, and none that cannot be run keeps those behind it."""
    with data_folder(tmp_path, "--data-dir") as folder:
        made = {name: left_behind(folder, *had[:3]) for name, had in ENDS.items()}
        others = left_behind(folder, IN_PROGRESS, 1, b"", {"model": "another"})
    with served(llm, data=tmp_path) as server, server.client() as client:
        for name, (_, _, _, status, answers, said) in ENDS.items():
            batch = ended(server, client, made[name])
            assert (name, batch.status, batch.request_counts.completed) == (name, status, answers)
            assert tuple(one.message for one in (batch.errors.data if batch.errors else ())) == said
            assert len(records(client, batch.output_file_id)) == answers
        (only,) = ended(server, client, others).errors.data
        assert only.code == "settings_changed", "and no line of another model is a bad one"


def test_the_end_of_a_batch_does_not_keep_a_server_that_ends(tmp_path: Path) -> None:
    desk = SimpleNamespace(when_closed=lambda wake: None, is_closed=True)
    with data_folder(tmp_path, "--data-dir") as folder:
        batch = left_behind(folder, FINALIZING, 2, b"")
        own = BatchWork(folder, cast(Service, SimpleNamespace(desk=desk)), lambda: ({}, {}), lambda said: None)
        with pytest.raises(batch_threads.ServerEnds):
            own._end(batch, COMPLETED)
        assert own.batches.one(batch.id).status == FINALIZING and own.batches.records(batch.id).exists()
        assert [one.id for one in own.files.all()] == [batch.input_file_id]


def test_no_text_is_read_once_a_batch_is_not_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[int]()
    monkeypatch.setattr(BatchRun, "_prepared", lambda run, place: read.append(place))
    desk = SimpleNamespace(now=SimpleNamespace(seats=4), give_up=lambda arrivals: None)
    output = SimpleNamespace(finished=Finished(bytearray(99)), sync=lambda: None)
    service, recording = SimpleNamespace(desk=desk), SimpleNamespace(output=output)
    run = BatchRun(cast(Service, service), cast(Recording, recording), SEED, SimpleQueue())
    run.to_the_end(lambda: len(read) < 2, lambda finished: None)
    assert read == [0, 1]


def test_an_input_that_was_changed_ends_its_batch(llm: LLM, tmp_path: Path) -> None:
    with served(llm, data=tmp_path) as server, server.client() as client:
        with server.held():
            asked = Asking(server, prompt="x", max_tokens=2)
            assert server.counts.is_held.wait(PATIENCE_SECONDS)
            made = batch_of(client, [{"prompt": "x", "max_tokens": 1}] * 50)
            server.until(lambda: client.batches.retrieve(made.id).status == "in_progress")
            server.until(lambda: server.desk.now.rows_in_background == 8)
            (tmp_path / "files" / f"{made.input_file_id}.jsonl").write_text("{}\n" * 10_000)
        assert asked.answer.choices
        batch = ended(server, client, made)
        assert batch.status == "failed" and batch.errors.data[0].message == "its input file is no longer what was checked"
        assert server.told == [f"{batch.id} has failed: its input file is no longer what was checked"]
