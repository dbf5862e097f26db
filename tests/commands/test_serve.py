"""The serve command, from its arguments to its end: what it says, what it refuses before it listens, and how signals end it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from openai import OpenAI

from h2o_flexgen import serve
from h2o_flexgen.cli import serve_work
from h2o_flexgen.cli.serve_request import parse, request_of
from h2o_flexgen.cli.watch import Crowd, open_llm
from h2o_flexgen.engine.reports import Tick
from h2o_flexgen.jobs.line import COMPLETIONS
from h2o_flexgen.server.counts import ServerCounts
from h2o_flexgen.server.desk import Desk
from h2o_flexgen.server.listening import ServerAddress
from tests.helpers.commands import Result, called
from tests.helpers.patience import PATIENCE_SECONDS
from tests.helpers.planted import CPU_MEM, OVER, SAID, plant_a_peak
from tests.helpers.pretended import PretendedDevice
from tests.helpers.tiny import save_tiny

PLAIN = ("--dtype", "float32", "--tokenizer", "bytes", "--device", "cpu", "--port", 0, "--served-model-name", "tiny")
GREEDY: dict[str, Any] = {"model": "tiny", "prompt": "The ferry", "temperature": 0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny("llama-gqa", folder)
    return folder


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], offload: Path, tiny: Path) -> Callable[..., Result]:
    return partial(called, serve.main, capfd, "--model", tiny, *PLAIN, "--offload-dir", offload)


def listened_at() -> set[int]:
    """The ports at which this process listens. Another one may have a port as soon as it is free."""
    return {one.laddr.port for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN}


class Visitor:
    """A client in a thread of its own, which comes when the server listens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, visit: Callable[[OpenAI], None]) -> None:
        self.failed: list[BaseException] = []
        self.place: ServerAddress | None = None
        self._visit = visit
        self._thread = threading.Thread(target=self._run)
        welcome = serve_work.Server._welcome

        def welcoming(server: serve_work.Server, place: ServerAddress) -> Iterator[str]:
            self.place = place
            self._thread.start()
            return welcome(server, place)

        monkeypatch.setattr(serve_work.Server, "_welcome", welcoming)

    def _run(self) -> None:
        assert self.place is not None
        url = f"http://127.0.0.1:{self.place.port}/v1"
        try:
            with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_SECONDS) as client:
                self._visit(client)
        except BaseException as error:
            self.failed.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    def has_been_there(self) -> None:
        self._thread.join(PATIENCE_SECONDS)
        assert self.failed == []
        assert self.place is not None and self.place.port not in listened_at(), "it listens on"


