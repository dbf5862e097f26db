"""The executor: runs a schedule. Nowhere else in the running half does work happen beside other work.

One FIFO worker per lane moves data; COMPUTE runs in the caller's thread. Every task waits for the needs that it declares and
for nothing else. An error in any lane is raised in the caller, with the task named; whatever happens, no thread outlives
`run`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from h2o_flexgen.engine.recorder import Recorder
from h2o_flexgen.memory.device import Device, Marker
from h2o_flexgen.memory.shortage import Shortage, shortage_of
from h2o_flexgen.memory.threads import Event, starting
from h2o_flexgen.schedule.ops import COMPUTE_LANE, LANES, WORKERS, Op
from h2o_flexgen.schedule.task import Key, Task
from h2o_flexgen.schedule.trace import Trace

Action = Callable[[Task], int]  # does the task and returns the bytes that it moved
COLLECTED_EVERY = 32  # COMPUTEs: what has ended is looked through now and then, as it takes a call of the driver for each task


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
    def __init__(self, actions: Mapping[Op, Action], device: Device, ahead: int = 1, times_all: bool = True) -> None:
        """`times_all`: every task has its span in the trace, also where a device has to be asked for its times."""
        self._actions = actions
        self._device = device
        self._ahead = ahead  # COMPUTEs that may wait while their transfers are under way
        self._pending: dict[Key, _Pending] = device.handover.unfinished()  # tasks
        self._queues: dict[str, SimpleQueue[tuple[Task, _Pending] | None]] = {}
        self._threads: list[tuple[threading.Thread, Event]] = []
        self._times_all = times_all
        self._marked: dict[str, int] = dict.fromkeys(LANES, 0)  # markers of each lane so far
        self._waited: dict[tuple[str, str], int] = {}  # (lane, other lane) -> the marker of the other that it waited for last
        self._computed = 0
        self._failure: tuple[Task | str, BaseException] | None = None
        self._stopped = False
        self.trace = Trace(())  # trace of the last run, even if it failed
        self.lane_seconds: Mapping[str, float] = {}  # of the last run, for each lane that did something
        self.moved_bytes: Mapping[str, int] = {}

    def run(self, tasks: Iterable[Task]) -> Trace:
        for _ in self.steps(tasks):
            pass
        return self.trace

    def steps(self, tasks: Iterable[Task], pauses: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Runs the tasks, and hands over to the caller after every COMPUTE behind which it `pauses`. Lanes go on meanwhile."""
        with self._computing():
            start = self._device.mark(timed=True)
            self._recorder = Recorder(self._device, time.perf_counter(), start, self._times_all)
        self._device.settle()  # what was prepared on another stream than the lanes', and the marker that all times count from
        try:
            self._start_lanes()
            computed, is_left = self._issue(tasks), True
            while is_left:
                with self._computing():  # not while the caller has it: both are settings of the thread
                    is_left = any(pauses() for _ in computed)
                if is_left:
                    yield
        except BaseException:
            self._abandon()
            raise
        finally:
            self._end_lanes()
            self._device.settle()
            self._collect()
            self.trace = self._recorder.trace()
            self.lane_seconds = self._recorder.lane_seconds(self.trace)
            self.moved_bytes = {lane: self._recorder.moved_bytes[lane] for lane in self.lane_seconds}
        self._raise_failure()

    @property
    def busy_seconds(self) -> Mapping[str, float]:
        """Seconds of each lane so far. To be asked in the caller's thread."""
        self._collect()
        return self._recorder.busy_seconds()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with self._device.stream(COMPUTE_LANE), torch.inference_mode():
            yield

    # -- the caller's thread -----------------------------------------------------------------------------------------

    def _issue(self, tasks: Iterable[Task]) -> Iterator[None]:
        """Stops behind every COMPUTE."""
        computes: deque[tuple[Task, _Pending]] = deque()
        event = self._device.handover.event
        for task in tasks:
            self._raise_failure()
            self._pending[task.key] = pending = _Pending(event())
            if task.op is Op.COMPUTE:
                computes.append((task, pending))
                if len(computes) > self._ahead:
                    self._compute(*computes.popleft())
                    yield
            else:
                self._queues[task.op.lane].put((task, pending))
        while computes:
            self._compute(*computes.popleft())
            self._raise_failure()
            yield

    def _compute(self, task: Task, pending: _Pending) -> None:
        self._perform(task, pending)
        self._computed += 1
        if self._computed % COLLECTED_EVERY == 0:
            self._collect()

    def _collect(self) -> None:
        """Moves ended tasks to the recorder's trace, so that nothing here grows with the length of a job."""
        for key in self._recorder.collect():
            self._pending.pop(key, None)

    def _abandon(self) -> None:
        """Stops all work, and releases whoever waits for a task that will never run."""
        self._stopped = True
        for pending in list(self._pending.values()):
            pending.issued.set()

    def _raise_failure(self) -> None:
        if self._failure is None:
            return
        doing, error = self._failure
        self._failure = None  # or the error's traceback and this object would keep each other, and all buffers, alive
        if isinstance(error, KeyboardInterrupt):
            raise error
        raise TaskFailed(doing, _out_of_memory(error) or error) from error

    # -- the lanes ---------------------------------------------------------------------------------------------------

    def _start_lanes(self) -> None:
        self._queues = {lane: self._device.handover.queue() for lane in LANES if lane != COMPUTE_LANE}
        for lane in self._queues:
            for worker in range(WORKERS[lane]):
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
                    for _ in range(WORKERS[lane]):
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
        try:
            with torch.inference_mode(), self._device.stream(lane):  # a mode of the thread, which does not inherit the caller's
                while (issued := self._queues[lane].get()) is not None:
                    self._perform(*issued)
        except BaseException as error:  # from the lane's stream; errors of tasks are caught below
            self._failure = self._failure or (f"lane {lane}", error)
            self._abandon()
        finally:
            ended.set()

    def _perform(self, task: Task, pending: _Pending) -> None:
        """Waits for the needs, acts, and releases those who wait, even after a failure, so that everything ends."""
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
        for key in reversed(task.needs):  # the last of several slices comes last, and whoever waits for it has waited for all
            need = self._pending.get(key)
            if need is None:
                continue
            need.issued.wait()
            if need.marker is None:
                continue
            if task.op.by_host:  # the CPU reads and writes host memory: what it needs must be in place
                need.marker.synchronize()
            else:
                self._wait_on_stream(task.op.lane, key.op.lane, need.marker, need.number)
        return not self._stopped

    def _wait_on_stream(self, lane: str, other: str, marker: Marker, number: int) -> None:
        """Makes the lane's stream wait for a marker, unless it is behind it anyway: a stream does its work in order."""
        if lane != other and number > self._waited.get((lane, other), 0):
            self._device.wait(marker)
            self._waited[lane, other] = number

    def _act(self, task: Task, pending: _Pending) -> None:
        op, is_timed = task.op, self._recorder.times(task)
        on_stream = not op.by_host
        first = self._device.mark(timed=True) if on_stream and is_timed else None
        start = time.perf_counter()
        moved = self._actions[op](task)
        last = self._device.mark(is_timed, blocking=True) if on_stream else None
        if last is None:
            self._recorder.add(task, start, time.perf_counter(), moved)
            return
        self._marked[op.lane] += 1
        pending.marker, pending.number = last, self._marked[op.lane]
        self._recorder.add_marked(task, first, last, moved)


def shortage_in(error: BaseException) -> Shortage | None:
    """The lack of memory behind a failed task or a failed preparation; None if it failed for another reason."""
    return shortage_of(error.__cause__ if isinstance(error, TaskFailed) else error)


def _out_of_memory(error: BaseException) -> MemoryError | None:
    """Turns torch's and the system's own errors into the MemoryError that they mean."""
    shortage = None if isinstance(error, MemoryError) else shortage_of(error)
    if shortage is None:
        return None
    return MemoryError(f"{shortage.reason.rstrip('. ')}; lower the batch size, or the shares of the tier that is full")
