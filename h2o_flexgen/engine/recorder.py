"""The recorder: what every task did and when, from all lanes, in memory that does not grow with the length of a job.

Lanes only append; the caller's thread collects. On an accelerator a task's times are known when its markers are passed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from h2o_flexgen.memory.device import Device, Marker
from h2o_flexgen.schedule.task import Key, Task
from h2o_flexgen.schedule.trace import Span, Trace

KEPT = 1 << 14  # latest spans that are kept; of earlier ones only the sums per lane are


class Recorder:
    def __init__(self, device: Device, started_at: float, start: Marker | None) -> None:
        self._device = device
        self._started_at = started_at
        self._start = start
        self._ended: deque[Span] = deque()
        self._marked: deque[tuple[Task, Marker, Marker, int]] = deque()
        self.busy_seconds: Counter[str] = Counter()  # of each lane, so far
        self._trace = Trace(())
        self._kept: list[Span] = []

    def add(self, task: Task, begun: float, ended: float, moved: int) -> None:
        """Adds a task that was over when its action returned. Times are those of time.perf_counter."""
        self._ended.append(Span(task.key, task.lane, begun - self._started_at, ended - self._started_at, moved))

    def add_marked(self, task: Task, first: Marker, last: Marker, moved: int) -> None:
        """Adds a task that a stream does between two markers."""
        self._marked.append((task, first, last, moved))

    def collect(self) -> Iterator[Key]:
        """Takes in what has ended since the last call, and yields the marked tasks among it."""
        while self._ended:
            self._keep(self._ended.popleft())
        while self._marked and self._marked[0][2].query():
            task, first, last, moved = self._marked.popleft()
            assert self._start is not None
            begun, ended = (self._device.seconds_between(self._start, marker) for marker in (first, last))
            self._keep(Span(task.key, task.lane, begun, ended, moved))
            yield task.key
        if len(self._kept) > 2 * KEPT:
            self._trace = self.trace().with_latest(KEPT)
            self._kept = []

    def _keep(self, span: Span) -> None:
        self._kept.append(span)
        self.busy_seconds[span.lane] += span.end - span.start  # type: ignore[assignment]

    def trace(self) -> Trace:
        spans = sorted((*self._trace.spans, *self._kept), key=lambda span: span.start)
        return Trace(tuple(spans), self._trace.earlier)