def test_a_signal_ends_it_when_everybody_has_an_answer(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []

    def visit(client: OpenAI) -> None:
        stream = client.completions.create(**GREEDY, max_tokens=20, stream=True)
        for chunk in stream:
            if not heard:
                os.kill(os.getpid(), signal.SIGTERM)
            heard.append(chunk.choices[0])

    visitor = Visitor(monkeypatch, visit)
    result = command("--gather", "0", "--rows", 3)
    visitor.has_been_there()
    assert result.status == 0 and heard[-1].finish_reason == "length"
    assert f"serving   tiny at http://127.0.0.1:{visitor.place.port}/v1: 3 seats, prompts of up to 97 tokens" in result.out[-2]
    assert "prompts   of up to 97 tokens, up to 32 to generate for each" in result.out, "how many will come is not known"
    assert result.said == ["note: shutting down: finishing admitted requests; another signal ends at once"]
    assert result.json["completions"] == {"length": 1} and result.json["answers"] == {"200": 1}
    assert result.json["generated_tokens"] == 20
    assert "prefixes  room for 96 tokens of what requests begin with alike, pinned" in result.out


def test_a_server_that_held_more_than_its_budget_says_so_at_its_end(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_a_peak(monkeypatch)
    visitor = Visitor(monkeypatch, lambda client: os.kill(os.getpid(), signal.SIGTERM))
    result = command("--gather", "0", "--rows", 3, *CPU_MEM)
    visitor.has_been_there()
    assert result.status == 0 and result.json["over_budget_bytes"]["host"] == OVER
    assert [line.startswith(SAID) for line in result.said if line.startswith("memory")] == [True]


def test_a_crowd_that_was_told_of_is_not_said_again_by_a_server(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(serve_work, "say_threads", lambda *_: True)
    monkeypatch.setattr(serve_work, "Crowd", lambda note, is_told: seen.append(is_told) or Crowd(note, is_told=is_told))
    visitor = Visitor(monkeypatch, lambda client: os.kill(os.getpid(), signal.SIGTERM))
    command("--gather", "0", "--rows", 3)
    visitor.has_been_there()
    assert seen == [True]


UNSHARED = "prefixes  nothing is shared"


@pytest.mark.parametrize(
    ("flags", "room", "said"),
    [
        ((), None, []),
        ((), 0, [f"{UNSHARED}: there is no room beside the seats"]),
        (("--prefix-room", 0), 0, []),
        (("--kv-policy", "h2o"), None, [f"{UNSHARED}, as answers would depend on it; not so with --prefix-policy judged"]),
        (("--kv-policy", "h2o", "--prefix-policy", "judged"), None, []),
        (("--compress-cache",), None, [f"{UNSHARED}, as answers would depend on it; --prefix-room says to share all the same"]),
        (("--compress-cache", "--prefix-room", 64), 64, []),
    ],
)
def test_why_requests_share_nothing_is_said(flags: Any, room: int | None, said: list[str], tiny: Path, offload: Path) -> None:
    request = request_of(parse([*map(str, ("--model", tiny, *PLAIN, "--offload-dir", offload, *flags))]))
    with open_llm(request.model, request.site, request.plan.first_plan) as llm:
        assert list(serve_work.Preparing(request, llm)._unshared(llm.arrivals(80, 9, prefix_room=room))) == said


@pytest.mark.parametrize(("on_host", "rows", "lines"), [(0, 3, 1), (0, 6, 0), (100, 3, 0)])
def test_seats_for_which_experts_are_brought_in_vain_are_named_with_those_that_would_ask_for_them(
    on_host: int, rows: int, lines: int, offload: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_tiny("mixtral", tmp_path / "tiny-mixtral")
    placed = ("--percent", 0, on_host, 0, 100, 0, 100, "--gpu-batch-size", rows, "--prompt-len", 8, "--gen-len", 4)
    flags = ("--model", tmp_path / "tiny-mixtral", *PLAIN, "--offload-dir", offload, *placed)
    request = request_of(parse([*map(str, flags)]))
    with open_llm(request.model, request.site, request.plan.first_plan) as llm:
        serve_work.Preparing(request, llm).server()
    found = [line for line in capfd.readouterr().err.splitlines() if "of the experts of a layer" in line]
    assert len(found) == lines
    assert all(line.startswith("slow: 3 rows ask for 88% of") and "take 6 rows at once" in line for line in found)


@pytest.mark.parametrize("graph_bytes", [None, 70_000])
def test_a_gpu_without_a_kept_check_is_named_with_what_checks_it(
    graph_bytes: int | None,
    tiny: Path,
    offload: Path,
    pretended: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(PretendedDevice, "graph_bytes", graph_bytes)
    placed = ("--percent", *(100, 0) * 3, "--gpu-batch-size", 2, "--prompt-len", 8, "--gen-len", 4)
    flags = ("--model", tiny, *PLAIN, "--device", "pretended", "--offload-dir", offload, *placed)
    request = request_of(parse([*map(str, flags)]))
    with open_llm(request.model, request.site, request.plan.first_plan) as llm:
        serve_work.Preparing(request, llm).server()
    found = [line for line in capfd.readouterr().err.splitlines() if "--graphs on takes them unchecked" in line]
    assert len(found) == (graph_bytes is None) and all(line.startswith("slow: graphs would replay") for line in found)


def test_a_second_signal_ends_it_at_once(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, closing, forever = threading.Event(), threading.Event(), threading.Event()
    tick, close = ServerCounts.tick, Desk.close

    def close_and_say(desk: Desk) -> None:
        close(desk)
        closing.set()

    def slow(counts: ServerCounts, one: Tick) -> None:
        tick(counts, one)
        if one.number == 3:
            asked.set()
            while not forever.wait(0.01):  # a signal that another thread takes up is heard between two waits
                pass

    def visit(client: OpenAI) -> None:
        with pytest.raises(openai.APIError, match="this server is ending"):
            stream = client.completions.create(**GREEDY, max_tokens=20, stream=True)
            next(iter(stream))
            assert asked.wait(PATIENCE_SECONDS)
            os.kill(os.getpid(), signal.SIGTERM)
            assert closing.wait(PATIENCE_SECONDS)  # two at once would be one
            os.kill(os.getpid(), signal.SIGTERM)
            list(stream)

    visitor = Visitor(monkeypatch, visit)
    monkeypatch.setattr(ServerCounts, "tick", slow)
    monkeypatch.setattr(Desk, "close", close_and_say)
    result = command("--gather", "0", "--verbose", 0, "--percent", 0, 50, 0, 50, 0, 50)
    visitor.has_been_there()
    assert result.status == 128 + signal.SIGTERM and result.said[-1] == "terminated"


# -- batches, whatever ends the server ---------------------------------------------------------------------------------------

DIES = """
import os, signal, sys
from h2o_flexgen.server.counts import ServerCounts
tick = ServerCounts.tick
def dies(counts, one):
    tick(counts, one)
    if one.number == 12:
        sys.stdin.readline()
        os.kill(os.getpid(), signal.SIGKILL)
ServerCounts.tick = dies
from h2o_flexgen.serve import main
raise SystemExit(main())
"""
REQUESTS = [{"prompt": f"Boat {place}", "max_tokens": 1 + place % 9, "n": 1 + place % 2} for place in range(30)]


def new_batch(client: OpenAI) -> str:
    lines = [{"custom_id": str(at), "method": "POST", "url": COMPLETIONS, "body": body} for at, body in enumerate(REQUESTS)]
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h").id


def answers_of(client: OpenAI, batch_id: str) -> dict[str, list[str]]:
    """What a batch says when it is over."""
    waiting = threading.Event()
    while (batch := client.batches.retrieve(batch_id)).status != "completed":
        assert batch.status in ("validating", "in_progress", "finalizing"), batch
        waiting.wait(0.01)
    records = map(json.loads, client.files.content(batch.output_file_id or "").text.splitlines())
    return {one["custom_id"]: [choice["text"] for choice in one["response"]["body"]["choices"]] for one in records}


def test_a_batch_goes_on_whatever_ends_the_server(
    command: Any, monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path
) -> None:
    flags = [*map(str, ("--gather", "0", "--rows", 3, "--data-dir", tmp_path / "kept", "--seed", 3))]
    place = tmp_path / "offload of the killed"
    killed = [sys.executable, "-c", DIES, "--model", str(tiny), *map(str, PLAIN), "--offload-dir", str(place), *flags]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(killed, text=True, **pipes) as process:
        assert process.stdout is not None and process.stdin is not None
        welcome = next(line for line in process.stdout if line.startswith("serving"))
        url = re.findall(r"http://[^/]+/v1", welcome)[0]
        with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_SECONDS) as client:
            batch = new_batch(client)
            process.stdin.close()  # it dies in its twelfth pass, and not before it has answered
    assert process.returncode == -signal.SIGKILL

    def status() -> str:
        found: str = json.loads((tmp_path / "kept" / "batches" / f"{batch}.json").read_text())["status"]
        return found

    assert status() in ("validating", "in_progress"), "the answer may have come before the check was over"
    with monkeypatch.context() as ended:
        tick = ServerCounts.tick

        def ends(counts: ServerCounts, one: Tick) -> None:
            tick(counts, one)
            if one.number == 12:
                os.kill(os.getpid(), signal.SIGTERM)

        ended.setattr(ServerCounts, "tick", ends)
        visitor = Visitor(ended, lambda client: None)
        result = command(*flags)
        visitor.has_been_there()
        assert result.status == 0 and status() == "in_progress" and len(result.said) == 1

    answers: list[dict[str, list[str]]] = []

    def visit(client: OpenAI) -> None:
        answers.append(answers_of(client, batch))
        answers.append(answers_of(client, new_batch(client)))
        os.kill(os.getpid(), signal.SIGTERM)

    visitor = Visitor(monkeypatch, visit)
    result = command(*flags)
    visitor.has_been_there()
    assert result.status == 0 and status() == "completed"
    assert answers[0] == answers[1] and len(answers[0]) == len(REQUESTS), "what was cut off says what a whole one says"


def test_whoever_reaches_it_from_elsewhere_is_spoken_of_and_has_to_show_a_key(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def visit(client: OpenAI) -> None:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert client.with_options(api_key="a-long-key").models.list().data[0].id == "tiny"
        os.kill(os.getpid(), signal.SIGTERM)

    keys = tmp_path / "keys"
    keys.write_text("another-key\n\na-long-key\n")
    visitor = Visitor(monkeypatch, visit)
    result = command("--host", "0.0.0.0", "--api-key-file", keys, "--verbose", 0)
    visitor.has_been_there()
    port = visitor.place.port
    assert result.said[0] == f"note: 0.0.0.0 is not this machine alone: any client that reaches port {port} may ask"
    assert result.status == 0 and "key" not in result.out[0]


def test_a_port_in_use_is_one_line_before_anything_is_opened(command: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = command("--port", port, "--model", "nothing/at-all").error
    reason = f"port {port} of 127.0.0.1 cannot be had (Address already in use); give another --port, or 0 for a free one"
    assert error == f"error: {reason}"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--cpu-mem", "100MB", "--percent", 0, 100, 0, 100, 0, 100), "error: plan needs"),
        (
            ("--prompt-len", 120, "--gen-len", 30),
            "error: --prompt-len and --gen-len: the prompt has 120 tokens",
        ),
        (("--host", "no.such.host.invalid"), "error: --host no.such.host.invalid is no address of this machine ("),
        (("--host", "a..b"), "error: --host a..b is no address of this machine (no name of a machine is written so); give one"),
        (("--host", "192.0.2.1"), "error: --host 192.0.2.1 is no address of this machine (Cannot assign requested address)"),
        (("--prefix-room", 5), "error: --prefix-room is 5, and a prefix has 32 tokens at least; give more, or 0"),
        (("--api-key-file", "/no/such/file"), "error: --api-key-file /no/such/file"),
        (("--api-key-file", os.devnull), f"error: --api-key-file {os.devnull} has no key; write one a line"),
    ],
)
def test_what_cannot_be_is_one_line_before_it_listens(
    command: Any, flags: tuple[object, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "listen", lambda *_: pytest.fail("it listens"))
    assert command(*flags).error.startswith(said)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--kv-policy", "h2o", "--head-budgets", "equal"),
            "(answers would depend on it); say --prefix-room TOKENS, or leave --prefix-dir out",
        ),
        (("--compress-cache",), "(answers would depend on it); say --prefix-room TOKENS, or leave --prefix-dir out"),
        (("--prefix-room", 0), "(--prefix-room is 0); give it tokens, or leave --prefix-dir out"),
        (
            ("--prompt-len", 20),
            "(prompts of 20 tokens are too short); give a longer --prompt-len, or leave --prefix-dir out",
        ),
    ],
)
def test_a_folder_of_prefixes_in_which_nothing_would_be_is_refused(
    command: Any, flags: tuple[object, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "listen", lambda *_: pytest.fail("it listens"))
    monkeypatch.chdir(tmp_path)
    assert command("--prefix-dir", "kept", *flags).error == f"error: --prefix-dir is 'kept', but requests share nothing {said}"


def test_a_short_key_is_refused(command: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-long-key\nshort\n")
    assert "has a key of fewer than 8 characters in line 2" in command("--api-key-file", keys).error
    assert json.dumps("short") not in command("--api-key-file", keys).error
