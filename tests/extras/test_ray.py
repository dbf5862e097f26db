"""Engines as actors of Ray Data: what becomes of a batch of rows, the guide's example, and a job whose worker is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from h2o_flexgen import LLM, SamplingParams, batch
from h2o_flexgen.checkpoints.stale_files import RAY_PREFIX
from h2o_flexgen.cli.batch_request import RayRequest
from h2o_flexgen.cli.batch_run import Listening
from h2o_flexgen.cli.batch_work import ray_environment
from h2o_flexgen.cli.slow import small_job_reason
from h2o_flexgen.core.allowed_values import AUTO
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.job import BrokenRequest
from h2o_flexgen.engine.reports import Tick
from h2o_flexgen.evaluation.answer_settings import model_settings
from h2o_flexgen.jobs.line import LineReader
from h2o_flexgen.jobs.line_fields import Options as LineOptions
from h2o_flexgen.jobs.output import manifest_file
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.session.open_request import ModelRequest, OpenRequest, SiteRequest
from tests.commands.test_batch import (
    BATCH,
    DEMO,
    break_requests,
    demo_requests,
    has_ended,
    has_lines,
    held_behind,
    ids,
    records,
    started,
    when,
    write,
)
from tests.extras.held_worker import AT_OPENING, IN_PORTION, held_by
from tests.helpers.commands import called
from tests.helpers.patience import PATIENCE_SECONDS
from tests.helpers.signals import as_in_a_terminal
from tests.helpers.tiny import save_tiny

if TYPE_CHECKING:
    from h2o_flexgen.cli.ray_job import WorkerMessage
    from h2o_flexgen.ray import Engine

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra [ray]")

ROOT = Path(__file__).resolve().parents[2]
IN_MEMORY: dict[str, Any] = {"percent": (0, 100, 0, 100, 0, 100), "gpu_batch_size": 2, "num_gpu_batches": 2}
OPTIONS: dict[str, Any] = {"tokenizer": "bytes", "dtype": "float32", "device": "cpu"}
GREEDY, SAMPLING = {"max_tokens": 6}, "sampling_params"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny("llama-gqa", folder)
    return folder


@pytest.fixture
def engine(llama: Path) -> Iterator[Engine]:
    from h2o_flexgen.ray import Engine

    made = Engine(str(llama), sampling_params=GREEDY, seed=7, **OPTIONS, **IN_MEMORY)
    yield made
    made.close()


def column(values: list[Any]) -> np.ndarray:
    if all(isinstance(value, int) for value in values):
        return np.array(values, np.int64)
    found = np.empty(len(values), object)
    for place, value in enumerate(values):
        found[place] = np.array(value) if isinstance(value, list) else value
    return found


def answered(engine: Engine, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hands rows to an engine as Ray Data does: in columns, which hold None where a row lacks something."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = engine({name: column([row.get(name) for row in rows]) for name in names})
    assert {len(column) for column in columns.values()} == {len(rows)}
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


# -- batches -----------------------------------------------------------------------------------------------------------


def test_rows_are_held_to_what_they_ask_for(engine: Engine) -> None:
    pytest.importorskip("llguidance", reason="needs the extra [grammar]")
    of_schema = {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "minimum": 10, "maximum": 99}}}
    each = ({"structured_outputs": {"regex": "[A-F]{3}", "json": None}}, {"response_format": of_schema}, None)
    wrong = {"structured_outputs": {"regex": "(A"}}
    held, number, free, refused = answered(engine, [{"prompt": "x", SAMPLING: one} for one in (*each, wrong)])
    assert re.fullmatch("[A-F]{3}", held["generated_text"]) and held["finish_reason"] == "stop"
    assert re.fullmatch("[1-9][0-9]", number["generated_text"]) and free["finish_reason"] == "length"
    assert "the regular expression '(A' is refused" in refused["error"] and refused["generated_text"] == ""


def test_rows_get_what_the_engine_generates(engine: Engine) -> None:
    rows = [
        {
            "index": 40 + n,
            "prompt": "text " * (n + 1),
            SAMPLING: {"max_tokens": 3 + n, "temperature": 1.0 if n % 2 else None},
        }
        for n in range(5)
    ]
    found = answered(engine, rows)
    params = [SamplingParams(max_tokens=3 + n, temperature=n % 2) for n in range(5)]
    with LLM(engine.llm.name, tokenizer="bytes", dtype="float32", device="cpu", **IN_MEMORY) as llm:
        everything = [row["prompt"] for row in rows]
        expected = llm.generate([*["other"] * 40, *everything], [*[SamplingParams(max_tokens=1)] * 40, *params], seed=7)[40:]
    for row, one in zip(found, expected, strict=True):
        assert (row["prompt"], row["index"]) == (one.prompt, one.index)
        assert (row["generated_text"], list(row["generated_tokens"])) == (one.text, list(one.token_ids))
        assert (row["num_input_tokens"], row["num_generated_tokens"]) == (len(one.prompt_token_ids), len(one.token_ids))
        assert (row["finish_reason"], row["error"]) == (one.finish_reason, "")


def test_what_is_wrong_with_a_row_is_said_in_it(engine: Engine) -> None:
    rows: list[dict[str, Any]] = [
        {"index": 0, "prompt": "good"},
        {"index": 1, "prompt": ""},
        {"index": 2, "prompt": "good", SAMPLING: {"temperatur": 1.0}},
        {"index": 0, "prompt": "good"},
        {"index": 4, "prompt": "good", SAMPLING: {"n": 2}},
        {"index": 5},
        {"index": 6, "prompt": "long " * 1000},
        {"index": 7, "prompt": "good"},
    ]
    found = answered(engine, rows)
    said = [
        "",
        "the prompt is empty",
        "did you mean temperature",
        "which an earlier row has",
        "n is 2",
        "neither prompt nor messages",
    ]
    for row, words in zip(found, [*said, "the prompt has 5000 tokens", ""], strict=True):
        assert words in row["error"] and bool(row["error"]) == bool(words)
        assert bool(row["generated_text"]) != bool(words)
    assert found[0]["generated_text"] == found[7]["generated_text"]


def test_a_row_that_breaks_says_so_and_the_others_are_answered(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    break_requests(monkeypatch, 1)
    rows = [{"index": number, "prompt": "good"} for number in range(3)]
    found = answered(engine, rows)
    said = "logits of the prompt at step 0 have the maximum nan"
    assert [row["error"].partition(";")[0] for row in found] == ["", said, ""]
    assert found[0]["generated_text"] == found[2]["generated_text"] != "" == found[1]["generated_text"]


def test_rows_without_numbers_draw_alike_in_any_company(engine: Engine) -> None:
    drawn = {"temperature": 1.0}
    rows = [{"prompt": text, SAMPLING: drawn} for text in ("one", "two", "one")]
    first, second, third = (row["generated_text"] for row in answered(engine, rows))
    (alone,) = answered(engine, rows[1:2])
    assert alone["generated_text"] == second and first != third


def test_rows_are_chats_or_token_ids(engine: Engine) -> None:
    said = [{"role": "user", "content": "Hello"}]
    chat, ids = answered(engine, [{"messages": said, "prompt": None}, {"messages": None, "prompt": [7, 8, 9]}])
    (expected,) = engine.llm.chat(said, SamplingParams(**GREEDY))
    (of_ids,) = engine.llm.generate([[7, 8, 9]], SamplingParams(**GREEDY))
    assert (chat["generated_text"], ids["generated_text"]) == (expected.text, of_ids.text)
    assert answered(engine, []) == []


# -- a worker without a cluster ----------------------------------------------------------------------------------------


def said_by_worker(engine: Engine, asked: PlanRequirements | None, **identity: str) -> list[WorkerMessage]:
    """What a worker says of a portion of three requests."""
    from h2o_flexgen.cli.ray_job import Portion, SharedJob, Worker

    plan = engine.llm.plan if asked is None else asked.first_plan
    model = ModelRequest(engine.llm.name, engine.llm.name, dtype="float32", tokenizer="bytes")
    job = SharedJob(
        opening=OpenRequest(model, SiteRequest("cpu"), plan),
        seed=7,
        style=AUTO,
        asked=asked,
        reader=LineReader(True, LineOptions(SamplingParams(**GREEDY))),
        identity={**model_settings(engine.llm)[0], **identity},
        longest=Workload((4,) * 3, 6),
        scores_texts=False,
    )
    worker = Worker(job)
    lines = tuple((number, b'{"prompt": "good"}') for number in range(3))
    opened = [*worker.open()]
    return opened if opened[0].failure else [*opened, *worker.run(Portion(5, lines))]


@pytest.mark.parametrize("asked", [None, PlanRequirements(Plan())], ids=["given", "found"])
def test_a_worker_says_what_its_engine_generates(
    asked: PlanRequirements | None, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = engine.llm.generate(["good"], SamplingParams(**GREEDY))
    break_requests(monkeypatch, 1)
    opened, *said = said_by_worker(engine, asked)
    assert opened.opened is not None and {one.portion for one in said} == {5}
    outcomes = {one.outcome.index: one.outcome for one in said if one.outcome is not None}
    broken, others = outcomes.pop(1), outcomes.values()
    assert isinstance(broken, BrokenRequest) and "have the maximum nan" in broken.reason
    assert [isinstance(one, Completion) and one.token_ids for one in others] == [expected.token_ids] * 2
    assert said[-1].tick is not None and (said[-1].tick.alive, said[-1].tick.generated_tokens) == (0, 2 * GREEDY["max_tokens"])
    assert opened.opened.plan.block_size == (4 if asked is None else 3)


def test_a_worker_with_another_model_says_so(engine: Engine) -> None:
    (said,) = said_by_worker(engine, None, **{"the model's weights": "other"})
    assert said.failure is not None and "is another model there than on the machine that started the job" in said.failure


# -- a job without a cluster -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--workers", "2"), "--workers 2 is for a job on workers; add --ray local"),
        (("--hand-out", "2"), "--hand-out 2 is for a job on workers; add --ray local"),
        (("--ray", "ray://host:10001"), "run the job on one of its machines, with --ray auto"),
        (("--ray", "local", "--dry-run"), "each worker finds one for its own; leave out --ray"),
        (("--ray", "local", "--percent", "auto", "--allow-4bit"), "would have each worker of --ray choose for itself"),
        (("--ray", "local", "--kv-policy", "h2o"), "with --ray say --shared-prefixes 0"),
        (("--ray", "local", "--workers", "0"), "give a whole number from 1 to 1000"),
    ],
)
def test_what_cannot_be_asked_of_workers(
    flags: tuple[str, ...], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], llama: Path
) -> None:
    file = write(tmp_path / "in.jsonl", ["{}"])
    result = called(batch.main, capfd, "-i", file, "-o", tmp_path / "out.jsonl", "--model", llama, *flags)
    assert said in result.error


def tick(**counts: Any) -> Tick:
    names = ("number", "requests_done", "alive", "seats", "prompt_tokens", "generated_tokens", "computed_tokens")
    return Tick(**{**dict.fromkeys(names, 0), **counts}, prompt_seconds=0.0, decode_seconds=0.0, busy_seconds={"read": 1.0})


def test_portions_are_counted_together() -> None:
    heard = list[Tick]()
    watch: Any = SimpleNamespace(tick=heard.append)
    nothing: Any = SimpleNamespace(sync=lambda: False, are_asked=False)
    listening = Listening(watch, nothing, nothing, nothing)
    listening.tick_of(0, tick(number=3, alive=0, seats=4, computed_tokens=9))
    listening.tick_of(1, tick(number=2, alive=3, seats=4, computed_tokens=5))
    together = heard[-1]
    assert (together.number, together.computed_tokens, together.busy_seconds) == (5, 14, {"read": 2.0})
    assert (together.alive, together.seats) == (3, 4), "a portion that is done has no seats"
    listening.end_part(1)
    listening.tick_of(2, tick(computed_tokens=1))
    assert (heard[-1].alive, heard[-1].seats, heard[-1].computed_tokens) == (0, 0, 15), "nor one that is lost"


class Death(Exception):
    """What Ray raises where a worker has died."""


class Mistake(Death):
    """What Ray raises where a worker has raised an error."""


class PretendedRay:
    """Ray's part of handing out. Each worker says what its script has for each of its tasks."""

    exceptions = SimpleNamespace(RayError=Death, RayTaskError=Mistake)

    def __init__(self, *scripts: Sequence[Sequence[Any]]) -> None:
        self._scripts = iter(scripts)
        self.handed_out: list[tuple[int, ...]] = []
        self.killed = 0

    def new_worker(self) -> Any:
        tasks = iter(next(self._scripts))

        def open_model() -> Iterator[Any]:
            return iter(next(tasks))

        def run(portion: Any) -> Iterator[Any]:
            assert [line for _, line in portion.lines] == [b"line %d" % number for number, _ in portion.lines]
            self.handed_out.append(tuple(number for number, _ in portion.lines))
            return iter(next(tasks))

        def streaming(task: Any) -> Any:
            return SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=task))

        return SimpleNamespace(open=streaming(open_model), run=streaming(run))

    def wait(self, streams: Sequence[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return [streams[0]], [*streams[1:]]

    def get(self, said: Any) -> Any:
        if isinstance(said, Death):
            raise said
        return said

    def kill(self, worker: Any) -> None:
        self.killed += 1


def handed_out(
    ray: PretendedRay, workers: int, portions: Sequence[Sequence[int]], monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """What all workers say, of requests that are handed out in these portions."""
    from h2o_flexgen.cli import ray_job

    monkeypatch.setattr(ray_job, "ray", ray)
    waiting = deque(ray_job.WaitingPortions(numbers) for numbers in portions)
    handing = ray_job.Handing(ray.new_worker, lambda number: b"line %d" % number, workers, waiting)
    return list(handing.said(Event()))


def done(*numbers: int) -> list[Any]:
    from h2o_flexgen.cli.ray_job import WorkerMessage

    return [WorkerMessage(0, BrokenRequest(number, "it is done")) for number in numbers]


def test_what_a_dead_worker_had_not_done_is_run_again_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies after two of five requests, which ended in another order than they were handed out."""
    ray = PretendedRay([[], [*done(3, 1), Death("the connection\n\nis broken\n")]], [[], done(0, 4, 2), done(6, 5)])
    said = handed_out(ray, 1, [range(5), (5, 6)], monkeypatch)
    assert ray.handed_out == [(0, 1, 2, 3, 4), (0, 2, 4), (5, 6)] and ray.killed == 1
    assert [one.outcome.index for one in said if hasattr(one, "outcome")] == [3, 1, 0, 4, 2, 6, 5]
    (lost,) = (one for one in said if not hasattr(one, "outcome"))
    assert str(lost) == "a worker has died (is broken); another one starts, and 3 requests are run again"


def test_a_worker_that_dies_with_nothing_left_to_do_has_no_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = PretendedRay([[], [*done(0), Death("gone")]])
    assert len(handed_out(ray, 1, [(0,)], monkeypatch)) == 2 and ray.killed == 1


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ([[], [Death("gone")]], "4 workers have died while they ran the same 2 requests (gone); --resume goes on"),
        ([[Death("gone")]], "4 workers have died while they opened the model (gone)"),
        ([[], [Mistake("a mistake")]], "a worker cannot go on: a mistake"),
    ],
)
def test_what_kills_every_worker_ends_the_job(script: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        handed_out(PretendedRay(*[script] * 4), 1, [(0, 1)], monkeypatch)


def test_portions_are_shares_of_the_tokens_that_are_left() -> None:
    from h2o_flexgen.cli.ray_job import MOST_PORTION, cut, cut_evenly

    even = [10] * 1000
    sizes = [len(part) for part in cut(range(1000), even, 2, 500)]
    assert sizes[:2] == [250, 187 + 1] and sizes == sorted(sizes, reverse=True) and min(sizes[:-1]) >= 50
    uneven = [1] * 90 + [91] * 10
    parts = cut(range(100), uneven, 2, 1)
    loads = [sum(uneven[place] for place in part) for part in parts]
    assert loads[0] == 90 + 2 * 91 and len(parts[0]) == 92, "tokens count, not requests"
    assert [*chain(*parts)] == [*range(100)]
    assert cut(range(150), even[:150], 1, 10) == [range(150)], "one worker needs no shares"
    assert [len(part) for part in cut(range(10), even[:10], 2, 10_000)] == [5, 5], "no worker has nothing to do"
    assert max(map(len, cut(range(9000), [1] * 9000, 1, 1))) == MOST_PORTION
    assert cut_evenly(range(5), 2) == [range(2), range(2, 4), range(4, 5)]


def test_workers_leave_cores_to_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from h2o_flexgen.cli import ray_cluster

    monkeypatch.setattr(ray_cluster, "cores", lambda: 8)
    monkeypatch.setattr(ray_cluster, "quota_cores", lambda: 8.0)
    asked = RayRequest("local", 2, None, False)
    assert [ray_cluster.local_threads(asked, None, busy) for busy in (0.0, 4.1, 9.0)] == [4, 2, 1]
    assert ray_cluster.local_threads(asked, 3, 9.0) == 3


def test_a_cluster_that_is_joined_leaves_signals_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray has SIGTERM raise SystemExit, which would be another status than that of a command that is terminated."""
    from h2o_flexgen.cli import ray_cluster

    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    own = signal.getsignal(signal.SIGTERM)

    def begins(address: str, **others: Any) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        if address == "slow":
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ray_cluster.ray, "init", begins)
    try:
        with ray_cluster.joined("quick"):
            assert signal.getsignal(signal.SIGTERM) is own and not heard
        with pytest.raises(SystemExit), ray_cluster.joined("slow"):
            pass
        assert signal.getsignal(signal.SIGTERM) is own and heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ray_that_cannot_start_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, short_folder: Path) -> None:
    from h2o_flexgen.cli import ray_cluster

    def fails(*address: str, **others: Any) -> None:
        raise RuntimeError("Timed out waiting\n for a file")

    monkeypatch.setattr(ray_cluster.ray, "init", fails)
    monkeypatch.setattr(ray_cluster, "folder_of_sockets", lambda: short_folder)
    said = re.escape("Ray cannot start on this machine (Timed out waiting for a file); leave out --ray")
    with pytest.raises(ValueError, match=said), ray_cluster.connected(RayRequest("local", 1, None, False), 1):
        pass
    assert list(short_folder.iterdir()) == []


def test_an_alarm_of_rays_library_is_taken_back() -> None:
    """It sets one when it hears SIGTERM, and aborts the process after it."""
    from h2o_flexgen.cli import ray_cluster

    try:
        with pytest.raises(KeyboardInterrupt), ray_cluster.waiting():
            signal.alarm(1000)
            raise KeyboardInterrupt
        assert signal.alarm(0) == 0
    finally:
        signal.alarm(0)


def test_a_small_job_on_this_machine_is_told_what_it_cost() -> None:
    assert small_job_reason(1, 9.0, 1.0) is None, "that was said before"
    assert small_job_reason(2, 9.0, 9.5) is None
    said = small_job_reason(3, 9.04, 4.5)
    assert said == "Ray took 9.0 s to start, and 3 workers 4.5 s for the requests; without --ray one process has so few sooner"


def test_settings_of_a_cluster_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    before = dict(os.environ)
    with ray_environment():
        assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert dict(os.environ) == before


class RayHere:
    """Ray with actors in this process, which work as far as they are asked. One of them dies after so many messages."""

    exceptions = PretendedRay.exceptions
    put = get = staticmethod(lambda given: given)
    kill = staticmethod(lambda worker: None)

    def __init__(self, messages: int) -> None:
        self._left = messages
        self.workers: list[Any] = []

    def remote(self, kind: Any) -> Any:
        return SimpleNamespace(options=lambda **how: SimpleNamespace(remote=partial(self._begins, kind)))

    def _begins(self, kind: Any, share: Any) -> Any:
        worker = kind(share)
        self.workers.append(worker)
        return SimpleNamespace(open=self._streaming(worker.open), run=self._streaming(worker.run))

    def _streaming(self, work: Any) -> Any:
        return SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=lambda *given: self._said(work(*given))))

    def _said(self, messages: Iterator[Any]) -> Iterator[Any]:
        for message in messages:
            self._left -= 1
            if not self._left:
                raise Death("gone")
            yield message

    @staticmethod
    def wait(streams: Sequence[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return [streams[0]], [*streams[1:]]


def test_a_job_of_workers_goes_on_as_that_of_one_process(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some requests are done, two lines are empty, and a worker dies."""
    from h2o_flexgen.cli import ray_cluster, ray_job

    lines: list[Any] = [
        {"custom_id": f"r{n}", "prompt": "word " * (1 + n % 4), "max_tokens": 2 + n % 5, "temperature": 0.8 * (n % 2)}
        for n in range(12)
    ]
    lines[7:7], lines[:0] = [""], [""]
    file, alone, out = write(tmp_path / "in.jsonl", lines), tmp_path / "alone.jsonl", tmp_path / "out.jsonl"
    plan = ("--percent", "0", "100", "0", "100", "0", "100", "--gpu-batch-size", "2", "--offload-dir", str(tmp_path / "off"))
    model = ("--model", str(llama), "--tokenizer", "bytes", "--dtype", "float32", "--device", "cpu", "--seed", "5", *plan)
    assert batch.main(["-i", str(file), "-o", str(alone), *model]) == 0
    manifest_file(out).write_bytes(manifest_file(alone).read_bytes())
    out.write_text("".join(alone.read_text().splitlines(keepends=True)[2:6]))
    here = RayHere(messages=7)
    monkeypatch.setattr(ray_job, "ray", here)
    monkeypatch.setattr(ray_job, "connected", lambda *asked: nullcontext(ray_cluster.Pool(2, 1, 0, 1)))
    on_workers = ("--ray", "local", "--workers", "2", "--hand-out", "3", "--resume")
    try:
        assert batch.main(["-i", str(file), "-o", str(out), *model, *on_workers]) == 0
        assert records(out) == records(alone) and len(here.workers) == 3
    finally:
        for worker in here.workers:
            worker._engine.close()


# -- on a cluster ------------------------------------------------------------------------------------------------------


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for sockets, whose names may not be long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def in_own_folder(folder: Path) -> dict[str, str]:
    """The environment of a process whose temporary files lie there. Ray would let its workers have what others leave of the
    processor, which can be next to nothing."""
    return {**os.environ, "TMPDIR": str(folder), "RAY_worker_niceness": "0"}


def started_on_workers(
    file: Path, out: Path, folder: Path, *flags: str, program: Sequence[object] = BATCH
) -> subprocess.Popen[str]:
    """A job of two workers in a process of its own, with this folder for temporary files."""
    on_workers = ("--ray", "local", "--workers", "2", "--hand-out", "12")
    return started(
        "-i", file, "-o", out, *DEMO, *on_workers, *flags, program=program,
        preexec_fn=as_in_a_terminal, env=in_own_folder(folder),
    )  # fmt: skip


@pytest.mark.slow
def test_a_job_whose_worker_is_killed_is_that_of_one_process(tmp_path: Path, short_folder: Path) -> None:
    """A worker is killed in the middle of its portion, where it is held. Nothing is missing, nothing comes twice, and nothing
    stays behind, also of what an earlier job had to leave that was killed."""
    file, out, alone = write(tmp_path / "in.jsonl", demo_requests(48)), tmp_path / "out.jsonl", tmp_path / "alone.jsonl"
    assert batch.main(["-i", str(file), "-o", str(alone), *DEMO]) == 0
    (short_folder / f"{RAY_PREFIX}dead").mkdir()
    numbers = tmp_path / "held"
    process = started_on_workers(file, out, short_folder, program=("tests.extras.held_worker", IN_PORTION, numbers))
    when(process, lambda: bool(held_by(numbers)) and has_lines(out, 8))
    begun = children(process) if process.poll() is None else []
    assert begun, has_ended(process)
    for number in held_by(numbers):
        os.kill(number, signal.SIGKILL)
    shown, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0 and len(held_by(numbers)) == 1, err
    assert records(out) == records(alone) and len(records(out)) == 48
    document = json.loads(shown.splitlines()[-1])  # Ray says before it that a worker has died
    assert (document["requests_done"], document["requests_failed"]) == (48, 0)
    psutil.wait_procs(begun, timeout=PATIENCE_SECONDS)
    assert not any(map(is_running, begun)) and list(short_folder.iterdir()) == []


@pytest.mark.slow
def test_an_interrupted_job_goes_on_to_its_end(tmp_path: Path, short_folder: Path) -> None:
    """Ended three times, each in another way, and then run to its end. What it says last is one line."""
    file, out, alone = write(tmp_path / "in.jsonl", demo_requests(160)), tmp_path / "out.jsonl", tmp_path / "alone.jsonl"
    assert batch.main(["-i", str(file), "-o", str(alone), *DEMO]) == 0
    ways = ((signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated"), (signal.SIGKILL, -signal.SIGKILL, ""))
    begun: list[psutil.Process] = []
    for count, (number, status, word) in enumerate(ways, 1):
        before = len(ids(out)) if out.exists() else 0
        process = started_on_workers(file, out, short_folder, "--resume", program=held_behind(16))
        when(process, partial(has_lines, out, before + 8))
        begun += children(process)
        process.send_signal(number)
        ended, err = has_ended(process)
        assert ended == status and (not word or err.splitlines()[-1] == word), err
        assert "Traceback" not in err and 8 * count <= len(set(ids(out))) < 160
        assert len(list(short_folder.iterdir())) == (number == signal.SIGKILL)
    process = started_on_workers(file, out, short_folder, "--resume")
    assert has_ended(process)[0] == 0
    assert len(ids(out)) == 160 and records(out) == records(alone) and list(short_folder.iterdir()) == []
    psutil.wait_procs(begun, timeout=PATIENCE_SECONDS)  # two of Ray's see after a minute that a process was killed
    assert not any(map(is_running, begun))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_ray_starts_leaves_nothing(number: int, status: int, tmp_path: Path, short_folder: Path) -> None:
    """No worker comes to open its model, so the job is not over, however late the signal comes."""
    file, out, numbers = write(tmp_path / "in.jsonl", demo_requests(4)), tmp_path / "out.jsonl", tmp_path / "held"
    process = started_on_workers(file, out, short_folder, program=("tests.extras.held_worker", AT_OPENING, numbers))
    when(process, lambda: any(place.name.startswith("session_2") for place in short_folder.glob("*/*")))
    process.send_signal(number)
    begun = children(process)
    ended, err = has_ended(process)
    assert ended == status and err.splitlines()[-1] in ("interrupted", "terminated") and "Traceback" not in err, err
    psutil.wait_procs(begun, timeout=PATIENCE_SECONDS)
    assert not any(map(is_running, begun)) and list(short_folder.iterdir()) == []


CONNECTED = """
from h2o_flexgen.cli.ray_job import connected
from h2o_flexgen.cli.batch_request import RayRequest
from h2o_flexgen.cli.batch_work import ray_environment
with ray_environment(), connected(RayRequest("local", 1, None, False), 1):
"""


@pytest.mark.slow
def test_the_guides_example_runs(short_folder: Path) -> None:
    """In a process of its own: one that has begun and ended Ray several times was seen to be aborted by it."""
    (example,) = re.findall(
        r"^```python\n(import ray\n.*?)^```", (ROOT / "docs/guide.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(example.splitlines()) <= 17
    command = [sys.executable, "-c", f"{CONNECTED}    exec({example!r}, {{}})"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=in_own_folder(short_folder))
    assert done.returncode == 0, done.stderr
    assert all(f"The {name} of the ship" in done.stdout for name in ("captain", "owner", "master", "pilot"))
