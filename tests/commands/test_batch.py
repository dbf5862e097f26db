"""The batch command, from its arguments to its records: what it refuses, how it goes on, and what is left however it ends."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from h2o_flexgen import LLM, SamplingParams, batch
from h2o_flexgen.cli.batch_work import FOR_GOOD
from h2o_flexgen.jobs.output import JobOutput, waiting_file
from h2o_flexgen.profiling import profile_cache
from h2o_flexgen.sampling.sampler import Sampler
from tests.helpers.commands import Result, called
from tests.helpers.patience import PATIENCE_SECONDS
from tests.helpers.planted import CPU_MEM, CROWDED, OVER, SAID, plant_a_crowd, plant_a_peak
from tests.helpers.signals import as_in_a_terminal
from tests.helpers.threads import new_threads
from tests.helpers.tiny import POSITIONS, save_tiny

PLAIN = ("--dtype", "float32", "--tokenizer", "bytes", "--device", "cpu", "--verbose", "0")
IN_MEMORY = ("--percent", "0", "100", "0", "100", "0", "100")
ON_DISK = ("--percent", "0", "30", "0", "40", "0", "50")
SMALL = ("--gpu-batch-size", "2", "--num-gpu-batches", "2")


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert not new_threads(before)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny("llama-gqa", folder)
    return folder


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], offload: Path, llama: Path) -> Callable[..., Result]:
    """Runs the command with an offload folder that must be gone afterwards."""
    return partial(called, batch.main, capfd, "--model", llama, *PLAIN, "--offload-dir", offload, *SMALL)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def requests(count: int = 9) -> list[dict[str, Any]]:
    """Requests of different lengths, half of them drawn."""
    return [
        {"custom_id": f"r{n}", "prompt": "text " * (1 + n % 4), "max_tokens": 3 + 5 * n % 11, "temperature": n % 2}
        for n in range(count)
    ]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def records(path: Path) -> dict[str, Any]:
    """The records by their ids, without when the job began; no id may come twice."""
    found = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        assert record["custom_id"] not in found
        if record["error"] is None:
            record["response"]["body"].pop("created", None)
        found[record["custom_id"]] = record
    return found


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def choice(record: dict[str, Any]) -> dict[str, Any]:
    (found,) = record["response"]["body"]["choices"]
    return found


@contextmanager
def ended_after(count: int, error: BaseException) -> Iterator[None]:
    """A context in which writing ends with the error after so many records."""
    add = JobOutput.add

    def failing(self: JobOutput, place: int, line: bytes, failed: bool) -> None:
        if self.finished.num_done >= count:
            raise error
        add(self, place, line, failed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobOutput, "add", failing)
        yield


# -- records -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [IN_MEMORY, ON_DISK])
def test_records_are_what_the_engine_generates(command: Any, out: Path, tmp_path: Path, llama: Path, shares: Any) -> None:
    asked = requests()
    result = command("-i", write(tmp_path / "in.jsonl", asked), "-o", out, "--seed", 5, "--return-token-ids", *shares)
    assert result.status == 0, result.err
    with LLM(llama, dtype="float32", tokenizer="bytes", device="cpu") as llm:
        params = [SamplingParams(max_tokens=one["max_tokens"], temperature=one["temperature"]) for one in asked]
        expected = llm.generate([one["prompt"] for one in asked], params, seed=5)
    found = records(out)
    assert [found[f"r{one.index}"]["custom_id"] for one in expected] == [f"r{n}" for n in range(9)]
    for one in expected:
        own = choice(found[f"r{one.index}"])
        assert (own["text"], own["token_ids"], own["finish_reason"]) == (one.text, list(one.token_ids), one.finish_reason)
    document = result.json
    assert (document["requests"], document["requests_done"], document["requests_failed"]) == (9, 9, 0)
    assert document["generated_tokens"] == sum(len(one.token_ids) for one in expected) and document["seed"] == 5
    assert 0.5 < document["useful_share"] <= 1


def test_embeddings_stand_beside_completions(command: Any, out: Path, tmp_path: Path, llama: Path) -> None:
    texts = {"a": "The ferry", "b": "text text text of a boat", "c": "text text text of a ferry"}
    body = {"pooling": "mean", "truncate": 20}
    lines = [{"custom_id": name, "url": "/v1/embeddings", "body": {"input": text, **body}} for name, text in texts.items()]
    asked: list[Any] = [*lines, *requests(2), {"custom_id": "d", "url": "/v1/embeddings", "body": {"input": "x" * 999}}]
    result = command("-i", write(tmp_path / "in.jsonl", asked), "-o", out, *ON_DISK)
    found = records(out)
    assert result.status == 1 and "128 positions" in found["d"]["error"]["message"]
    assert [len(choice(found[f"r{n}"])["text"]) > 0 for n in range(2)] == [True, True]
    with LLM(llama, dtype="float32", tokenizer="bytes", device="cpu") as llm:
        expected = llm.embed([*texts.values()], **body)
    for name, one in zip(texts, expected, strict=True):
        (data,) = found[name]["response"]["body"]["data"]
        assert data["embedding"] == pytest.approx(list(one.embedding), abs=1e-6)
        assert data["truncated_tokens"] == one.truncated_tokens == max(0, len(texts[name]) - 20)


def test_forms_and_options_of_one_file(command: Any, out: Path, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "logprobs": True}
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"prompt": [5, 6, 7], "n": 2, "temperature": 1, "max_tokens": 4, "seed": 7},
        "",
        {"prompt": "Hi", "echo": True, "logprobs": 1, "max_tokens": 0},
    ]
    assert command("-i", write(tmp_path / "in.jsonl", lines), "-o", out, *IN_MEMORY).status == 0
    found = records(out)
    assert set(found) == {"a", "line-2", "line-4"}
    assert found["a"]["response"]["body"]["object"] == "chat.completion" and len(choice(found["a"])["logprobs"]["content"]) == 3
    assert [one["index"] for one in found["line-2"]["response"]["body"]["choices"]] == [0, 1]
    scored = choice(found["line-4"])
    assert scored["text"] == "Hi" and len(scored["logprobs"]["token_logprobs"]) == 2
    assert found["line-4"]["response"]["body"]["usage"]["completion_tokens"] == 0


def test_texts_without_options_take_those_of_the_command(command: Any, out: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "in.txt", ["one", "two and more"])
    assert command("-i", file, "-o", out, *IN_MEMORY, "--gen-len", 4, "--stop", "\x00").status == 0
    assert [one["response"]["body"]["usage"]["completion_tokens"] for one in records(out).values()] == [4, 4]


def test_records_come_in_the_order_of_the_input_if_asked_for(command: Any, out: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", [*requests(), "{"])
    assert command("-i", file, "-o", out, *IN_MEMORY, "--ordered", "--skip-invalid").status == 1
    assert ids(out) == [*(f"r{n}" for n in range(9)), "line-10"] and not waiting_file(out).exists()


def test_a_plan_is_found_where_none_is_given(command: Any, out: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        profile_cache, "profiled", lambda *asked, **how: pytest.fail("nothing has to be measured for so little")
    )
    result = command("-i", write(tmp_path / "in.jsonl", requests(3)), "-o", out, "--verbose", 1)
    assert result.status == 0 and any(line.startswith("plan ") for line in result.out)
    assert any(line.startswith("speed ") for line in result.out)


def test_a_dry_run_checks_the_input_and_shows_the_plan(command: Any, out: Path, tmp_path: Path) -> None:
    lines = [*requests(3), {"prompt": "x" * POSITIONS}, "{"]
    result = command("-i", write(tmp_path / "in.jsonl", lines), "-o", out, "--dry-run", "--skip-invalid")
    assert result.status == 0 and (result.json["requests"], result.json["refused"]) == (5, 2)
    assert result.json["num_prompts"] == 3 and [*tmp_path.glob("out*")] == []


def test_figures_are_written_where_they_are_drawn(command: Any, out: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert command("-i", write(tmp_path / "in.jsonl", requests()), "-o", out, *IN_MEMORY, "--metrics", metrics).status == 0
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert lines[-1]["requests_done"] == 9 and lines[-1]["rows_alive"] == 0 and lines[-1]["busy_seconds"]["compute"] > 0
    assert [line["requests_done"] for line in lines] == sorted(line["requests_done"] for line in lines)


def test_a_job_that_held_more_than_its_budget_says_so(command: Any, out: Path, tmp_path: Path, monkeypatch: Any) -> None:
    plant_a_peak(monkeypatch)
    result = command("-i", write(tmp_path / "in.jsonl", requests(2)), "-o", out, *IN_MEMORY, *CPU_MEM)
    assert result.status == 0 and result.json["over_budget_bytes"]["host"] == OVER
    assert [line.startswith(SAID) for line in result.said] == [True]


def test_a_crowd_is_said_once_in_a_job(command: Any, out: Path, tmp_path: Path, monkeypatch: Any) -> None:
    plant_a_crowd(monkeypatch)
    result = command("-i", write(tmp_path / "in.jsonl", requests(2)), "-o", out, *IN_MEMORY)
    assert result.status == 0 and result.err.count(CROWDED) == 1


# -- what cannot be run ------------------------------------------------------------------------------------------------


def test_bad_lines_are_refused_before_anything_is_written(command: Any, out: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", [*requests(2), {"prompt": "x", "wibble": 1}, "{"])
    error = command("-i", file, "-o", out).error
    assert "in.jsonl has 2 of 4 lines that cannot be run (--skip-invalid" in error
    assert "line 3: unknown field 'wibble'; line 4: it is not JSON" in error.replace(f"; known are {''}", "")
    assert [*tmp_path.glob("out*")] == []


def test_bad_lines_are_recorded_and_the_others_run(command: Any, out: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "x", "wibble": 1}, *requests(2), {"custom_id": "r0", "prompt": "x"}, {"custom_id": "bad", "prompt": ""}]
    file = write(tmp_path / "in.jsonl", lines)
    result = command("-i", file, "-o", out, *IN_MEMORY, "--skip-invalid")
    assert result.status == 1
    assert result.said == [f"3 of 5 requests failed: their records in {out} have an error; {FOR_GOOD}"]
    found = records(out)
    assert {name for name, record in found.items() if record["error"]} == {"line-1", "refused-line-4", "bad"}
    assert found["refused-line-4"]["error"]["message"].startswith("line 4: its custom_id 'r0' is that of line 2, too")
    assert found["bad"]["response"]["status_code"] == 400
    assert result.json["requests_failed"] == 3


def test_what_the_model_cannot_do_is_the_error_of_that_line(command: Any, out: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "x" * POSITIONS}, {"prompt": [5, 9999]}, {"prompt": "fine"}, {"prompt": "x", "stop_token_ids": [500]}]
    result = command("-i", write(tmp_path / "in.jsonl", lines), "-o", out, *IN_MEMORY)
    assert result.status == 1 and result.said[-1].endswith(f"have an error; {FOR_GOOD}")
    said = {name: record["error"]["message"] for name, record in records(out).items() if record["error"]}
    assert set(said) == {"line-1", "line-2", "line-4"}
    assert said["line-1"].startswith(f"line 1: the prompt has {POSITIONS} tokens and 32 are to be generated")
    assert said["line-2"].startswith("line 2: the prompt has the token id 9999") and "500" in said["line-4"]


def break_requests(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Makes the logits of these requests no numbers."""
    sample = Sampler.sample

    def broken(self: Sampler, logits: Any, params: Any, rows: Any, *others: Any, **more: Any) -> Any:
        for place, row in enumerate(rows):
            if row in numbers:
                logits[place] = float("nan")
        return sample(self, logits, params, rows, *others, **more)

    monkeypatch.setattr(Sampler, "sample", broken)


