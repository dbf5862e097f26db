"""Profiles in a process of their own. Measuring takes gigabytes and leaves a heap that the C library does not free: it
should neither count as memory of the run that comes next, nor change what fits beside it.

The process reads its task as JSON, reports progress line by line, and ends with the machine or with an error.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from h2o_flexgen.core.interrupted import raised_again
from h2o_flexgen.memory.device import Device, open_device
from h2o_flexgen.memory.shortage import shortage_of
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.profiling.bench import OnSubject, ProfileSizes
from h2o_flexgen.profiling.measured_machine import profile

START = """\
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches both processes; this one ends when told to
asked = json.loads(sys.stdin.readline())
sys.path[:] = asked.pop("path")
from h2o_flexgen.profiling.apart import answer
sys.exit(answer(**asked))
"""
SECONDS_BETWEEN_LINES = 0.2  # inside a measurement, so that reading them does not disturb it
KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "MemoryError": MemoryError, "OSError": OSError}
STOPPED = 1


def profile_apart(
    device: Device,
    offload_folder: Path,
    name: str,
    dtype: str | None,
    sizes: ProfileSizes,
    on_subject: OnSubject | None = None,
    partial: Path | None = None,
) -> Machine:
    """Profiles in another process, which ends when this call does, also if this call fails."""
    asked = {
        "path": sys.path,
        "device": str(device.torch_device),
        "folder": str(offload_folder.absolute()),
        "name": name,
        "dtype": dtype,
        "sizes": asdict(sizes),
        "threads": torch.get_num_threads(),
        "partial": None if partial is None else str(partial),
    }
    with _started(asked) as process:
        assert process.stdout is not None
        for line in process.stdout:
            kind, *words = json.loads(line)
            if kind == "machine":
                return Machine.create(words[0])
            if kind == "error":
                raise KINDS[words[0]](words[1])
            if on_subject is not None:
                on_subject(*words)
        status = process.wait()
    raise ValueError(
        f"measuring this machine ended with status {status}; free some memory, or name a machine with --machine "
        "(what was measured is kept, and the next call continues from there)"
    )


@contextmanager
def _started(asked: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", START]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(json.dumps(asked) + "\n")
            yield process
        finally:
            process.terminate()  # has no effect on one that has ended
            process.wait()


def answer(
    device: str, folder: str, name: str, dtype: str | None, sizes: dict[str, Any], threads: int, partial: str | None
) -> int:
    """The other process's work. It ends when told to, or when its output is no longer read."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = sys.stdout
    sys.stdout = sys.stderr  # for anything that libraries print
    torch.set_num_threads(threads)
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in sizes.items()}
    place = None if partial is None else Path(partial)
    try:
        with raised_again():
            machine = profile(open_device(device), Path(folder), name, dtype, ProfileSizes(**given), _telling(out), place)
        _tell_the_last(out, "machine", machine.as_plain())
        return 0
    except (KeyboardInterrupt, BrokenPipeError):
        pass
    except tuple(KINDS.values()) as error:
        _tell_the_last(out, "error", next(kind for kind, one in KINDS.items() if isinstance(error, one)), str(error))
    except RuntimeError as error:  # torch's lack of memory is none of the KINDS
        if (shortage := shortage_of(error)) is None:
            raise
        _tell_the_last(out, "error", MemoryError.__name__, shortage.reason)
    return STOPPED


def _tell_the_last(out: IO[str], *words: object) -> None:
    """Sends the last line, after which the reader may end this process: nothing has to be cleaned up."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _say(out, *words)


def _telling(out: IO[str]) -> Callable[[str, int, int], None]:
    last = [-1, 0.0]  # the count that was reported last, and when

    def tell(title: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done != last[0] or now - last[1] > SECONDS_BETWEEN_LINES:
            last[:] = done, now
            _say(out, "subject", title, done, total)

    return tell


def _say(out: IO[str], *words: object) -> None:
    print(json.dumps(words), file=out, flush=True)
