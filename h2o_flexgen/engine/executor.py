"""The executor: runs a schedule. It is the only place of execution where work runs in parallel with other work.

One FIFO worker per lane moves data; COMPUTE runs in the caller's thread. Where several devices compute, each has its own lanes:
COMPUTEs of the last one, which picks the tokens, run in the caller's thread, and those of the others in a lane's thread. Every
task waits for the needs that it declares and for nothing else. An error in any lane is raised in the caller, with the task
named; whatever happens, no thread outlives `run`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import NamedTuple

import torch

from h2o_flexgen.engine.recorder import Recorder
from h2o_flexgen.memory.device import Device, Marker
from h2o_flexgen.memory.host import Shortage, shortage_of
from h2o_flexgen.memory.threads import Event, starting
from h2o_flexgen.schedule.ops import COMPUTE_LANE, WORKERS, Key, Lanes, Op, Task
from h2o_flexgen.schedule.trace import Trace


class Past(NamedTuple):
    """When a task was done that had happened before its turn came: times of time.perf_counter."""

    begun: float
    ended: float


class MovedBefore(NamedTuple):
    """What has gone before the turn of its task came, between two markers of the stream of the task's lane."""

    begun: Marker
    ended: Marker
    moved: int


class MovedInParts(NamedTuple):
    """The bytes that a task has moved in its turn, and those that went before."""

    moved: int
    before: Sequence[MovedBefore]


Action = Callable[[Task], "int | Past | MovedInParts"]  # does the task and returns the bytes that it moved
COLLECTED_EVERY = 32  # COMPUTEs: ended tasks are collected in groups, as each costs a call of the driver


class _Pending:
    """A task that was issued and may not have taken effect yet."""

    __slots__ = ("issued", "marker", "number")

    def __init__(self, issued: Event) -> None:
        self.issued = issued
        self.marker: Marker | None = None
        self.number = 0  # of the marker, among those of its lane


class TaskFailed(RuntimeError):
    """Raised when a task's action fails. The message names the task; the error itself is `cause`."""

    def __init__(self, doing: Task | str, cause: BaseException) -> None:
        kind = "" if isinstance(cause, (OSError, MemoryError, ValueError)) else f"{type(cause).__name__}: "
        super().__init__(f"{kind}{cause} (while running {doing})")
        self.doing = doing
        self.cause = cause


