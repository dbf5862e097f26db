"""Plans dealt out to processes: each has seconds for a plan, is ended when they are over, and starts anew. A result is written
as soon as it is there. What is under way when all of the time is over has no result."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import NamedTuple

from tests.delayed.child import LEAVING, READY, own_folder, serve, told_after
from tests.delayed.trying import Bench
from tests.delayed.ways import CRASH, TIMEOUT, WORDS, Result, Way

STARTING_SECONDS = 90.0
STARTS = 3  # of processes in succession that may fail
TRACE = "Timeout ("  # before where threads are
FRAME = re.compile(r'File "(?:[^"]*/)?([^"/]+/[^"/]+)", line (\d+) in')


class Order(NamedTuple):
    plan: int
    way: Way
    patience: float = 1.0  # how many times as long as others it may take


@dataclass
class Child:
    pid: int
    orders: int
    results: int
    environment: Mapping[str, str]
    begun: float = field(default_factory=time.monotonic)
    is_ready: bool = False
    is_leaving: bool = False  # when it has written its result
    order: Order | None = None
    text: bytes = b""

    @property
    def is_idle(self) -> bool:
        return self.is_ready and self.order is None

    def give(self, order: Order, seconds: float) -> None:
        """`seconds`: those that it may take."""
        self.order, self.begun = order, time.monotonic()
        line = json.dumps({"plan": order.plan, "way": asdict(order.way), "seconds": seconds}) + "\n"
        os.write(self.orders, line.encode())

    def read(self) -> list[str] | None:
        """Whole lines; None when it has ended."""
        found = os.read(self.results, 1 << 16)
        *lines, self.text = (self.text + found).split(b"\n")
        return [line.decode() for line in lines] if found else None

    def end(self) -> str:
        """Ends it, if it has not ended, and says how it did."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        for file in (self.orders, self.results):
            os.close(file)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"


Start = Callable[[Mapping[str, str]], Child]


