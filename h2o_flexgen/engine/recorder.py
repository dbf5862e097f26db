"""The recorder: what every task did and when, from all lanes, in memory that does not grow with the length of a job.

Lanes only append; the caller's thread collects. On an accelerator a task's times are known when its markers are passed. There
they cost calls of the driver. So without a trace only the tasks of some steps are timed, and the others are assumed to take
as long.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from h2o_flexgen.memory.device import Device, Marker
from h2o_flexgen.schedule.ops import Key, Lanes, Op, Task, place_of
from h2o_flexgen.schedule.trace import Span, Trace

KEPT = 1 << 14  # latest spans that are kept; of earlier ones only the sums per lane are
Kind = tuple[str, Op, bool]  # of tasks: lane, op, and whether it is the first step
TIMED_EVERY = 8  # steps, of which one is timed where no trace is asked for


class Recorder:
    def __init__(
        self, devices: Sequence[Device], lanes: Lanes, started_at: float, starts: Sequence[Marker | None], times_all: bool
    ) -> None:
        self._devices = devices
        self._lanes = lanes
        self._started_at = started_at
        self._starts = starts  # of each device
        self._times_all = times_all or None in starts
        self._ended: deque[Span] = deque()
        self._marked: deque[tuple[Task, Marker | None, Marker, int]] = deque()
        self._before: deque[tuple[Task, Marker, Marker, int]] = deque()
        self.moved_bytes: Counter[str] = Counter()  # by lane
        self.moved_by_op: Counter[Op] = Counter()  # the same by op
        self._seconds: Counter[str] = Counter()  # of tasks that were over when their actions returned, by lane
        self._timed: Counter[Kind] = Counter()  # seconds of marked tasks
        self._timed_tasks: Counter[Kind] = Counter()
        self._untimed_tasks: Counter[Kind] = Counter()
        self._trace = Trace(())
        self._kept: list[Span] = []

    def times(self, task: Task) -> bool:
        return self._times_all or task.step == 0 or task.step % TIMED_EVERY == 1

    def add(self, task: Task, begun: float, ended: float, moved: int) -> None:
        """Adds a task that was over when its action returned. Times are those of time.perf_counter."""
        self._ended.append(Span(task.key, self._lanes.of(task), begun - self._started_at, ended - self._started_at, moved))

    def add_marked(self, task: Task, first: Marker | None, last: Marker, moved: int) -> None:
        """Adds a task that a stream runs between two markers, or, if it is not timed, before one marker."""
        self._marked.append((task, first, last, moved))

    def add_before(self, task: Task, begun: Marker, ended: Marker, moved: int) -> None:
        """Adds what a stream has done for a task before its turn. It does not end the task."""
        self._before.append((task, begun, ended, moved))

    def collect(self) -> Iterator[Key]:
        """Adds tasks that have ended since the last call, and yields those that have markers."""
        while self._ended:
            span = self._ended.popleft()
            self._seconds[span.lane] += span.end - span.start  # type: ignore[assignment]
            self._keep(span)
        while self._before and self._before[0][2].query():
            self._keep_timed(*self._before.popleft())
        while self._marked and self._marked[0][2].query():
            yield self._ends(*self._marked.popleft())
        if len(self._kept) > 2 * KEPT:
            self._trace = self.trace().with_latest(KEPT)
            self._kept = []

    def _ends(self, task: Task, first: Marker | None, last: Marker, moved: int) -> Key:
        if first is None:
            self.moved_bytes[self._lanes.of(task)] += moved
            self.moved_by_op[task.op] += moved
            self._untimed_tasks[self._kind(task)] += 1
        else:
            self._timed_tasks[self._kind(task)] += 1
            self._keep_timed(task, first, last, moved)
        return task.key

    def _kind(self, task: Task) -> Kind:
        return self._lanes.of(task), task.op, task.step == 0

    def _keep_timed(self, task: Task, first: Marker, last: Marker, moved: int) -> None:
        at = self._lanes.device(task.layer)
        device, start = self._devices[at], self._starts[at]
        assert start is not None
        begun, ended = (device.seconds_between(start, marker) for marker in (first, last))
        self._timed[self._kind(task)] += ended - begun  # type: ignore[assignment]
        self._keep(Span(task.key, self._lanes.of(task), begun, ended, moved))

    def _keep(self, span: Span) -> None:
        self.moved_bytes[span.lane] += span.bytes
        self.moved_by_op[span.key.op] += span.bytes
        self._kept.append(span)

    def busy_seconds(self) -> Mapping[str, float]:
        """Seconds of the tasks of each lane; those that were not timed take as long as the others of their kind."""
        busy: Counter[str] = Counter(self._seconds)
        for kind, seconds in self._timed.items():
            tasks = self._timed_tasks[kind] + self._untimed_tasks[kind]
            busy[kind[0]] += seconds * tasks / self._timed_tasks[kind]  # type: ignore[assignment]
        return busy

    def lane_seconds(self, trace: Trace) -> dict[str, float]:
        """Seconds in which each used lane ran at least one task, in the order in which data passes through the lanes. If some
        tasks of a lane were not timed, it is the sum of all tasks; that is the same, as a stream runs one task at a time."""
        estimated = {kind[0] for kind, tasks in self._untimed_tasks.items() if tasks}
        busy = self.busy_seconds()
        lanes = sorted(self.moved_bytes, key=place_of)
        return {lane: busy[lane] if lane in estimated else trace.busy_seconds(lane) for lane in lanes}

    def trace(self) -> Trace:
        """The spans of all timed tasks."""
        spans = sorted((*self._trace.spans, *self._kept), key=lambda span: span.start)
        return Trace(tuple(spans), self._trace.earlier)