@pytest.mark.parametrize("order", [(), ("--ordered",)])
def test_a_request_that_breaks_fails_alone(
    command: Any, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[str, ...]
) -> None:
    file = write(tmp_path / "in.jsonl", requests())
    assert command("-i", file, "-o", out, *IN_MEMORY, "--seed", 5).status == 0
    whole = records(out)
    break_requests(monkeypatch, 3, 5)
    other = tmp_path / "other.jsonl"
    result = command("-i", file, "-o", other, *IN_MEMORY, "--seed", 5, *order)
    assert result.status == 1 and sum("the others go on" in line for line in result.err) == 2
    found = records(other)
    said = {name: record["error"] for name, record in found.items() if record["error"]}
    assert set(said) == {"r3", "r5"} and found["r3"]["response"]["status_code"] == 500
    assert (
        said["r3"]["code"] == "server_error"
        and "line 4: logits of prompt 3 at step 0 have the maximum nan" in said["r3"]["message"]
    )
    assert all(record == whole[name] for name, record in found.items() if name not in said)
    monkeypatch.undo()
    assert command("-i", file, "-o", other, *IN_MEMORY, "--retry-errors", *order).status == 0 and records(other) == whole


@pytest.mark.parametrize(
    ("bad", "said"), [((), "them"), (("{",), "the 1 that could be run")], ids=["alone", "beside a bad line"]
)
def test_only_what_may_succeed_is_advised_to_run_again(
    command: Any, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: tuple[str, ...], said: str
) -> None:
    break_requests(monkeypatch, 1)
    result = command("-i", write(tmp_path / "in.jsonl", [*requests(3), *bad]), "-o", out, *IN_MEMORY, "--skip-invalid")
    assert result.status == 1 and result.said[-1].endswith(f"have an error; --retry-errors runs {said} again")


