"""The simulator against an event by event model of the executor, against closed forms, and against the busiest lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

import pytest

from h2o_flexgen.core.site import HOST
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.schedule.barrier import FlexGenBarrier
from h2o_flexgen.schedule.ops import Key, Op, Task
from h2o_flexgen.schedule.row_by_row import RowByRow
from h2o_flexgen.schedule.schedule import Schedule
from h2o_flexgen.schedule.simulate import simulate
from h2o_flexgen.schedule.traffic import Traffic
from h2o_flexgen.schedule.zigzag import Zigzag
from tests.planning.worlds import SlowMotion, durations, random_moves, streamed

every_schedule = pytest.mark.parametrize("kind", SCHEDULES.values(), ids=SCHEDULES.keys())


def by_op(seconds: Mapping[Op, float]) -> Callable[[Task], float]:
    return lambda task: seconds[task.op]


def layer_seconds(schedule: Schedule, compute: float, read: float) -> Callable[[Task], float]:
    """`compute` and `read` seconds for a whole layer of a block, whatever the schedule cuts it into."""
    batches = schedule.traffic.batches
    slices = batches if schedule.cuts_layers else 1
    return lambda task: compute / batches if task.op is Op.COMPUTE else read / slices


@every_schedule
@pytest.mark.parametrize("ahead", [0, 1, 2, 5, None])
def test_one_pass_gives_what_an_event_by_event_executor_does(kind: type[Schedule], ahead: int | None) -> None:
    for seed in range(25):
        random = Random(seed)
        tasks = list(kind(random_moves(random, layers=4, batches=3)).tasks())
        seconds = durations(tasks, random)
        simulated = {span.key: (span.start, span.end) for span in simulate(tasks, seconds, ahead).spans}
        expected = SlowMotion(seconds, ahead).run(tasks)
        assert simulated.keys() == expected.keys()
        assert all(simulated[key] == pytest.approx(expected[key]) for key in expected)


@every_schedule
def test_never_below_the_busiest_lane_nor_above_the_sum(kind: type[Schedule]) -> None:
    for seed in range(60):
        random = Random(seed)
        tasks = list(kind(random_moves(random)).tasks())
        seconds = durations(tasks, random)
        trace = simulate(tasks, seconds)
        for lane in trace.lanes:
            assert trace.busy_seconds(lane) == pytest.approx(sum(seconds(task) for task in tasks if task.lane == lane))
            assert trace.makespan >= trace.busy_seconds(lane) - 1e-9
        assert trace.makespan <= sum(map(seconds, tasks)) + 1e-9


@pytest.mark.parametrize(("buffers", "each"), [(1, 7.0), (2, 3.5), (3, 3.0), (4, 3.0)])
def test_the_latency_of_a_read_is_hidden_where_the_next_one_is_in_the_queue(buffers: int, each: float) -> None:
    """A layer computes for 3 s and is read for 3 s and one of latency. With two buffers a read waits for the COMPUTE that frees
    its buffer, so that two layers take a COMPUTE and a whole read; with three the disk is never idle."""
    schedule = Zigzag(streamed(steps=1, layers=40, batches=1, buffers=buffers))
    of_read = {Op.READ_W: 1.0}
    trace = simulate(
        schedule.tasks(),
        by_op({Op.READ_W: 4.0, Op.COMPUTE: 3.0}),
        schedule.ahead,
        latency=lambda task: of_read.get(task.op, 0.0),
    )
    assert trace.makespan / 40 == pytest.approx(each, rel=0.05)


def test_as_many_reads_are_under_way_as_there_are_workers() -> None:
    """Reads of next to nothing: two at a time, each from its beginning to its end."""
    reads, writes = ([Task(op, 0, layer, 0, ()) for layer in range(10)] for op in (Op.READ_W, Op.WRITE_KV))

    def seconds(tasks: list[Task], latency: float) -> float:
        return simulate(tasks, lambda task: 1.0, None, latency=lambda task: latency).makespan

    assert (seconds(reads, 1.0), seconds(reads, 0.0)) == (5.0, 10.0)
    assert seconds(writes, 1.0) == 10.0, "by one worker"


def test_one_buffer_means_no_overlap_so_the_makespan_is_the_sum() -> None:
    for seed in range(20):
        random = Random(seed)
        traffic = streamed(random.randint(1, 3), random.randint(1, 5), random.randint(1, 4), buffers=1)
        tasks = list(Zigzag(traffic).tasks())
        seconds = durations(tasks, random)
        assert simulate(tasks, seconds).makespan == pytest.approx(sum(map(seconds, tasks)))


@pytest.mark.parametrize(("compute", "read"), [(1.0, 1.0), (1.0, 4.0), (4.0, 1.0), (3.0, 2.9)])
@pytest.mark.parametrize("batches", [1, 2, 4])
def test_streaming_weights_in_zigzag_costs_the_larger_of_compute_and_read_per_layer(
    compute: float, read: float, batches: int
) -> None:
    schedule = Zigzag(streamed(steps=3, layers=5, batches=batches, buffers=2))
    makespan = simulate(schedule.tasks(), layer_seconds(schedule, compute, read)).makespan
    assert makespan == pytest.approx(read + 14 * max(compute, read) + compute)


def test_two_hops_of_weights_cost_the_slowest_of_three_lanes_per_layer() -> None:
    traffic = streamed(steps=4, layers=10, batches=4, buffers=2, accelerator=True)
    for slowest in (Op.READ_W, Op.LOAD_W, Op.COMPUTE):
        seconds = {Op.READ_W: 0.8, Op.LOAD_W: 0.8, Op.COMPUTE: 0.8, slowest: 1.0}
        trace = simulate(Zigzag(traffic).tasks(), by_op(seconds))
        assert 160 <= trace.makespan <= 160 * 1.05


@pytest.mark.parametrize("compute", [0.5, 1.0, 2.0])
def test_zigzag_is_faster_than_the_barrier_loop_and_that_than_row_by_row(compute: float) -> None:
    traffic = Traffic(
        steps=4,
        layers=6,
        batches=4,
        buffers=2,
        accelerator=True,
        weights_on_host=frozenset(range(6)),
        kv={(layer, batch): HOST for layer in (1, 3) for batch in range(4)},
    )
    spans = []
    for kind in (Zigzag, FlexGenBarrier, RowByRow):
        schedule = kind(traffic)
        weights = 1.0 / (traffic.batches if schedule.cuts_layers else 1)
        seconds = {Op.LOAD_W: weights, Op.COMPUTE: compute / traffic.batches, Op.LOAD_KV: 0.05, Op.STORE_KV: 0.01}
        spans.append(simulate(schedule.tasks(), by_op(seconds)).makespan)
    assert spans[0] < 0.9 * spans[1] < 0.9 * spans[2]


def test_what_stands_behind_a_compute_is_issued_when_the_compute_ahead_of_that_has_ended() -> None:
    """Three computes of a second each, then a read that needs nothing."""
    tasks = [*(Task(Op.COMPUTE, 0, layer, 0) for layer in range(3)), Task(Op.READ_W, 0, 3, 0)]
    starts = {ahead: simulate(tasks, lambda task: 1.0, ahead).spans[-1].start for ahead in (0, 1, 2, 3, None)}
    assert starts == {0: 3.0, 1: 2.0, 2: 1.0, 3: 0.0, None: 0.0}


def test_a_longer_look_ahead_never_makes_weight_streaming_slower() -> None:
    schedule = Zigzag(streamed(steps=2, layers=4, batches=3, buffers=2))
    times = [simulate(schedule.tasks(), layer_seconds(schedule, 2.0, 1.9), ahead).makespan for ahead in (0, 1, 2, None)]
    assert times == sorted(times, reverse=True)


def test_spans_carry_the_bytes_of_their_tasks() -> None:
    schedule = Zigzag(streamed(steps=1, layers=2, batches=1, buffers=2))
    trace = simulate(schedule.tasks(), lambda task: 1.0, nbytes=lambda task: 7 if task.op is Op.READ_W else 0)
    assert (trace.moved_bytes("read"), trace.moved_bytes("compute")) == (14, 0)
    assert trace.spans[0].key == Key(Op.READ_W, 0, 0, 0)


def test_a_negative_look_ahead_is_refused() -> None:
    with pytest.raises(ValueError, match="ahead is -1"):
        simulate([], lambda task: 1.0, ahead=-1)
