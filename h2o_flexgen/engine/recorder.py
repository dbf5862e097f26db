"""The recorder: what every task did and when, from all lanes, in memory that does not grow with the length of a job.

Lanes only append; the caller's thread collects. On an accelerator a task's times are known when its markers are passed. There
they cost calls of the driver. So without a trace only the tasks of some steps are timed, and the others are assumed to take
as long.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy

from h2o_flexgen.memory.device import Device, Marker
from h2o_flexgen.schedule.ops import Key, Lanes, Op, Task, place_of
from h2o_flexgen.schedule.trace import Span, Trace

KEPT, MORE = 1 << 14, 1 << 12  # latest spans that are kept, and more before earlier ones become sums per lane
Kind = tuple[str, Op, bool]  # of tasks: lane, op, and whether it is the first step
TIMED_EVERY = 8  # steps, of which one is timed where no trace is asked for
OPS = tuple(Op)
OP_NUMBERS = {op: number for number, op in enumerate(OPS)}
COLUMNS = numpy.dtype(
    [
        ("op", "u1"),
        ("lane", "u1"),
        *((name, "i4") for name in ("step", "layer", "batch")),
        ("start", "f8"),
        ("end", "f8"),
        ("bytes", "i8"),
    ]
)
AT_ONCE = 256  # spans that become objects of Python at once


class PackedSpans(Sequence[Span]):
    """Spans in an array, 38 bytes each. As objects of Python they take 290."""

    def __init__(self, packed: numpy.ndarray, lanes: Sequence[str]) -> None:
        self._packed = packed
        self._lanes = lanes

    def __len__(self) -> int:
        return len(self._packed)

    @overload
    def __getitem__(self, place: int) -> Span: ...

    @overload
    def __getitem__(self, place: slice) -> PackedSpans: ...

    def __getitem__(self, place: int | slice) -> Span | PackedSpans:
        if isinstance(place, slice):
            return PackedSpans(self._packed[place], self._lanes)
        return self._unpacked(self._packed[place].item())

    def __iter__(self) -> Iterator[Span]:
        for first in range(0, len(self), AT_ONCE):
            yield from map(self._unpacked, self._packed[first : first + AT_ONCE].tolist())

    def _unpacked(self, values: tuple[Any, ...]) -> Span:
        op, lane, step, layer, batch, *others = values
        return Span(Key(OPS[op], step, layer, batch), self._lanes[lane], *others)


class LatestSpans:
    """The latest spans of a run, and sums of the earlier ones. Its memory does not grow with the run."""

    def __init__(self) -> None:
        self._packed = numpy.empty(KEPT + MORE, COLUMNS)
        self._count = 0
        self._lanes: dict[str, int] = {}
        self._earlier: dict[str, tuple[float, int]] = {}  # busy seconds and bytes of each lane

    def add(self, span: Span) -> None:
        if self._count == len(self._packed):
            self._drop_earlier()
        (op, *place), lane, start, end, moved = span
        self._packed[self._count] = (OP_NUMBERS[op], self._lanes.setdefault(lane, len(self._lanes)), *place, start, end, moved)
        self._count += 1

    def _drop_earlier(self) -> None:
        """Adds all but the latest spans to the sums of their lanes. A step waits for this, so none becomes an object."""
        in_order = self._in_order()
        gone = in_order[:-KEPT]
        for lane, number in self._lanes.items():
            if len(own := gone[gone["lane"] == number]):
                seconds, moved = self._earlier.get(lane, (0.0, 0))
                self._earlier[lane] = (seconds + _busy_seconds(own), moved + int(own["bytes"].sum()))
        self._packed[:KEPT], self._count = in_order[-KEPT:], KEPT

    def _in_order(self) -> numpy.ndarray:
        """The spans in the order of their starts."""
        packed = self._packed[: self._count]
        in_order: numpy.ndarray = packed[packed["start"].argsort(kind="stable")]
        return in_order

    def trace(self) -> Trace:
        return Trace(PackedSpans(self._in_order(), tuple(self._lanes)), dict(self._earlier))


def _busy_seconds(own: numpy.ndarray) -> float:
    """Seconds with at least one of a lane's spans, which are in the order of their starts."""
    reached = numpy.maximum.accumulate(own["end"])
    reached = numpy.concatenate(([0.0], reached[:-1]))  # before each
    return float(numpy.maximum(0.0, own["end"] - numpy.maximum(own["start"], reached)).sum())


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
        self._kept = LatestSpans()

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
        self._kept.add(span)

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
        """The latest spans of timed tasks, and sums of the earlier ones."""
        return self._kept.trace()