@dataclass
class Dealer:
    """`start` makes a process with an environment; `heard` gets each result at once. `ends`: when all processes are ended."""

    start: Start
    heard: Callable[[Result], None]
    folder: Path
    children: int
    seconds: float  # for a plan
    ends: float = inf
    _spare: list[Child] = field(default_factory=list)
    _did_not_start: list[str] = field(default_factory=list)  # why, of processes in succession

    def prepare(self, environment: Mapping[str, str]) -> None:
        """Starts processes that are wanted next, before it is known for what."""
        self._spare += [self.start(environment) for _ in range(self.children)]

    def deal(self, orders: Sequence[Order], until: float) -> None:
        """All orders, as far as the time goes; those of one environment after the other."""
        environments = {json.dumps(dict(order.way.environment)): order.way.environment for order in orders}
        for environment in environments.values():
            self._deal(deque(order for order in orders if order.way.environment == environment), environment, until)

    def _deal(self, waiting: deque[Order], environment: Mapping[str, str], until: float) -> None:
        there = list[Child]()
        try:
            while self._goes_on(bool(waiting) and time.monotonic() < until, there):
                if len(self._did_not_start) >= STARTS:
                    raise RuntimeError(f"processes that try plans do not start ({self._did_not_start[-1]})")
                while len(there) < min(self.children, len(waiting) + sum(child.order is not None for child in there)):
                    there.append(self._taken(environment))
                for child in self._that_say_something(there):
                    if not self._hear(child):
                        there.remove(child)
                for child in [one for one in there if self._is_late(one)]:
                    there.remove(child)
                    self._broken(child, TIMEOUT)
                for child in there:
                    if child.is_idle and waiting and time.monotonic() < until:
                        order = waiting.popleft()
                        child.give(order, self._limit(order))
        finally:
            self._spare += [child for child in there if child.is_idle]
            for child in there:
                if not child.is_idle:
                    child.end()

    def _goes_on(self, has_orders: bool, there: Sequence[Child]) -> bool:
        return time.monotonic() < self.ends and (has_orders or any(child.order for child in there))

    def close(self) -> None:
        while self._spare:
            self._spare.pop().end()

    def _taken(self, environment: Mapping[str, str]) -> Child:
        for place, child in enumerate(self._spare):
            if child.environment == environment:
                return self._spare.pop(place)
        return self.start(environment)

    def _that_say_something(self, children: Sequence[Child]) -> Iterator[Child]:
        by_file = {child.results: child for child in children}
        for file in select.select(list(by_file), [], [], 0.05)[0]:
            yield by_file[file]

    def _hear(self, child: Child) -> bool:
        """Whether it goes on."""
        if (lines := child.read()) is None:
            self._broken(child, CRASH)
            return False
        for line in lines:
            if line == READY:
                child.is_ready = True
                self._did_not_start.clear()
            elif line == LEAVING:
                child.is_leaving = True
            else:
                child.order = None
                self.heard(Result.of_json(json.loads(line)))
                if child.is_leaving:
                    child.end()
                    return False
        return True

    def _limit(self, order: Order) -> float:
        return self.seconds * order.patience

    def _is_late(self, child: Child) -> bool:
        if child.is_idle:
            return False
        limit = STARTING_SECONDS if child.order is None else self._limit(child.order)
        return time.monotonic() - child.begun > limit

    def _broken(self, child: Child, verdict: str) -> None:
        order, seconds, how = child.order, time.monotonic() - child.begun, child.end()
        if order is None:
            self._did_not_start.append(f"{how}: {self._said(child)}")
            return
        if seconds > told_after(self._limit(order)):  # Python can crash while it says where threads are that go on
            verdict = TIMEOUT
        words = self._stuck(child) if verdict == TIMEOUT else f"{how} {self._said(child)}".strip()
        result = Result(order.plan, order.way.name, verdict, words=words[:WORDS])
        self.heard(replace(result, seconds=round(seconds, 2)))

    def _said(self, child: Child) -> str:
        """The last words of a process."""
        return " ".join(self._all_said(child).split())[-WORDS // 2 :]

    def _stuck(self, child: Child) -> str:
        """Where the threads of a process were when its time was nearly over, each in its innermost frame."""
        _, mark, trace = self._all_said(child).rpartition(TRACE)
        places = [FRAME.search(thread) for thread in trace.split("\n\n")] if mark else []
        found = dict.fromkeys(f"{place[1]}:{place[2]}" for place in places if place)
        return f"in {', '.join(found)}" if found else ""

    def _all_said(self, child: Child) -> str:
        file = self.folder / str(child.pid) / "said"
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def spawned(stand: str, fault: str, folder: Path, environment: Mapping[str, str]) -> Child:
    """A new process, which imports all that it needs."""
    (orders, ours), (mine, results) = os.pipe(), os.pipe()
    command = [sys.executable, "-m", "tests.delayed.child", stand, fault, str(folder), str(orders), str(results)]
    silent, root = subprocess.DEVNULL, Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        command,
        cwd=root,
        env={**os.environ, **environment},
        stdin=silent,
        stdout=silent,
        stderr=silent,
        pass_fds=(orders, results),
    )
    process.returncode = 0  # it is waited for by its number
    for file in (orders, results):
        os.close(file)
    return Child(process.pid, ours, mine, environment)


def forked(bench: Bench, fault: str, folder: Path, environment: Mapping[str, str]) -> Child:
    """A fork of this process, which has imported and made all: for devices that a fork may use."""
    (orders, ours), (mine, results) = os.pipe(), os.pipe()
    if pid := os.fork():
        for file in (orders, results):
            os.close(file)
        return Child(pid, ours, mine, environment)
    try:
        for file in (ours, mine):
            os.close(file)
        os.environ.update(environment)
        own_folder(folder)
        serve(bench, fault, orders, results)
    finally:
        os._exit(0)
    raise AssertionError("it has ended")
