"""One run of one system: a process of its own, under the cap, with nothing of the checkpoint left in the page cache."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.baselines.__main__ import MOST, PREPARE, READY, RUN
from benchmarks.baselines.request import Answer, Request
from benchmarks.comparison.cap import Cap, NoCap, open_cap
from benchmarks.comparison.time_left import Deadline

ROOT = Path(__file__).resolve().parents[2]
LINES_KEPT = 30  # of what a process says before it fails
HEARD_WITHIN = 5.0  # seconds in which all that an ended process has said is there
ERROR = re.compile(r"[\w.]*(Error|Exception|Exit|DoesNotFit)\b")


OF_SIZE = re.compile(r"memory|DoesNotFit|took longer", re.IGNORECASE)


class Failed(Exception):
    """A system did not finish; the message says why, in a line."""


def may_do_with_less(reason: str) -> bool:
    """Whether a system that failed for this reason may come to its end with fewer rows."""
    return OF_SIZE.search(reason) is not None


@dataclass(frozen=True)
class Launcher:
    timeout: float  # seconds that one run may take
    environment: Mapping[str, str]  # beside our own
    deadline: Deadline = field(default_factory=Deadline)

    def most_rows(self, request: Request) -> int:
        """The number of rows that fit, according to the system's own planner."""
        return int(self._last_line(request, MOST))

    def prepare(self, request: Request) -> None:
        """Makes what the system needs beside the checkpoint, with the whole memory of the machine."""
        self._output(replace(request, host_bytes=None), PREPARE, loads_within_cap=True)

    def run(self, request: Request, loads_within_cap: bool) -> Answer:
        begun = time.monotonic()
        answer = Answer.from_json(self._last_line(request, RUN, loads_within_cap))
        return replace(answer, wall_seconds=time.monotonic() - begun)

    def _last_line(self, request: Request, action: str, loads_within_cap: bool = True) -> str:
        lines = self._output(request, action, loads_within_cap)
        if not lines:
            raise Failed("ended well, but without an answer")
        return lines[-1]

    def _output(self, request: Request, action: str, loads_within_cap: bool) -> list[str]:
        forget_pages(Path(request.checkpoint))
        Path(request.scratch).mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(dir=request.scratch)
        request = replace(request, scratch=scratch)
        cap = NoCap() if request.host_bytes is None else open_cap()
        try:
            if loads_within_cap and request.host_bytes is not None:
                cap.lower(request.host_bytes)
            process = subprocess.Popen(
                cap.started([sys.executable, "-m", "benchmarks.baselines", action, request.to_json()]),
                cwd=ROOT,
                env={**os.environ, **self.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
            with _Watched(process, max(0.0, min(self.timeout, self.deadline.left)), cap) as watched:
                if watched.reads_until(READY):
                    if not loads_within_cap and request.host_bytes is not None:
                        cap.lower(request.host_bytes)
                    watched.goes_on()
                lines = watched.output()
            if not cap.held:
                raise Failed("the cap did not hold: what it was made of was gone")
            return lines
        except (TimeoutError, subprocess.CalledProcessError) as error:
            raise Failed(str(error)) from error
        finally:
            cap.close()
            shutil.rmtree(scratch, ignore_errors=True)


class _Watched:
    """A process that is ended with everything that it started, whatever happens."""

    def __init__(self, process: subprocess.Popen[str], timeout: float, cap: Cap) -> None:
        self._process, self._cap = process, cap
        self._timer = threading.Timer(timeout, self._too_late)
        self._timeout, self._is_late = timeout, False
        self._lines: list[str] = []
        self._said: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> _Watched:
        self._timer.start()
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._kill()
        self._process.wait()
        self._listener.join(timeout=HEARD_WITHIN)
        heard_all = not self._listener.is_alive()  # else a process still holds the pipe, and closing it would wait for that
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr if heard_all else None):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def reads_until(self, word: str) -> bool:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == word:
                return True
            self._lines.append(line.strip())
        return False

    def goes_on(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it may have died
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def output(self) -> list[str]:
        """Its lines, once it has ended without an error."""
        self.reads_until("")
        status = self._process.wait()
        if self._is_late:
            raise Failed(f"took longer than {self._timeout:.0f} s")
        if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
            raise Failed("killed, most likely because it went beyond its memory")
        if status:
            self._listener.join(timeout=HEARD_WITHIN)
            raise Failed(reason_in(self._said) or f"ended with status {status}")
        return [line for line in self._lines if line]

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said = [*self._said, line.strip()][-LINES_KEPT:]

    def _too_late(self) -> None:
        self._is_late = True
        self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._cap.kill()  # and processes outside of the group: a launcher may have started one in its own session


def reason_in(lines: Sequence[str]) -> str:
    """The last line that names an error, since warnings may follow it; otherwise the last line."""
    told = [line for line in lines if line]
    errors = [line for line in told if ERROR.match(line)]
    return (errors or told or [""])[-1][:200]


def forget_pages(place: Path) -> None:
    """Drops what earlier readers of a folder or a file left in the page cache, where it would be free to read."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in (place, *place.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
