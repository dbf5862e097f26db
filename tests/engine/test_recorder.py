"""What a run keeps of its tasks: the latest ones as they were, sums of the others, and little memory for both."""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from h2o_flexgen.engine import recorder
from h2o_flexgen.engine.recorder import LatestSpans
from h2o_flexgen.schedule.ops import Key, Op
from h2o_flexgen.schedule.trace import Span, Trace

MOST_BYTES = 1 << 20


def made_up(count: int) -> list[Span]:
    """Spans of all ops in the order in which tasks end. Some began after the next one; those of a lane never overlap."""
    random, ops = Random(3), tuple(Op)
    found = []
    for number in range(count):
        op, start = ops[number % len(ops)], number + random.random()
        key = Key(op, 70_000 + number, number % 900, number % 64)
        found.append(Span(key, f"{op.lane} {number % 2}", start, start + random.random(), random.choice([0, number << 20])))
    return sorted(found, key=lambda span: span.end)


def kept(spans: Sequence[Span]) -> Trace:
    latest = LatestSpans()
    for span in spans:
        latest.add(span)
    return latest.trace()


def test_spans_come_back_as_they_were_in_the_order_of_their_starts() -> None:
    spans = made_up(900)
    trace, expected = kept(spans), sorted(spans, key=lambda span: span.start)
    assert [*trace.spans] == expected and trace.earlier == {}
    assert (len(trace.spans), trace.spans[7], [*trace.spans[-3:]]) == (900, expected[7], expected[-3:])


def test_earlier_spans_become_sums_by_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "KEPT", 80)
    monkeypatch.setattr(recorder, "MORE", 20)
    spans = made_up(1000)
    trace, whole = kept(spans), Trace(tuple(spans))
    assert 80 <= len(trace.spans) <= 100 and [*trace.spans] == sorted(spans, key=lambda span: span.start)[-len(trace.spans) :]
    assert trace.lanes == whole.lanes
    for lane in whole.lanes:
        assert trace.moved_bytes(lane) == whole.moved_bytes(lane)
        assert trace.busy_seconds(lane) == pytest.approx(whole.busy_seconds(lane))


def test_earlier_spans_become_sums_in_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """It happens in the middle of a step."""
    monkeypatch.setattr(recorder, "KEPT", 800)
    monkeypatch.setattr(recorder, "MORE", 200)
    *spans, last = made_up(1001)
    latest, calls = LatestSpans(), Counter[str]()
    for span in spans:
        latest.add(span)
    profiler = sys.getprofile()
    sys.setprofile(lambda frame, event, value: calls.update([event]))
    try:
        latest.add(last)
    finally:
        sys.setprofile(profiler)
    assert len(latest.trace().spans) == 801 and latest.trace().earlier
    assert calls.total() < len(spans), "nothing is called for each of them"


def test_a_long_run_holds_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "KEPT", 2000)
    monkeypatch.setattr(recorder, "MORE", 500)
    some, latest = made_up(2500), LatestSpans()
    tracemalloc.start()
    try:
        for _ in range(5):
            for span in some:
                latest.add(span._replace(key=span.key._replace()))
        trace = latest.trace()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 2000 <= len(trace.spans) <= 2500 and peak < MOST_BYTES
