"""The checker: what is known to be over where, which accesses race, what was launched, and where the host waited for a device.

One checker listens at a time. Whatever is asked of a stream is an access at a moment of its clock; launches, markers, waits,
queues, threads and events hand clocks on. So what is found does not depend on when anything really happens.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from tests.clocked.block import Block, Moment
from tests.clocked.clock import Clock

DEFAULT = "default"  # the stream on which things are prepared
MOST_FAULTS = 50  # one mistake often makes hundreds


class Checker:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_over = False  # what is given back later is no fault
        self.streams_are_quick = False  # a question whether a marker is passed is answered yes
        self.faults: list[str] = []
        self.tasks: set[str] = set()  # that were done
        self.launched: Counter[tuple[str, str]] = Counter()  # by task and operation
        self.waited: Counter[tuple[str, str, str]] = Counter()  # the host for a stream, by task, operation and place
        self._streams: defaultdict[str, Clock] = defaultdict(Clock)
        self._threads: defaultdict[str, Clock] = defaultdict(Clock)
        self._told: dict[tuple[str, str], int] = {}  # how much of a thread's clock a stream has learned
        self._own = threading.local()
        self._starts: list[int] = []  # of page-locked ranges, ascending
        self._ranges: list[tuple[int, Block]] = []  # the end of each, and its accesses

    # -- what acts -------------------------------------------------------------------------------------------------------

    @property
    def stream(self) -> str:
        """The current stream of the calling thread."""
        return getattr(self._own, "stream", DEFAULT)

    @property
    def task(self) -> str:
        """The task that the calling thread is at."""
        return getattr(self._own, "task", "")

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self._own.stream = self.stream, stream
        try:
            yield
        finally:
            self._own.stream = before

    @contextmanager
    def doing(self, task: str) -> Iterator[None]:
        before, self._own.task = self.task, task
        self.tasks.add(task)
        try:
            yield
        finally:
            self._own.task = before

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """A context in which what the calling thread launches is captured."""
        self._own.captures = True
        try:
            yield
        finally:
            self._own.captures = False

    def refuse_in_a_graph(self, what: str) -> None:
        """As CUDA does, in the thread that captures."""
        assert not getattr(self._own, "captures", False), f"{what} while work is captured, which CUDA refuses, at {_place()}"

    @property
    def host(self) -> Clock:
        """The clock of the calling thread."""
        found: Clock | None = getattr(self._own, "clock", None)
        if found is None:
            found = self._own.clock = self._threads[_this_thread()]
        return found

    @property
    def issued(self) -> Clock:
        """The clock of the current stream."""
        return self._streams[self.stream]

    def launch(self, doing: str) -> tuple[Moment, Clock]:
        """The moment of what is issued now: behind all that the calling thread knows, and all issued to the stream before."""
        stream, host = self.stream, self.host
        actor, clock, told = f"stream {stream}", self._streams[stream], (stream, _this_thread())
        if self._told.get(told) != host.changes:
            clock.join(host)
            self._told[told] = host.changes
        clock.tick(actor)
        return Moment(actor, clock[actor], doing, self.task), clock

    def act(self, doing: str) -> tuple[Moment, Clock]:
        """The moment of what the calling thread itself does now."""
        actor, clock = f"thread {_this_thread()}", self.host
        clock.tick(actor)
        return Moment(actor, clock[actor], doing, self.task), clock

    def wait_for_stream(self, doing: str) -> None:
        """The calling thread waits until all that was issued to its stream is over."""
        self.wait_for(self.issued, doing)

    def wait_for(self, clock: Clock, doing: str) -> None:
        self.host.join(clock)
        self.waited[self.task, doing, _place()] += 1

    def settle(self) -> None:
        for clock in list(self._streams.values()):
            self.host.join(clock)

    def snapshot(self) -> Clock:
        """What the calling thread knows, for a thread that it lets go on."""
        return Clock(self.act("handing over")[1])

    # -- what is accessed ------------------------------------------------------------------------------------------------

    def access(self, block: Block, tensor: Tensor, writes: bool, now: Moment, clock: Clock) -> None:
        if (place := extent(tensor)) is not None:
            self.report(block.access(*place, writes, now, clock))

    def report(self, faults: Iterable[str]) -> None:
        for fault in faults:
            if len(self.faults) < MOST_FAULTS:
                self.faults.append(f"{fault}, at {_place()}")

    def given_back(self, block: Block, stream: str) -> None:
        """Device memory goes back to the pool of the stream that it was had on: what is launched there next may get it."""
        left = block.unknown_to(self._streams[stream], self.host)
        self.report(f"{block.name} is given back to the pool of {stream} although {one} may go on" for one in left)

    # -- memory of the host ----------------------------------------------------------------------------------------------

    def page_lock(self, start: int, nbytes: int) -> None:
        """Takes note of memory that streams read and write beside the host."""
        place = bisect_right(self._starts, start)
        before, behind = self._ranges[:place], self._starts[place:]
        if (before and before[-1][0] > start) or (behind and behind[0] < start + nbytes):
            self.faults.append(f"host memory at {start:#x} is page-locked twice")
        self._starts.insert(place, start)
        self._ranges.insert(place, (start + nbytes, Block(f"{nbytes} bytes of page-locked memory")))

    def page_unlock(self, start: int) -> None:
        if start not in self._starts:
            self.faults.append(f"host memory at {start:#x} is unlocked, but was not locked")
            return
        block = self.forget_locked(start)
        self.report(f"{block.name} is unlocked although {one} may go on" for one in block.unknown_to(self.host))

    def forget_locked(self, start: int) -> Block:
        place = self._starts.index(start)
        del self._starts[place]
        return self._ranges.pop(place)[1]

    @property
    def locked_ranges(self) -> int:
        return len(self._starts)

    def locked(self, tensor: Tensor) -> Block | None:
        """The page-locked memory that a tensor of the host lies in."""
        if not self._starts or not tensor.numel():
            return None
        at = tensor.data_ptr()
        place = bisect_right(self._starts, at) - 1
        return self._ranges[place][1] if place >= 0 and at < self._ranges[place][0] else None

    def touched(self, tensor: Tensor, writes: bool) -> None:
        """The calling thread itself reads or writes memory past torch."""
        with self.lock:
            if (block := self.locked(tensor)) is not None:
                self.access(block, tensor, writes, *self.act("work of the processor"))


_listening: list[Checker] = []


def current() -> Checker:
    assert _listening, "the clocked device is used where no checker listens"
    return _listening[-1]


@contextmanager
def listening() -> Iterator[Checker]:
    """A context with a checker of its own, that knows nothing of what happened before."""
    checker = Checker()
    _listening.append(checker)
    try:
        yield checker
    finally:
        checker.is_over = True
        _listening.pop()


def extent(tensor: Tensor) -> tuple[int, int] | None:
    """The addresses from the first to the last byte of a tensor in host memory; what lies between its values counts too."""
    if not tensor.numel():
        return None
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    values = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride())) + 1
    return start, start + values * tensor.itemsize


def _this_thread() -> str:
    return threading.current_thread().name


def _place() -> str:
    """The line of the package that is at work."""
    frame = sys._getframe(1)
    while frame is not None and "/h2o_flexgen/" not in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return "a test" if frame is None else f"{frame.f_code.co_filename.rsplit('/h2o_flexgen/')[-1]}:{frame.f_lineno}"