class Executor:
    def __init__(
        self,
        actions: Mapping[Op, Action],
        device: Device | Sequence[Device],
        ahead: int = 1,
        times_all: bool = True,
        lanes: Lanes | None = None,
        is_past: Callable[[Task], bool] = lambda task: False,
    ) -> None:
        """`times_all`: every task has its span in the trace, also where times cost calls to a device's driver. `is_past`:
        whether a COMPUTE has happened before its turn; nothing waits for it then."""
        self._actions = actions
        self._devices = (device,) if isinstance(device, Device) else tuple(device)
        self._device = self._devices[-1]  # that computes in the caller's thread
        self._lanes = lanes or Lanes()
        self._lane_of, self._device_of = self._lanes.of, self._lanes.device
        self._ahead = ahead  # COMPUTEs that may wait while their transfers are under way
        self._pending: dict[Key, _Pending] = self._device.handover.unfinished()  # tasks
        self._queues: dict[str, SimpleQueue[tuple[Task, _Pending] | None]] = {}
        self._threads: list[tuple[threading.Thread, Event]] = []
        self._times_all = times_all
        self._is_past = is_past
        self._marked: dict[str, int] = dict.fromkeys(self._lanes.there, 0)  # markers of each lane so far
        self._waited: dict[tuple[str, str], int] = {}  # (lane, other lane) -> the marker of the other that it waited for last
        self._computed = 0
        self._failure: tuple[Task | str, BaseException] | None = None
        self._stopped = False
        self.trace = Trace(())  # trace of the last run, even if it failed
        self.lane_seconds: Mapping[str, float] = {}  # of the last run, for each lane that did something
        self.moved_bytes: Mapping[str, int] = {}
        self.moved_by_op: Mapping[Op, int] = {}

    def run(self, tasks: Iterable[Task]) -> Trace:
        for _ in self.steps(tasks):
            pass
        return self.trace

    def steps(self, tasks: Iterable[Task], pauses: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Runs the tasks, and yields to the caller after each COMPUTE if `pauses` returns true. Lanes go on meanwhile."""
        with self._computing():
            started_at = time.perf_counter()
        starts = [self._start_of(device) for device in self._devices]
        self._recorder = Recorder(self._devices, self._lanes, started_at, starts, self._times_all)
        self._settle()  # work that was prepared on other streams than the lanes', and the marker that all times count from
        try:
            self._start_lanes()
            computed, is_left = self._issue(tasks), True
            while is_left:
                with self._computing():  # not while the caller runs: both are settings of the thread
                    is_left = any(pauses() for _ in computed)
                if is_left:
                    yield
        except BaseException:
            self._abandon()
            raise
        finally:
            self._end_lanes()
            self._settle()
            self._collect()
            self.trace = self._recorder.trace()
            self.lane_seconds = self._recorder.lane_seconds(self.trace)
            self.moved_bytes = {lane: self._recorder.moved_bytes[lane] for lane in self.lane_seconds}
            self.moved_by_op = self._recorder.moved_by_op
        self._raise_failure()

    def _start_of(self, device: Device) -> Marker | None:
        with device.stream(COMPUTE_LANE), torch.inference_mode():
            return device.mark(timed=True)

    def _settle(self) -> None:
        for device in self._devices:
            device.settle()

    @property
    def busy_seconds(self) -> Mapping[str, float]:
        """Seconds of each lane so far. To be read in the caller's thread."""
        self._collect()
        return self._recorder.busy_seconds()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with self._device.stream(COMPUTE_LANE), torch.inference_mode():
            yield

    # -- the caller's thread -----------------------------------------------------------------------------------------

    def _issue(self, tasks: Iterable[Task]) -> Iterator[None]:
        """Pauses after every COMPUTE."""
        computes: deque[tuple[Task, _Pending]] = deque()
        event, own = self._device.handover.event, self._lanes.of_head
        for task in tasks:
            self._raise_failure()
            lane = self._lane_of(task)
            if lane == own and not computes and self._is_past(task):
                self._compute_past(task)
                yield
                continue
            self._pending[task.key] = pending = _Pending(event())
            if lane == own:
                computes.append((task, pending))
                if len(computes) > self._ahead:
                    self._compute(*computes.popleft())
                    yield
            else:
                self._queues[lane].put((task, pending))
        while computes:
            self._compute(*computes.popleft())
            self._raise_failure()
            yield

    def _compute(self, task: Task, pending: _Pending) -> None:
        self._perform(task, pending)
        self._computed += 1
        if self._computed % COLLECTED_EVERY == 0:
            self._collect()

    def _compute_past(self, task: Task) -> None:
        try:
            past = self._actions[task.op](task)
            assert isinstance(past, Past)
            self._recorder.add(task, *past, 0)
        except BaseException as error:
            self._failure = self._failure or (task, error)
            self._stopped = True
            self._raise_failure()

    def _collect(self) -> None:
        """Moves ended tasks to the recorder's trace, so that nothing here grows with the length of a job."""
        for key in self._recorder.collect():
            self._pending.pop(key, None)

    def _abandon(self) -> None:
        """Stops all work, and releases threads that wait for a task that will never run."""
        self._stopped = True
        for pending in list(self._pending.values()):
            pending.issued.set()

    def _raise_failure(self) -> None:
        if self._failure is None:
            return
        doing, error = self._failure
        self._failure = None  # otherwise the error's traceback and this object keep each other, and all buffers, alive
        if isinstance(error, KeyboardInterrupt):
            raise error
        raise TaskFailed(doing, _out_of_memory(error) or error) from error

    # -- the lanes ---------------------------------------------------------------------------------------------------

    def _start_lanes(self) -> None:
        self._queues = {lane: self._device.handover.queue() for lane in self._lanes.there if lane != self._lanes.of_head}
        for lane in self._queues:
            for worker in range(WORKERS[self._lanes.there[lane][0]]):
                ended = self._device.handover.event()
                thread = self._device.handover.thread(self._work, (lane, ended), f"lane-{lane}-{worker}")
                with starting():
                    thread.start()
                self._threads.append((thread, ended))

    def _end_lanes(self) -> None:
        """Waits for the lanes, even through further Ctrl-C, since the buffers that they use are freed afterwards."""
        interrupt: KeyboardInterrupt | None = None
        while not all(ended.is_set() for _, ended in self._threads):
            try:
                for lane, queue in self._queues.items():
                    for _ in range(WORKERS[self._lanes.there[lane][0]]):
                        queue.put(None)
                for _, ended in self._threads:
                    ended.wait()  # not join: an interrupted join counts the thread as ended
            except KeyboardInterrupt as error:
                self._abandon()
                interrupt = error
        for thread, _ in self._threads:
            thread.join()
        if interrupt is not None:
            raise interrupt

    def _work(self, lane: str, ended: Event) -> None:
        kind, device = self._lanes.there[lane]
        try:
            # a mode of the thread, which does not inherit the caller's
            with torch.inference_mode(), self._devices[device].stream(kind):
                while (issued := self._queues[lane].get()) is not None:
                    self._perform(*issued)
        except BaseException as error:  # from the lane's stream; errors of tasks are caught below
            self._failure = self._failure or (f"lane {lane}", error)
            self._abandon()
        finally:
            ended.set()

    def _perform(self, task: Task, pending: _Pending) -> None:
        """Waits for the needs, acts, and releases the threads that wait for it. It does so after a failure as well, so that
        every thread ends."""
        try:
            if not self._stopped and self._wait(task):
                self._act(task, pending)
        except BaseException as error:
            self._failure = self._failure or (task, error)
            self._stopped = True
        finally:
            pending.issued.set()
            if pending.marker is None:
                self._pending.pop(task.key, None)

    def _wait(self, task: Task) -> bool:
        for key in reversed(task.needs):  # the last of several slices comes last: a wait for it is a wait for all
            need = self._pending.get(key)
            if need is None:
                continue
            need.issued.wait()
            if need.marker is None:
                continue
            if task.op.by_host:  # the CPU reads and writes host memory: what it needs must be in place
                need.marker.synchronize()
            else:
                self._wait_on_stream(task, self._lane_of(key), need.marker, need.number)
        return not self._stopped

    def _wait_on_stream(self, task: Task, other: str, marker: Marker, number: int) -> None:
        """Makes the stream of a task's lane wait for a marker, unless it already waited for a later one: streams run in
        order."""
        lane = self._lane_of(task)
        if lane != other and number > self._waited.get((lane, other), 0):
            self._devices[self._device_of(task.layer)].wait(marker)
            self._waited[lane, other] = number

    def _act(self, task: Task, pending: _Pending) -> None:
        op, is_timed = task.op, self._recorder.times(task)
        on_stream, device, lane = not op.by_host, self._devices[self._device_of(task.layer)], self._lane_of(task)
        first = device.mark(timed=True) if on_stream and is_timed else None
        start = time.perf_counter()
        moved = self._actions[op](task)
        last = device.mark(is_timed, blocking=True) if on_stream else None
        if isinstance(moved, MovedInParts):
            for part in moved.before:
                self._recorder.add_before(task, *part)
            moved = moved.moved
        if isinstance(moved, Past):
            self._recorder.add(task, *moved, 0)
            return
        if last is None:
            self._recorder.add(task, start, time.perf_counter(), moved)
            return
        self._marked[lane] += 1
        pending.marker, pending.number = last, self._marked[lane]
        self._recorder.add_marked(task, first, last, moved)


def shortage_in(error: BaseException) -> Shortage | None:
    """The lack of memory behind a failed task or a failed preparation; None if it failed for another reason."""
    return shortage_of(error.__cause__ if isinstance(error, TaskFailed) else error)


def _out_of_memory(error: BaseException) -> MemoryError | None:
    """Turns torch's and the system's own errors into the MemoryError that they mean."""
    shortage = None if isinstance(error, MemoryError) else shortage_of(error)
    if shortage is None:
        return None
    return MemoryError(f"{shortage.reason.rstrip('. ')}; lower the batch size, or the shares of the full tier")
