"""One run of one system: a process of its own, under the cap, with nothing of the checkpoint left in the page cache."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from baselines.__main__ import MOST, READY, RUN
from baselines.request import Answer, Request

from comparison.cap import NoCap, open_cap

BENCHMARKS = Path(__file__).resolve().parents[1]
LINES_KEPT = 30  # of what a process says before it fails


class Failed(Exception):
    """A system did not come to its end. Says why, in a line."""


@dataclass(frozen=True)
class Launcher:
    timeout: float  # seconds that one run may take
    environment: Mapping[str, str]  # beside our own

    def most_rows(self, request: Request) -> int | None:
        """What the system itself says that fits, if it can say."""
        lines = self._output(request, MOST)
        return int(lines[-1]) if lines and lines[-1].isdigit() else None

    def run(self, request: Request, loads_within_cap: bool) -> Answer:
        return Answer.from_json(self._output(request, RUN, loads_within_cap)[-1])

    def _output(self, request: Request, action: str, loads_within_cap: bool = True) -> list[str]:
        forget_pages(Path(request.checkpoint))
        scratch = Path(request.scratch)
        scratch.mkdir(parents=True, exist_ok=True)
        cap = NoCap() if request.host_bytes is None else open_cap()
        try:
            if loads_within_cap and request.host_bytes is not None:
                cap.lower(request.host_bytes)
            process = subprocess.Popen(
                cap.started([sys.executable, "-m", "baselines", action, request.to_json()]),
                cwd=BENCHMARKS,
                env={**os.environ, **self.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            with _Watched(process, self.timeout) as watched:
                if watched.reads_until(READY):
                    if not loads_within_cap and request.host_bytes is not None:
                        cap.lower(request.host_bytes)
                    watched.goes_on()
                return watched.output()
        except (TimeoutError, subprocess.CalledProcessError) as error:
            raise Failed(str(error)) from error
        finally:
            cap.close()
            shutil.rmtree(scratch, ignore_errors=True)


class _Watched:
    """A process that is ended with all that it started, whatever happens."""

    def __init__(self, process: subprocess.Popen[str], timeout: float) -> None:
        self._process = process
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
        self._listener.join(timeout=5)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
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
        """Its lines, once it has ended well."""
        self.reads_until("")
        status = self._process.wait()
        if self._is_late:
            raise Failed(f"took longer than {self._timeout:.0f} s")
        if status == -signal.SIGKILL:
            raise Failed("out of memory: killed at the cap")
        if status:
            self._listener.join(timeout=5)
            told = [line for line in self._said if line.strip()]
            raise Failed(told[-1].strip()[:200] if told else f"ended with status {status}")
        return [line for line in self._lines if line]

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with suppress(ValueError):
            for line in self._process.stderr:
                self._said = [*self._said, line][-LINES_KEPT:]

    def _too_late(self) -> None:
        self._is_late = True
        self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def forget_pages(folder: Path) -> None:
    """What earlier readers left in the page cache would be there for free."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
