"""Several processes that do one job: their texts are those of one, weights are read once, and nothing is left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch import Tensor

from h2o_flexgen import SamplingParams, batch, run
from h2o_flexgen.checkpoints.checkpoint import HandedSource
from h2o_flexgen.cli import shared_work
from h2o_flexgen.cli.errors import Mendable
from h2o_flexgen.cli.process import PASSING_BYTES, ProcessPlace, PromptsPart, compute
from h2o_flexgen.cli.process_link import BytesTaken, Failed, Loaded, PartDone, Passing, ProcessLink
from h2o_flexgen.cli.shared_work import ProcessExchange
from h2o_flexgen.core.workload import dealt
from h2o_flexgen.engine.stores.weights import WeightStore
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.device import CudaDevice
from h2o_flexgen.memory.host import file_in_memory
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.session.open_request import ModelRequest, SiteRequest
from tests.helpers.commands import Result, called
from tests.helpers.contract import Case, Checkpoints
from tests.helpers.patience import PATIENCE_SECONDS
from tests.helpers.samples import every_nth, first_of
from tests.helpers.signals import as_in_a_terminal
from tests.helpers.sleeping_process import sleeping
from tests.helpers.tiny import save_tiny

SAMPLED = SamplingParams(max_tokens=5, temperature=0.9, n=2)


@contextmanager
def descriptors(count: int) -> Iterator[list[int]]:
    held = [file_in_memory() for _ in range(count)]
    yield held
    for one in held:
        os.close(one)


def together(llm: LLM, case: Case, offload: Path, parts: Sequence[Any], model: ModelRequest | None = None) -> list[Any]:
    """What is said by processes that are threads here: all else is as it is between processes."""
    source = llm.name
    model = model or ModelRequest("tiny", source, False, case.dtype, "bytes")
    pipes = [Pipe() for _ in parts]
    threads = []
    with descriptors(2) as (weights, passing):
        for number, part in enumerate(parts):
            site = SiteRequest(case.device, threads=1, offload_dir=str(offload.with_name(str(number))))
            place = ProcessPlace(number, model, site, llm.loaded.requested, weights, passing)
            threads.append(
                threading.Thread(target=compute, args=(ProcessLink(pipes[number][1]), place, part), name=str(number))
            )
        for thread in threads:
            thread.start()
        exchange = ProcessExchange([ProcessLink(mine) for mine, _ in pipes], str, lambda number: "has gone")
        try:
            return [news for _, news in exchange.said(nullcontext)]
        finally:
            for mine, _ in pipes:
                mine.close()
            for thread in threads:
                thread.join()


CASES = [
    Case(percent=(0, 100, 0, 100, 0, 100)),
    Case(percent=(30, 50, 40, 60, 0, 100), device="pretended", policy=(("kv_policy", "h2o"), ("kv_budget", 0.5))),
    Case(percent=(100, 0, 0, 50, 0, 0), device="pretended", kind="llama-gqa", lengths=(5, 9, 2, 7)),
    Case(percent=(40, 40, 0, 100, 100, 0), weight_codec="group4", kv_codec="group8", kind="qwen2", device="pretended"),
    Case(percent=(0, 40, 0, 50, 0, 100), weight_codec="group4", kind="qwen2", policy=(("kv_policy", "tova"), ("heavy", 4))),
    Case(percent=(20, 0, 100, 0, 100, 0), device="pretended", sep_layer=False, num_gpu_batches=1),
    Case(percent=(0, 50, 0, 0, 0, 100), kind="qwen3-5", lengths=(5, 9, 2, 7)),
]


@pytest.mark.parametrize("case", every_nth(CASES, 3), ids=str)
def test_texts_are_those_of_one_process_and_weights_are_read_once(
    case: Case, checkpoints: Checkpoints, offload: Path, pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with case.open(checkpoints, offload) as llm:
        expected = llm.generate(case.prompts, SAMPLED, seed=3)
        read, bring = Counter[tuple[str, bool]](), WeightStore._bring

        def bringing(self: WeightStore, tensor: Any, out: Tensor, source: Any, located: Any) -> None:
            read[tensor.name, isinstance(source, HandedSource)] += 1
            bring(self, tensor, out, source, located)

        monkeypatch.setattr(WeightStore, "_bring", bringing)
        dealt_to = dealt(case.lengths, 3)
        parts = [PromptsPart([case.prompts[n] for n in numbers], numbers, SAMPLED, 3) for numbers in dealt_to]
        said = together(llm, case, offload, parts)
        tiers = llm.planned(llm.prepare(case.prompts, SAMPLED).planned.workload).blocks.first.placement.weights
    found = sorted((one for one in said if isinstance(one, Completion)), key=lambda one: one.index)
    assert found == expected
    stats = [one.stats for one in said if isinstance(one, PartDone)]
    assert sum(one.num_prompts for one in stats if one is not None) == len(case.lengths)
    at_rest = [name for name, tier in tiers.items() if tier != "disk"]
    handed = [name for name in at_rest if case.device == "pretended" and tiers[name] == "device"]
    expected_reads = Counter({(name, False): 1 for name in at_rest})
    assert read == expected_reads + Counter({(name, True): len(parts) - 1 for name in handed})


def test_random_weights_of_a_disk_are_each_ones_own(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case(percent=(0, 40, 0, 100, 0, 100))
    model = ModelRequest("tiny", str(checkpoints.folder("opt")), True, case.dtype, "bytes")
    given = {"dummy_weights": True, "tokenizer": "bytes", "percent": case.percent, "dtype": "float32", "device": "cpu"}
    with LLM(model.source, offload_dir=offload, **given) as llm:
        expected = llm.generate(case.prompts, seed=0)
        parts = [PromptsPart([case.prompts[n]], [n], SamplingParams(), 0) for n in range(2)]
        said = together(llm, case, offload, parts, model)
    assert [one for n in range(2) for one in said if isinstance(one, Completion) and one.index == n] == expected[:2]


def test_a_process_with_another_plan_is_told(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case(percent=(0, 100, 0, 100, 0, 100))
    with case.open(checkpoints, offload) as llm, descriptors(2) as (weights, passing):
        os.ftruncate(weights, 4096)
        mine, its = Pipe()
        model, site = ModelRequest("tiny", llm.name, False, "float32", "bytes"), SiteRequest("cpu", 1, offload_dir=str(offload))
        ProcessLink(mine).say(Loaded(4096))
        part = PromptsPart([[1]], [0], SAMPLED, 0)
        assert compute(ProcessLink(its), ProcessPlace(1, model, site, llm.loaded.requested, weights, passing), part) == 2
        heard = []
        while not heard or not isinstance(heard[-1], Failed):
            heard.append(mine.recv())
        assert "have 4096 bytes, but this process's plan has" in str(heard[-1].line)


# -- what processes say ----------------------------------------------------------------------------------------------------


def exchange_of(count: int) -> tuple[ProcessExchange, list[ProcessLink]]:
    pipes = [Pipe() for _ in range(count)]
    return ProcessExchange([ProcessLink(mine) for mine, _ in pipes], "process {}".format, lambda number: "has gone"), [
        ProcessLink(its) for _, its in pipes
    ]


def test_what_is_handed_round_waits_for_the_slowest() -> None:
    exchange, ends = exchange_of(3)
    said = exchange.said(nullcontext)
    for message in (Loaded(7), Passing(PASSING_BYTES), "a line"):
        ends[0].say(message)
    assert next(said) == (0, "a line") and exchange.shared_bytes == 7
    assert [(end.hear(Loaded), end.hear(Passing).nbytes) for end in ends[1:]] == [(Loaded(7), PASSING_BYTES)] * 2
    for number in (1, 2):
        assert not ends[0].connection.poll()
        ends[number].say(BytesTaken())
        ends[number].say("another")
        assert next(said) == (number, "another")
    assert ends[0].hear(BytesTaken) == BytesTaken()


def test_an_error_of_one_is_an_error_of_all_and_bugs_are_shown_whole() -> None:
    exchange, ends = exchange_of(2)
    ends[1].say(Failed("the disk is full", "..."))
    with pytest.raises(Mendable, match=r"process 1: the disk is full"):
        list(exchange.said(nullcontext))
    ends[1].say(Failed(None, "Traceback: a bug"))
    with pytest.raises(RuntimeError, match=r"process 1:\nTraceback: a bug"):
        list(exchange.said(nullcontext))
    ends[0].connection.close()
    with pytest.raises(Mendable, match="process 0 has gone"):
        list(exchange.said(nullcontext))


# -- whole commands --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-opt"
    save_tiny("opt", folder)
    return folder


@pytest.fixture
def flags(opt: Path, offload: Path) -> tuple[object, ...]:
    plan = ("--percent", 0, 60, 0, 50, 0, 100, "--gpu-batch-size", 2, "--num-gpu-batches", 2)
    return ("--model", opt, "--tokenizer", "bytes", "--dtype", "float32", "--device", "cpu", "--offload-dir", offload, *plan)


class ProcessInThread(threading.Thread):
    """A process that is a thread here. It does what it is told first."""

    def __init__(self, connection: Any) -> None:
        super().__init__(daemon=True)  # one that hangs does not keep the tests from ending
        self._connection = connection
        self._status = 1
        self.start()

    def run(self) -> None:
        work, given = self._connection.recv()
        self._status = work(ProcessLink(self._connection), *given)
        self._connection.close()

    def wait(self, seconds: float | None = None) -> int:
        self.join(seconds)
        if self.is_alive():
            raise subprocess.TimeoutExpired(self.name, seconds or 0)
        return self._status

    def kill(self) -> None:
        assert not self.is_alive()


def started_in_a_thread(self: shared_work.Processes, descriptors: tuple[int, ...]) -> ProcessLink:
    mine, its = Pipe()
    self._processes.append(ProcessInThread(its))  # type: ignore[arg-type]
    return ProcessLink(mine)


@pytest.mark.parametrize("way", first_of(["threads", "processes"], 1))
def test_a_run_by_two_writes_what_a_run_by_one_writes(
    way: str, flags: tuple[object, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "threads":
        monkeypatch.setattr(shared_work.Processes, "_started", started_in_a_thread)
    asked = ("--num-prompts", 5, "--prompt-len", 7, "--gen-len", 6, "--temperature", 0.8, "--seed", 5, *flags)
    one = called(run.main, capfd, *asked, "--output", tmp_path / "one")
    two = called(run.main, capfd, *asked, "--output", tmp_path / "two", "--gpus", 2)
    assert (one.status, two.status) == (0, 0), two.err
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes() and one.texts == two.texts
    document = two.json
    assert (document["gpus"], document["num_prompts"], document["generated_tokens"]) == (2, 5, 30)
    assert [each["num_prompts"] for each in document["processes"]] == [3, 2]
    assert 0 < document["shared_bytes"] < document["peak_bytes"]["host"]
    if way == "processes":  # a thread's peak is that of all tests before
        assert document["peak_bytes"]["host"] < document["needed_bytes"]["host"]
    assert any(line.startswith("together  2 processes on the CPU share 5 prompts") for line in two.out)


@pytest.mark.cuda
def test_processes_on_one_gpu_have_weights_at_rest_page_locked_and_handed_round(
    flags: tuple[object, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One GPU stands for two: each process has a context of its own there, and locks the pages of the same weights."""
    monkeypatch.setattr(CudaDevice, "names_of", lambda self, count: ["cuda:0"] * count)
    spread = ("--device", "cuda", "--percent", 30, 40, 40, 40, 0, 100)
    asked = ("--num-prompts", 5, "--prompt-len", 7, "--gen-len", 6, *flags, *spread)
    for name, gpus in (("one", 1), ("two", 2)):
        result = called(run.main, capfd, *asked, "--output", tmp_path / name, "--gpus", gpus)
        assert result.status == 0, result.err
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_job_by_two_writes_the_records_of_a_job_by_one(
    flags: tuple[object, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rows share a prefix, KV is evicted so that answers depend on what is shared, and one request breaks."""
    head = "one beginning that all requests of this file have: "
    lines: list[dict[str, Any]] = [
        {"custom_id": f"r{n}", "prompt": f"{head if n % 3 else ''}{'word ' * n}", "max_tokens": 3 + n % 4} for n in range(1, 9)
    ]
    lines[4] |= {"allowed_token_ids": [7], "logit_bias": {"7": -100}, "temperature": 1.0}
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ("-i", file, "--seed", 1, "--ordered", "--kv-policy", "h2o", "--hh-ratio", 0.3, "--verbose", 0, *flags)
    one = called(batch.main, capfd, *asked, "-o", tmp_path / "one.jsonl")
    two = called(batch.main, capfd, *asked, "-o", tmp_path / "two.jsonl", "--gpus", 2)
    assert one.status == two.status, (one.err, two.err)
    assert records(tmp_path / "one.jsonl") == records(tmp_path / "two.jsonl")
    assert two.json["requests_done"] == 8


def records(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for record in found:
        if record["response"] is not None and "body" in record["response"]:
            record["response"]["body"].pop("created", None)
    return found


@pytest.mark.parametrize(
    "given, words",
    [
        (("--gpus", 2, "--device", "cuda:1"), "--device cuda:1 is one, and --gpus 2 takes as many from the first on"),
        (("--gpus", 2, "--trace", "t.json"), "--trace looks at the work of one process"),
        (("--gpus", 0), "--gpus"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(
    given: tuple[object, ...], words: str, opt: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result: Result = called(run.main, capfd, "--model", opt, "--percent", 0, 100, 0, 100, 0, 100, *given)
    assert words in result.error


# -- their end -------------------------------------------------------------------------------------------------------------

LOOKING_AFTER = """\
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from pathlib import Path
from h2o_flexgen.cli import shared_work
from h2o_flexgen.cli.errors import exit_status
from h2o_flexgen.session.open_request import ModelRequest, SiteRequest
from tests.helpers.sleeping_process import sleeping
names = SimpleNamespace(names_of=lambda count: ["cpu"] * count)
loaded = SimpleNamespace(offload_folder=Path(sys.argv[1]))
llm = SimpleNamespace(loaded=loaded, limits=SimpleNamespace(host=1 << 30), plan=None, device=names)
def work(flags):
    model = ModelRequest("none", "none")
    with sleeping(), shared_work.Processes(llm, model, SiteRequest(gpus=2), [None, None]) as both:
        for number, pid in both.said(nullcontext):
            print(pid, flush=True)
sys.exit(exit_status(lambda: SimpleNamespace(verbose=0), work))
"""


@pytest.mark.parametrize("way", first_of(["kill", "interrupt"], 1))
def test_processes_end_with_the_one_that_looks_after_them(way: str, offload: Path) -> None:
    command = [sys.executable, "-c", LOOKING_AFTER, str(offload)]
    root = Path(__file__).parents[2]
    given: dict[str, Any] = {"cwd": root, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **given, preexec_fn=as_in_a_terminal, start_new_session=True) as process:
        assert process.stdout is not None
        others = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
        if way == "interrupt":
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all of them get it
        else:
            process.kill()
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    gone, alive = psutil.wait_procs(others, timeout=PATIENCE_SECONDS)
    assert len(gone) == 2 and not alive
    status, words = (130, "interrupted") if way == "interrupt" else (-signal.SIGKILL, "")
    assert process.returncode == status and words in err and "Traceback" not in err, err
    if way == "kill":  # nothing is left that could remove it
        for folder in (*offload.glob("*"), offload):
            folder.rmdir()


def test_all_end_when_one_is_killed(offload: Path) -> None:
    names = SimpleNamespace(names_of=lambda count: ["cpu"] * count)
    llm: Any = SimpleNamespace(
        loaded=SimpleNamespace(offload_folder=offload), limits=SimpleNamespace(host=1 << 30), plan=None, device=names
    )
    others: list[psutil.Process] = []
    none: Any = None
    with (
        sleeping(),
        pytest.raises(Mendable, match=r"process \d of 2 \(cpu\) was ended by SIGKILL, and so are the others"),
        shared_work.Processes(llm, ModelRequest("none", "none"), SiteRequest(gpus=2), [none, none]) as both,
    ):
        for _, pid in both.said(nullcontext):
            others.append(psutil.Process(int(str(pid))))
            if len(others) == 2:
                others[0].kill()
    assert not any(one.is_running() for one in others)
