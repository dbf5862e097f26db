"""Threads: started before memory is spent, and where there is no room for one, a line instead of a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.cli.failures import one_line
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.memory.host import Shortage, shortage_of
from h2o_flexgen.memory.threads import ADVICE, started_pool
from tests.helpers.threads import new_threads
from tests.helpers.tiny import save_tiny

NO_ROOM = RuntimeError("can't start new thread")
LIMITED = """
import json, os, resource, sys
from h2o_flexgen import run
import h2o_flexgen.cli.failures, h2o_flexgen.cli.run_work, h2o_flexgen.models, torch
torch.set_num_threads(2)
argv, extra = json.loads(sys.argv[1])
h2o_flexgen.models.load_config(argv[1])  # what others import for it is there: without room, they were seen to try for ever
mapped = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
for nbytes in extra:
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_AS, (mapped + nbytes,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (120, 120))  # what goes round in circles is ended
        os._exit(run.main(argv))
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_tiny("opt", folder := tmp_path_factory.mktemp("opt"))
    return folder


def no_room_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start, left = threading.Thread.start, [count]

    def maybe(self: threading.Thread) -> None:
        if not left[0]:
            raise NO_ROOM
        left[0] -= 1
        start(self)

    monkeypatch.setattr(threading.Thread, "start", maybe)


def test_no_room_for_a_thread_is_want_of_memory() -> None:
    assert shortage_of(NO_ROOM) == Shortage("host", ADVICE) and one_line(NO_ROOM) == ADVICE
    assert one_line(RuntimeError("a bug")) is None


def test_a_pool_is_whole_or_not_there_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    pool = started_pool(4, "mine")
    assert len(new_threads(before)) == 4
    pool.shutdown()
    no_room_after(2, monkeypatch)
    with pytest.raises(MemoryError, match="a thread could not be started"):
        started_pool(4, "mine")
    assert not new_threads(before)


@pytest.mark.parametrize("room", [0, 3, 6, 8])
def test_a_run_that_finds_no_room_for_a_thread_says_so_and_leaves_nothing(
    opt: Path, offload: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Six read and write, five work in lanes."""
    before = set(threading.enumerate())
    no_room_after(room, monkeypatch)
    with LLM(str(opt), percent=(0, 50, 0, 50, 0, 50), device="cpu", offload_dir=offload, tokenizer="bytes") as llm:
        with pytest.raises(MemoryError, match="a thread could not be started"):
            llm.generate(["a"], SamplingParams(max_tokens=2))
        with pytest.raises(MemoryError, match="a thread could not be started"):
            llm.converse().reply("a", SamplingParams(max_tokens=2))
    assert not new_threads(before)


def test_progress_goes_without_its_thread(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    no_room_after(0, monkeypatch)
    with Progress(2, "job") as progress:
        progress.update("half", 1)
    assert capfd.readouterr().err.splitlines()[-1].startswith("job: 1/2 half")


@pytest.mark.skipif(sys.platform != "linux", reason="an address space is limited so on Linux")
def test_a_tight_address_space_is_a_line_and_no_traceback(opt: Path, tmp_path: Path) -> None:
    """OpenMP's own threads too, whose library would end the process."""
    flags: list[Any] = ["--model", str(opt), "--device", "cpu", "--offload-dir", str(tmp_path / "off"), "--verbose", "0"]
    flags += ["--percent", "0", "50", "0", "50", "0", "50", "--prompt-len", "4", "--gen-len", "2"]
    extra = [mib << 20 for mib in (24, 80, 4096)]
    done = subprocess.run([sys.executable, "-c", LIMITED, json.dumps([flags, extra])], capture_output=True, text=True)
    statuses = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("status ")]
    assert set(statuses[:-1]) <= {0, 2} and 2 in statuses and statuses[-1] == 0, (statuses, done.stderr)
    assert "Traceback" not in done.stderr and "libgomp" not in done.stderr, done.stderr