def test_a_file_of_nothing_but_errors_needs_no_plan(command: Any, out: Path, tmp_path: Path) -> None:
    result = command("-i", write(tmp_path / "in.jsonl", ["{", {"prompt": "x" * POSITIONS}]), "-o", out, "--skip-invalid")
    assert result.status == 1 and ids(out) == ["line-1", "line-2"]


@pytest.mark.parametrize("flags", [("-o", "{in}"), ("-o", "{link}"), ("-o", "{hard}"), ("-o", "x.jsonl", "--metrics", "{in}")])
def test_the_input_is_never_written_whatever_links_lead_there(
    command: Any, tmp_path: Path, flags: tuple[str, ...], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    file, link, hard = write(tmp_path / "in.jsonl", requests(2)), tmp_path / "link.jsonl", tmp_path / "hard.jsonl"
    link.symlink_to(file)
    hard.hardlink_to(file)
    before = file.read_bytes()
    named = [flag.format(**{"in": file, "link": link, "hard": hard}) for flag in flags]
    error = command("-i", file, *named).error
    assert "which is --input-file" in error and file.read_bytes() == before


def test_a_manifest_is_never_the_input(command: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "out.manifest.json", ["a text"])
    assert "the manifest would be" in command("-i", file, "-o", tmp_path / "out.jsonl").error


def test_devices_and_folders_are_no_outputs(command: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", requests(2))
    assert "is a device or a pipe" in command("-i", file, "-o", "/dev/full").error
    reading, writing = os.pipe()
    assert "is a device or a pipe" in command("-i", file, "-o", f"/dev/fd/{writing}").error
    os.close(reading)
    os.close(writing)
    assert "cannot be written" in command("-i", file, "-o", tmp_path).error
    assert "cannot be written" in command("-i", file, "-o", tmp_path / "none" / "out.jsonl").error


def test_the_file_that_stdout_goes_to_is_no_output(command: Any, out: Path, tmp_path: Path, monkeypatch: Any) -> None:
    file = write(tmp_path / "in.jsonl", requests(2))
    with out.open("w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        error = command("-i", file, "-o", out).error
    assert "is where stdout goes" in error and not out.read_bytes()


def test_a_folder_that_is_read_only_is_named_before_anything_is_opened(capfd: Any, tmp_path: Path) -> None:
    file, folder = write(tmp_path / "in.jsonl", requests(2)), tmp_path / "sealed"
    folder.mkdir(mode=0o555)
    with without_privileges(tmp_path):
        error = called(batch.main, capfd, "-i", file, "-o", folder / "out.jsonl").error
    assert error == f"error: --output-file {folder}/out.jsonl cannot be written; give a file that can, in a folder that can"


@contextmanager
def without_privileges(folder: Path) -> Iterator[None]:
    """A context without the rights of a superuser, to whom nothing is read-only."""
    if os.geteuid() != 0:
        yield
        return
    for place in (folder, *folder.parents[:3]):
        place.chmod(0o755)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_what_is_there_already_is_never_overwritten(command: Any, out: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", requests(2))
    out.write_text("precious\n")
    assert f"{out} is there already; --resume goes on with it" in command("-i", file, "-o", out).error
    assert "has records, but its manifest out.manifest.json is not there" in command("-i", file, "-o", out, "--resume").error
    assert "line 1 of" in command("-i", file, "-o", out, "--resume-anyway", *IN_MEMORY).error
    assert out.read_text() == "precious\n"


# -- going on ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def whole(command: Any, tmp_path: Path) -> dict[str, Any]:
    """The records of a job that was not interrupted."""
    file, out = write(tmp_path / "in.jsonl", requests()), tmp_path / "whole.jsonl"
    assert command("-i", file, "-o", out, *IN_MEMORY, "--seed", 5).status == 0
    return records(out)


@pytest.mark.parametrize(
    ("error", "status", "order"),
    [(KeyboardInterrupt(), 130, ("--ordered",)), (OSError(28, "No space left on device"), 2, ())],
)
def test_a_job_goes_on_where_it_ended(
    command: Any, out: Path, tmp_path: Path, whole: Any, error: BaseException, status: int, order: tuple[str, ...]
) -> None:
    flags = ("-i", tmp_path / "in.jsonl", "-o", out, *ON_DISK, *order)
    for count in (0, 4):
        with ended_after(count, error):
            ended = command(*flags, "--resume", *(("--seed", 5) if count == 0 else ()))
        assert ended.status == status
        assert any(f"{count} of 9 requests are done; --resume goes on with the others" in line for line in ended.err)
    with out.open("ab") as opened:
        opened.write(b'{"id": "batch_req_8", "cust')
    result = command(*flags, "--resume")
    assert result.status == 0 and records(out) == whole
    assert not order or ids(out) == [f"r{n}" for n in range(9)]
    assert command(*flags, "--resume").status == 0 and records(out) == whole, "nothing is left to be done"
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert (manifest["seed"], len(manifest["runs"]), manifest["result"]["requests"]) == (5, 4, 9)
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith("out")} == {"out.jsonl", "out.manifest.json"}


@pytest.mark.parametrize(
    "kept",
    [
        ("--kv-policy", "h2o", "--heavy", "4", "--recent", "4"),
        ("--compress-cache",),
        ("--compress-cache", "--prefix-policy", "judged"),
    ],
    ids=["evicted", "packed", "packed and judged"],
)
def test_a_request_that_goes_on_alone_keeps_what_was_shared(
    command: Any, out: Path, tmp_path: Path, kept: tuple[str, ...]
) -> None:
    """A shared prefix is never evicted, and packed before others attend it, so what the last request of a group attends must
    not depend on which are done."""
    header = [5 + 7 * n % 100 for n in range(40)]
    lines = [{"custom_id": f"r{n}", "prompt": [*header, *range(n + 1, n + 20)], "max_tokens": 12} for n in range(5)]
    file, whole = write(tmp_path / "in.jsonl", lines), tmp_path / "whole.jsonl"
    flags = (*IN_MEMORY, *kept, "--logprobs", 0, "--return-token-ids")
    assert command("-i", file, "-o", whole, *flags).status == 0
    with ended_after(4, KeyboardInterrupt()):
        assert command("-i", file, "-o", out, *flags).status == 130
    assert command("-i", file, "-o", out, *flags, "--resume").status == 0
    assert records(out) == records(whole)
    alone = tmp_path / "alone.jsonl"
    (left,) = set(records(whole)) - set(ids(out)[:4])
    one = write(tmp_path / "one.jsonl", [lines[int(left[1:])]])
    assert command("-i", one, "-o", alone, *flags).status == 0
    assert records(alone) != {left: records(whole)[left]}, "what it shares makes a difference"


def test_failed_requests_run_again_if_asked_for(command: Any, out: Path, tmp_path: Path, whole: Any) -> None:
    flags = ("-i", tmp_path / "in.jsonl", "-o", out, *IN_MEMORY)
    assert command(*flags, "--seed", 5).status == 0
    lines = out.read_text().splitlines()
    broken = json.loads(lines[3]) | {"error": {"code": "server_error", "message": "lost"}}
    write(out, [*lines[:3], broken, *lines[4:]])
    assert command(*flags, "--resume").status == 1, "a failed request is done"
    assert command(*flags, "--retry-errors").status == 0 and records(out) == whole


def test_a_file_that_has_grown_is_gone_on_with(command: Any, out: Path, tmp_path: Path, whole: Any) -> None:
    file = write(tmp_path / "part.jsonl", requests()[:5])
    assert command("-i", file, "-o", out, *IN_MEMORY, "--seed", 5).status == 0
    write(file, requests())
    assert command("-i", file, "-o", out, *IN_MEMORY, "--resume").status == 0 and records(out) == whole


def test_an_input_that_changes_while_the_job_runs_ends_it(command: Any, out: Path, tmp_path: Path, monkeypatch: Any) -> None:
    file = write(tmp_path / "in.jsonl", requests())
    before, add = file.read_bytes(), JobOutput.add

    def add_and_change(self: JobOutput, place: int, line: bytes, failed: bool) -> None:
        add(self, place, line, failed)
        file.write_bytes(before.replace(b"text", b"TEXT"))

    flags = ("-i", file, "-o", out, *IN_MEMORY)
    with monkeypatch.context() as changed:
        changed.setattr(JobOutput, "add", add_and_change)
        result = command(*flags)
    said = f"of {file} is another one than when it was checked; put the file back as it was, and go on with --resume"
    assert result.status == 2 and result.said[-1].endswith(said)
    file.write_bytes(before)
    assert command(*flags, "--resume").status == 0 and len(records(out)) == 9


def test_another_job_is_refused_by_what_differs(command: Any, out: Path, tmp_path: Path, llama: Path) -> None:
    file = write(tmp_path / "in.jsonl", requests(3))
    flags = ("-i", file, "-o", out, *IN_MEMORY)
    assert command(*flags, "--temperature", 0.5, "--seed", 5).status == 0
    before = out.read_bytes()
    again = (*flags, "--resume")
    began = "error: the job in --output-file out.jsonl was begun with other options: "
    assert command(*again).error == (
        f"{began}temperature was 0.5 and is 0.0; give them as they were, or another --output-file; --resume-anyway goes on"
    )
    as_before = (*again, "--temperature", 0.5)
    assert "ordered was False and is True" in command(*as_before, "--ordered").error
    evicting = ("--kv-policy", "h2o", "--head-budgets", "equal")
    assert "--kv-policy was 'full' and is 'h2o'" in command(*as_before, *evicting).error
    unshared = command(*as_before, "--schedule", "row_by_row").error
    assert "--shared-prefixes was True and is False" in unshared, "this schedule shares none"
    assert "--seed is 6, but the job in --output-file out.jsonl was begun with 5" in command(*as_before, "--seed", 6).error
    assert "the model's dtype was 'float32' and is 'bfloat16'" in command(*as_before, "--dtype", "bfloat16").error
    other = tmp_path / "other"
    save_tiny("llama-gqa", other, seed=1)
    of_another = command(*as_before, "--model", other).error
    assert "other options: the model was " in of_another and " and is " in of_another and "weights" not in of_another
    write(file, [*requests(2), requests(3)[2] | {"prompt": "other"}, requests(4)[3]])
    assert "is not the input that the job in --output-file was begun with" in command(*as_before).error
    assert out.read_bytes() == before
    anyway = command(*flags, "--resume-anyway", "--temperature", 0.1)
    assert anyway.status == 0 and ids(out)[3:] == ["r3"], "what is asked for by name is done"


# -- as a process of its own -------------------------------------------------------------------------------------------

WORDS = (
    "the",
    "old",
    "captain",
    "of",
    "a",
    "ship",
    "looked",
    "at",
    "his",
    "sister",
    "and",
    "said",
    "that",
    "it",
    "was",
    "dark",
)
ON_ALL_TIERS = ("--percent", "0", "50", "0", "50", "0", "50", "--gpu-batch-size", "8", "--num-gpu-batches", "2")
# of the models of the package the one whose process begins soonest: transformers imports seconds' worth for a LLaMA
DEMO = ("--model", "demo-opt", "--dtype", "float32", "--device", "cpu", "--verbose", "0", "--seed", "5", *ON_ALL_TIERS)
BATCH = ("h2o_flexgen.batch",)
ROOT = Path(__file__).resolve().parents[2]

JOB = 24  # requests: one and a half times the rows that are computed at once


def held_behind(records: int) -> tuple[object, ...]:
    """A job that waits behind so many records to be ended."""
    return "tests.helpers.held_job", records


def started(*flags: object, program: Sequence[object] = BATCH, **how: Any) -> subprocess.Popen[str]:
    """A module that is run as a program: the command, or one that plays a part in it. It begins with flags of its own."""
    command = [sys.executable, "-m", *map(str, (*program, *flags))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, **how)


def has_ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, err


def when(process: subprocess.Popen[str], is_so: Callable[[], bool]) -> None:
    """Waits until something is so, or the process has ended."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not is_so() and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.005)


def has_lines(path: Path, count: int) -> bool:
    return path.exists() and path.read_bytes().count(b"\n") >= count


@contextmanager
def of_at_most(nbytes: int, file: Path) -> Iterator[None]:
    """A context in which a file gets no more bytes, as on a full disk. All others of this process do."""
    write = os.write

    def limited(descriptor: int, given: bytes) -> int:
        found = os.fstat(descriptor)
        if not file.exists() or not os.path.samestat(found, file.stat()):
            return write(descriptor, given)
        if found.st_size >= nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, given[: nbytes - found.st_size])

    with patch.object(os, "write", limited):
        yield


def demo_requests(count: int) -> list[dict[str, Any]]:
    chance = random.Random(0)
    return [
        {
            "custom_id": f"r{n}",
            "prompt": " ".join(chance.choices(WORDS, k=chance.randint(3, 40))),
            "max_tokens": min(60, int(chance.expovariate(1 / 16)) + 1),
            "temperature": 0.8 * (n % 2),
        }
        for n in range(count)
    ]


def made_demo_job(folder: Path, count: int) -> tuple[Path, dict[str, Any]]:
    """A job for a model of the package, and its records if nothing happens to it, in the order of the input."""
    file, out = write(folder / "in.jsonl", demo_requests(count)), folder / "whole.jsonl"
    assert batch.main(["-i", str(file), "-o", str(out), *DEMO]) == 0
    found = records(out)
    return file, {f"r{n}": found[f"r{n}"] for n in range(count)}


@pytest.fixture(scope="module")
def demo_job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return made_demo_job(tmp_path_factory.mktemp("demo"), JOB)


def goes_on(out: Path, whole: dict[str, Any], *flags: object) -> None:
    """Lets a job come to its end: its records are those of one that nothing happened to."""
    assert batch.main([*map(str, flags), "-o", str(out), *DEMO, "--resume"]) == 0
    assert records(out) == whole
    assert "--ordered" not in flags or ids(out) == [*whole]
    assert not waiting_file(out).exists()


def test_what_is_killed_loses_nothing(demo_job: Any, out: Path) -> None:
    file, whole = demo_job
    process = started("-i", file, "-o", out, *DEMO, program=held_behind(JOB - 4))
    when(process, partial(has_lines, out, JOB // 2))
    process.kill()
    has_ended(process)
    assert JOB // 2 <= out.read_bytes().count(b"\n") < JOB
    goes_on(out, whole, "-i", file)


@pytest.mark.slow
@pytest.mark.parametrize("order", [(), ("--ordered",)])
def test_what_is_killed_at_many_moments_loses_nothing(tmp_path: Path, out: Path, order: tuple[str, ...]) -> None:
    """Fifteen kills in each order: three while a job begins, the others at any moment after that."""
    (tmp_path / "demo").mkdir()
    file, whole = made_demo_job(tmp_path / "demo", 300)
    chance, manifest = random.Random(len(order)), tmp_path / "out.manifest.json"

    def written() -> int:
        return manifest.stat().st_mtime_ns if manifest.exists() else 0

    def moment(from_start: bool, seconds: float) -> Callable[[], bool]:
        """So many seconds after the process was started, or after its job has begun."""
        before, begun = written(), [time.monotonic()] if from_start else []

        def is_now() -> bool:
            if not begun and written() != before:
                begun.append(time.monotonic())
            return bool(begun) and time.monotonic() > begun[0] + seconds

        return is_now

    kills = 0
    while kills < 15:
        from_start = kills % 5 == 4
        process = started(*order, "-i", file, "-o", out, *DEMO, "--resume")
        when(process, moment(from_start, chance.uniform(0, 4 if from_start else 3)))
        kills += process.poll() is None
        process.kill()
        has_ended(process)
        if process.returncode == 0:  # it was over before: another one is killed
            goes_on(out, whole, "-i", file, *order)
            out.unlink()
            manifest.unlink()
    goes_on(out, whole, "-i", file, *order)


def test_a_signal_ends_a_job_between_two_passes(demo_job: Any, out: Path) -> None:
    file, whole = demo_job
    process = started("-i", file, "-o", out, *DEMO, program=held_behind(8), preexec_fn=as_in_a_terminal)
    when(process, partial(has_lines, out, 5))
    process.send_signal(signal.SIGTERM)
    status, err = has_ended(process)
    lines = err.splitlines()
    assert (status, lines[-1]) == (143, "terminated"), err
    done = len(ids(out))
    assert 5 <= done < len(whole) and any(f"{done} of {JOB} requests are done; --resume" in line for line in lines)
    goes_on(out, whole, "-i", file)


def test_a_full_disk_loses_nothing(demo_job: Any, out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, whole = demo_job
    in_memory = ("--percent", "0", "100", "0", "100", "0", "100")  # nothing but the output is written
    with of_at_most(5_000, out):
        ended = called(batch.main, capfd, "-i", file, "-o", out, *DEMO, *in_memory)
    assert (ended.status, ended.err[-1]) == (
        2,
        f"error: {out} cannot be written (No space left on device); whole records stay there: fix this, and go on with "
        "--resume",
    )
    assert 5 < len(ids(out)) < len(whole) and out.read_bytes().endswith(b"\n")
    goes_on(out, whole, "-i", file)
