"""A trace counts what its lanes did and draws it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from h2o_flexgen.core.model_spec import LayerName
from h2o_flexgen.schedule.ops import Key, Op
from h2o_flexgen.schedule.trace import Span, Trace


def span(op: Op, lane: str, start: float, end: float, step: int = 0, layer: int = 0, batch: int = 0, size: int = 0) -> Span:
    return Span(Key(op, step, layer, batch), lane, start, end, size)


TWO_STEPS = Trace(
    (
        span(Op.READ_W, "read", 0.0, 4.0, layer=3, size=400),
        span(Op.READ_KV, "read", 2.0, 6.0, layer=3, batch=1, size=40),
        span(Op.READ_W, "read", 9.0, 10.0, layer=3, size=100),
        span(Op.COMPUTE, "compute", 4.0, 8.0, layer=3),
        span(Op.COMPUTE, "compute", 8.0, 9.0, layer=3, batch=1),
        span(Op.COMPUTE, "compute", 10.0, 20.0, step=1, layer=12),
    )
)


NAMES = [LayerName(f"expert {layer} of block 0", 0, is_of_experts=True) for layer in range(12)] + [
    LayerName("attention of block 1", 1)
]


def test_the_makespan_is_the_last_end() -> None:
    assert TWO_STEPS.makespan == 20.0


def test_tasks_of_a_lane_that_overlap_keep_it_busy_once() -> None:
    assert TWO_STEPS.busy_seconds("read") == 7.0
    assert TWO_STEPS.busy_seconds("compute") == 15.0
    assert TWO_STEPS.busy_seconds("store") == 0.0


def test_busy_shares_are_of_the_makespan_and_lanes_stand_in_the_order_of_the_data() -> None:
    assert TWO_STEPS.busy_shares() == {"read": 0.35, "compute": 0.75}
    assert TWO_STEPS.lanes == ("read", "compute")


def test_bytes_are_summed_by_lane() -> None:
    assert (TWO_STEPS.moved_bytes("read"), TWO_STEPS.moved_bytes("compute")) == (540, 0)


def test_a_step_ends_with_its_last_compute() -> None:
    assert TWO_STEPS.step_ends() == [9.0, 20.0]


def test_a_window_of_a_trace_is_a_trace_of_its_own() -> None:
    window = TWO_STEPS.between(1.0, 5.0)
    assert [(each.start, each.end, each.bytes) for each in window.spans] == [(0.0, 3.0, 300), (1.0, 4.0, 30), (3.0, 4.0, 0)]
    assert window.busy_shares() == {"read": 1.0, "compute": 0.25}


def test_the_text_timeline_shows_labels_scale_and_shares() -> None:
    scale, read, compute = TWO_STEPS.text_timeline(40).splitlines()
    assert scale == "        |" + "0s".ljust(20) + "10s".ljust(17) + "20s|"
    assert read == "read    |" + "W3.0----" + "KKKK" + " " * 6 + "WW" + " " * 20 + "|  35% busy"
    assert compute == "compute |" + " " * 8 + "3.0-----" + "33" + "  " + "12.0".ljust(20, "-") + "|  75% busy"


def test_a_time_of_the_scale_that_would_run_into_the_last_one_is_left_out() -> None:
    scale = Trace((span(Op.COMPUTE, "compute", 0.0, 1.172),)).text_timeline(110).splitlines()[0]
    assert scale.split("|")[1].split() == ["0s", "0.213s", "0.426s", "0.639s", "0.852s", "1.172s"]


def test_with_names_the_text_timeline_says_what_layers_are_where_there_is_room_and_marks_experts() -> None:
    _, read, compute, legend = TWO_STEPS.text_timeline(100, NAMES).splitlines()
    assert read.startswith("read    |" + "W3.0".ljust(20, "-") + "K3.1------"), "its name is a letter too long"
    assert "|" + " " * 20 + "expert 3 of block 0-" + "3.1--" + "     " + "attention of block 1".ljust(50, "-") + "|" in compute
    assert legend == "W weights; K KV; x experts compute; a digit: any other layer computes, the last digit of its number"
    assert "xx  " in TWO_STEPS.text_timeline(40, NAMES).splitlines()[2]
    dense = [LayerName(f"mlp of block {layer}", layer) for layer in range(13)]
    assert len(TWO_STEPS.text_timeline(40, dense).splitlines()) == 3, "nothing is there that needs a legend"


@pytest.mark.parametrize("width", [1, 7, 30, 100, 333])
def test_every_line_of_the_timeline_has_the_width_asked_for(width: int) -> None:
    bars = [line[line.index("|") : line.rindex("|") + 1] for line in TWO_STEPS.text_timeline(width).splitlines()]
    assert [len(bar) for bar in bars] == [width + 2] * 3


def test_empty_and_instant_traces_can_be_drawn() -> None:
    assert Trace(()).text_timeline(30).count("\n") == 0
    instant = Trace((span(Op.COMPUTE, "compute", 0.0, 0.0),))
    assert instant.busy_shares() == {"compute": 0.0}
    assert "0% busy" in instant.text_timeline(30)


def test_chrome_events_are_in_microseconds_and_rows_are_named() -> None:
    events = TWO_STEPS.to_chrome()["traceEvents"]
    assert isinstance(events, list)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(names.values()) == ["read", "read 2", "compute"]
    done = [event for event in events if event["ph"] == "X"]
    assert len(done) == len(TWO_STEPS.spans)
    kv = next(event for event in done if event["name"] == "READ_KV 0.3.1")
    assert names[kv["tid"]] == "read 2"
    assert (kv["ts"], kv["dur"]) == (2e6, 4e6)
    assert kv["args"] == {"step": 0, "layer": 3, "batch": 1, "bytes": 40}


def test_chrome_events_say_what_a_layer_is() -> None:
    events = TWO_STEPS.to_chrome(NAMES)["traceEvents"]
    assert isinstance(events, list)
    assert next(event for event in events if event["name"] == "READ_KV 0.3.1")["args"]["what"] == "expert 3 of block 0"


def test_rows_of_the_chrome_trace_never_overlap() -> None:
    events = TWO_STEPS.to_chrome()["traceEvents"]
    assert isinstance(events, list)
    for row in {event["tid"] for event in events}:
        times = sorted(
            (event["ts"], event["ts"] + event["dur"]) for event in events if event["ph"] == "X" and event["tid"] == row
        )
        assert all(before[1] <= after[0] for before, after in pairwise(times))


def test_the_chrome_file_is_json_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    TWO_STEPS.write_chrome(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == TWO_STEPS.to_chrome()
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    broken = Trace((span(Op.COMPUTE, "compute", 0.0, 1.0)._replace(bytes={1, 2}),))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        broken.write_chrome(path)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("trace.json", "old")]
