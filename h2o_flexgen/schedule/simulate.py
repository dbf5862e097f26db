"""simulate: a schedule and the seconds of each task -> the Trace that a run should leave.

It predicts the executor, so it knows how that issues. One thread takes tasks from the schedule in issue order. A task of
another lane it hands over at once; a COMPUTE it puts aside, and whenever more than `ahead` of them are put aside it runs the
oldest, waiting for its needs, before it takes the next task. So whatever comes after the k-th COMPUTE in issue order is
issued when COMPUTE number k - ahead has ended (at the start if there is none). With ahead=0 nothing that comes after a
COMPUTE is issued before it has ended; with ahead=1 the fetches for the next COMPUTE are under way while one runs; None issues
everything at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from h2o_flexgen.schedule.ops import WORKERS, Key, Lanes, Task, kind_of
from h2o_flexgen.schedule.trace import Span, Trace

ONE_DEVICE = Lanes()


def simulate(
    tasks: Iterable[Task],
    seconds: Callable[[Task], float],
    ahead: int | None = 1,
    nbytes: Callable[[Task], int] = lambda task: 0,
    lanes: Lanes = ONE_DEVICE,
    latency: Callable[[Task], float] = lambda task: 0.0,
) -> Trace:
    """One pass in issue order: a task starts when its lane is free, its needs have ended and it is issued.

    The bandwidth of a lane is that of one task at a time. A second worker hides latency: the seconds at the end of a task in
    which its lane can do the next one already. A task that is alone in its lane hides nothing."""
    if ahead is not None and ahead < 0:
        raise ValueError(f"ahead is {ahead}; give 0 or more, or None for no limit")
    ends: dict[Key, float] = {}
    lane_free: dict[str, float] = {}
    workers_free: dict[str, list[float]] = {}
    window: deque[float] = deque(maxlen=None if ahead is None else ahead + 1)  # ends of the last COMPUTEs issued
    spans = []
    for task in tasks:
        key, lane = task.key, lanes.of(task)
        workers = workers_free.setdefault(lane, [0.0] * WORKERS[kind_of(lane)])
        start = max(window[0] if len(window) == window.maxlen else 0.0, lane_free.get(lane, 0.0), min(workers))
        for need in task.needs:
            if ends[need] > start:
                start = ends[need]
        end = ends[key] = start + seconds(task)
        lane_free[lane] = end - latency(task)
        workers[workers.index(min(workers))] = end
        if lane == lanes.of_head:
            window.append(end)
        spans.append(Span(key, lane, start, end, nbytes(task)))
    return Trace(tuple(spans))
