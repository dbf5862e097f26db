"""Engines as actors of Ray Data: what becomes of a batch of rows, the guide's example, and a job whose worker is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from h2o_flexgen import LLM, SamplingParams, batch
from h2o_flexgen.cli.batch_request import RayRequest
from h2o_flexgen.cli.ray_environment import ray_environment
from h2o_flexgen.engine.tick import Tick
from tests.commands import called
from tests.signals import as_in_a_terminal
from tests.test_batch import DEMO, demo_requests, has_ended, has_lines, records, when, write
from tests.tiny import save_tiny

if TYPE_CHECKING:
    from h2o_flexgen.ray import Engine

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra [ray]")

ROOT = Path(__file__).resolve().parents[1]
IN_MEMORY: dict[str, Any] = {"percent": (0, 100, 0, 100, 0, 100), "gpu_batch_size": 2, "num_gpu_batches": 2}
GREEDY, SAMPLING = {"max_tokens": 6}, "sampling_params"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny("llama-gqa", folder)
    return folder


@pytest.fixture
def engine(llama: Path) -> Iterator[Engine]:
    from h2o_flexgen.ray import Engine

    options = {"tokenizer": "bytes", "dtype": "float32", "device": "cpu", **IN_MEMORY}
    made = Engine(str(llama), sampling_params=GREEDY, seed=7, **options)
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
        "as of a row before",
        "n is 2",
        "neither prompt nor messages",
    ]
    for row, words in zip(found, [*said, "the prompt has 5000 tokens", ""], strict=True):
        assert words in row["error"] and bool(row["error"]) == bool(words)
        assert bool(row["generated_text"]) != bool(words)
    assert found[0]["generated_text"] == found[7]["generated_text"]


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
    from h2o_flexgen.cli.batch_watch import Ticks

    ticks = Ticks(
        {0: tick(number=3, alive=0, seats=4, computed_tokens=9), 1: tick(number=2, alive=3, seats=4, computed_tokens=5)}
    )
    together = ticks.together
    assert (together.number, together.computed_tokens, together.busy_seconds) == (5, 14, {"read": 2.0})
    assert (together.alive, together.seats) == (3, 4), "a portion that is done has no seats"


@pytest.mark.parametrize(("again", "rounds"), [((0, 1, 2, 3), 1), ((1, 3, 0, 2), 2)])
def test_what_a_second_try_leaves_out_is_run_again(
    again: tuple[int, ...], rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies after two completions. Ray leaves out as many of the second try, in whatever order they come."""
    from h2o_flexgen.cli import batch_ray

    handed_out: list[tuple[int, ...]] = []

    class Job(batch_ray.RayJob):
        def _round(self, pool: Any, places: Sequence[int]) -> Any:
            handed_out.append(tuple(places))
            for place in (0, 1, *again[2:]) if len(handed_out) == 1 else places:
                yield place, SimpleNamespace(index=place)

    @contextmanager
    def no_cluster(*asked: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(batch_ray, "connected", no_cluster)
    monkeypatch.setattr(batch_ray, "Completion", SimpleNamespace)
    nobody: Any = SimpleNamespace(site=SimpleNamespace(threads=None))
    job = Job(nobody, RayRequest("local", 1, None, False), SimpleNamespace(sizes=[0] * 4), 0, {}, nobody, nobody)  # type: ignore[arg-type]
    assert sorted(one.index for one in job.completions()) == [0, 1, 2, 3]
    assert len(handed_out) == rounds and all(len(places) < 4 for places in handed_out[1:])


def test_settings_of_a_cluster_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    before = dict(os.environ)
    with ray_environment():
        assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert dict(os.environ) == before


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


def test_a_job_whose_worker_is_killed_is_that_of_one_process(tmp_path: Path, short_folder: Path) -> None:
    """Two workers; one is killed after some records. Nothing is missing, nothing comes twice, and nothing stays behind."""
    file, out, alone = write(tmp_path / "in.jsonl", demo_requests(48)), tmp_path / "out.jsonl", tmp_path / "alone.jsonl"
    assert batch.main(["-i", str(file), "-o", str(alone), *DEMO]) == 0
    on_workers = ("--ray", "local", "--workers", "2", "--hand-out", "12")
    command = [sys.executable, "-m", "h2o_flexgen.batch", "-i", str(file), "-o", str(out), *DEMO, *on_workers]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=as_in_a_terminal,
        env={**os.environ, "TMPDIR": str(short_folder)},
    )  # fmt: skip
    when(process, lambda: has_lines(out, 8))
    begun = children(process) if process.poll() is None else []
    workers = [one for one in begun if "MapWorker" in one.name() or "MapWorker" in "".join(one.cmdline())]
    assert len(workers) == 2, has_ended(process)
    os.kill(workers[0].pid, signal.SIGKILL)
    shown, err = process.communicate()
    assert process.returncode == 0, err
    assert records(out) == records(alone) and len(records(out)) == 48
    document = json.loads(shown.splitlines()[-1])  # Ray says before it that a worker has died
    assert (document["requests_done"], document["requests_failed"]) == (48, 0)
    psutil.wait_procs(begun, timeout=60)
    assert not any(map(is_running, begun)) and list(short_folder.iterdir()) == []


CONNECTED = """
from h2o_flexgen.cli.batch_ray import connected
from h2o_flexgen.cli.batch_request import RayRequest
from h2o_flexgen.cli.ray_environment import ray_environment
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
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "TMPDIR": str(short_folder)}
    )
    assert done.returncode == 0, done.stderr
    assert all(f"The {name} of the ship" in done.stdout for name in ("captain", "owner", "master", "pilot"))
