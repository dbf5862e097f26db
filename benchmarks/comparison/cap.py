"""A limit on the memory that a process and its page cache may take: a memory control group where one can be made, a scope of
systemd where that can, and else a ballast, a process that holds all memory but so much.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil

GROUPS = Path("/sys/fs/cgroup")
LIMITS = {"memory.max": "memory.swap.max", "memory.limit_in_bytes": "memory.swappiness"}  # of version 2 and version 1
LOWERED_WITHIN = 60.0  # seconds: pages have to be given back first
BALLAST = """
import mmap, sys
room = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
page = b"1" * (1 << 20)
for start in range(0, len(room) - len(page) + 1, len(page)):
    room[start : start + len(page)] = page
print("held", flush=True)
sys.stdin.read()
"""


class Cap(Protocol):
    words: str

    def started(self, command: Sequence[str]) -> Sequence[str]:
        """The command that runs this one under the cap."""
        ...

    def lower(self, nbytes: int) -> None:
        """Lowers the cap to so many bytes."""
        ...

    @property
    def held(self) -> bool:
        """True if the cap was there to the end."""
        ...

    def kill(self) -> None:
        """Kills every process that still lives under it."""
        ...

    def close(self) -> None: ...


def open_cap() -> Cap:
    """The strictest cap available on this machine to this user."""
    group = ControlGroup.made()
    if group is not None:
        return group
    return SystemdScope() if SystemdScope.can_be_had() else Ballast()


class ControlGroup:
    """A memory control group of our own, version 1 or 2. What exceeds it is killed by the kernel."""

    words = "a memory control group, page cache included"

    def __init__(self, folder: Path, limit: str) -> None:
        self._folder, self._limit = folder, limit

    @classmethod
    def made(cls) -> ControlGroup | None:
        """A new group where the machine has its groups, if permitted."""
        return next((group for folder in (GROUPS / "memory", GROUPS) if (group := cls.made_in(folder))), None)

    @classmethod
    def made_in(cls, parent: Path) -> ControlGroup | None:
        folder = parent / f"compare-{os.getpid()}-{time.monotonic_ns()}"
        try:
            folder.mkdir()
        except OSError:
            return None
        limit = next((name for name in LIMITS if (folder / name).exists()), None)
        if limit is None or not os.access(folder / limit, os.W_OK):
            folder.rmdir()
            return None
        with suppress(OSError):
            (folder / LIMITS[limit]).write_text("0")  # nothing goes to swap instead
        return cls(folder, limit)

    def started(self, command: Sequence[str]) -> Sequence[str]:
        return ["sh", "-c", f'echo $$ > {self._folder}/cgroup.procs && exec "$@"', "sh", *command]

    def lower(self, nbytes: int) -> None:
        end = time.monotonic() + LOWERED_WITHIN
        while True:
            try:
                (self._folder / self._limit).write_text(str(nbytes))
                return
            except OSError as error:  # version 1 refuses while more is in use than can be given back
                if time.monotonic() > end:
                    raise TimeoutError(f"more than {nbytes / 1e9:.2f} GB stay in use") from error
                time.sleep(0.5)

    held = True

    def kill(self) -> None:
        with suppress(OSError):
            for pid in (self._folder / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        for _ in range(100):  # a group is busy until the last of its processes is gone
            try:
                self._folder.rmdir()
                return
            except OSError:
                self.kill()
                time.sleep(0.1)
        print(f"the control group {self._folder} could not be removed; remove it by hand", file=sys.stderr)


class SystemdScope:
    """A transient scope of the user's own systemd, for users who may not make control groups."""

    words = "a scope of systemd with MemoryMax, page cache included"

    def __init__(self) -> None:
        self._unit = f"compare-{os.getpid()}-{time.monotonic_ns()}.scope"
        self._lowered: int | None = None
        self._runs = False

    @staticmethod
    def can_be_had() -> bool:
        if shutil.which("systemd-run") is None:
            return False
        command = ["systemd-run", "--user", "--scope", "--quiet", "-p", "MemoryMax=1G", "true"]
        with suppress(OSError, subprocess.TimeoutExpired):
            return subprocess.run(command, capture_output=True, timeout=10).returncode == 0
        return False

    def started(self, command: Sequence[str]) -> Sequence[str]:
        self._runs = True
        limits = ["-p", "MemorySwapMax=0", *(["-p", f"MemoryMax={self._lowered}"] if self._lowered else [])]
        return ["systemd-run", "--user", "--scope", "--quiet", "--collect", "--unit", self._unit, *limits, *command]

    def lower(self, nbytes: int) -> None:
        self._lowered = nbytes
        if self._runs:
            subprocess.run(["systemctl", "--user", "set-property", "--runtime", self._unit, f"MemoryMax={nbytes}"], check=True)

    held = True

    def kill(self) -> None:
        stop = ["systemctl", "--user", "kill", "--signal=SIGKILL", self._unit]
        subprocess.run(stop, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def close(self) -> None:
        pass  # it ends with its processes


class Ballast:
    """Holds all memory but what is allowed. A process that exceeds it meets the end of the machine's memory, and is killed
    first, since the cap's processes are marked so. Swap makes it a weak cap."""

    words = "a ballast that holds the rest of the memory"

    def __init__(self) -> None:
        self._holder: subprocess.Popen[str] | None = None

    def started(self, command: Sequence[str]) -> Sequence[str]:
        return ["sh", "-c", 'echo 1000 > /proc/self/oom_score_adj; exec "$@"', "sh", *command]

    @property
    def held(self) -> bool:
        return self._holder is None or self._holder.poll() is None

    def kill(self) -> None:
        pass

    def lower(self, nbytes: int) -> None:
        """Memory that our children hold already is theirs, and counts."""
        held = sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))
        surplus = psutil.virtual_memory().available + held - nbytes
        if surplus <= 0 or self._holder is not None:
            return
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._holder = subprocess.Popen([sys.executable, "-c", BALLAST, str(surplus)], text=True, **pipes)  # type: ignore[call-overload]
        assert self._holder is not None and self._holder.stdout is not None
        if not self._holder.stdout.readline():
            raise TimeoutError("the memory that a ballast should hold could not be had")

    def close(self) -> None:
        if self._holder is not None:
            self._holder.kill()
            self._holder.communicate()
            self._holder = None


class NoCap:
    """No limit, for systems that have the whole machine."""

    words = "none"

    def started(self, command: Sequence[str]) -> Sequence[str]:
        return command

    held = True

    def lower(self, nbytes: int) -> None:
        pass

    def kill(self) -> None:
        pass

    def close(self) -> None:
        pass
