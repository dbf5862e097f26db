"""What every schedule promises, for random plans and random durations; and small schedules written out."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from h2o_flexgen.core.site import DEVICE, DISK, HOST
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.schedule.barrier import FlexGenBarrier
from h2o_flexgen.schedule.check import ScheduleError, check
from h2o_flexgen.schedule.ops import MOVED, Data, Key, Op, Visit
from h2o_flexgen.schedule.row_by_row import RowByRow
from h2o_flexgen.schedule.schedule import Schedule
from h2o_flexgen.schedule.simulate import simulate
from h2o_flexgen.schedule.traffic import Traffic
from h2o_flexgen.schedule.zigzag import Zigzag
from tests.planning.worlds import SlowMotion, durations, random_moves, streamed

every_schedule = pytest.mark.parametrize("kind", SCHEDULES.values(), ids=SCHEDULES.keys())


def written(schedule: Schedule) -> list[str]:
    return [f"{task} < {', '.join(map(str, task.needs))}" if task.needs else str(task) for task in schedule.tasks()]


@every_schedule
def test_random_plans_pass_the_check(kind: type[Schedule]) -> None:
    for seed in range(150):
        check(kind(random_moves(Random(seed))))


@every_schedule
def test_every_visit_is_computed_once_and_in_the_order_of_its_number(kind: type[Schedule]) -> None:
    for seed in range(50):
        schedule = kind(random_moves(Random(seed)))
        computed = [Visit(*task.key[1:]) for task in schedule.tasks() if task.op is Op.COMPUTE]
        assert [schedule.number(*visit) for visit in computed] == list(range(schedule.traffic.visits))
        assert len(set(computed)) == schedule.traffic.visits


@every_schedule
def test_the_tasks_are_the_computes_and_the_transfers_of_their_visits(kind: type[Schedule]) -> None:
    """The first step of a phase stands for all of its steps."""
    for seed in range(100):
        schedule = kind(random_moves(Random(seed)))
        named: Counter[Key] = Counter()
        for steps in schedule.traffic.phases:
            for key in schedule.in_step(steps[0]):
                for step in steps:
                    named.update(schedule.keys(key.op, Visit(step, key.layer, key.batch)))
        assert Counter(task.key for task in schedule.tasks()) == named


@every_schedule
def test_no_buffer_has_two_users_at_a_time_whatever_the_durations(kind: type[Schedule]) -> None:
    for seed in range(40):
        random = Random(seed)
        schedule = kind(random_moves(random, layers=4, batches=3))
        tasks = list(schedule.tasks())
        ran = SlowMotion(durations(tasks, random), random.choice([0, 1, 3, None]), {"read": 2}).run(tasks)
        used: dict[tuple[str, int], dict[int, tuple[float, float]]] = defaultdict(dict)
        for task in tasks:
            start, end = ran[task.key]
            for ring, slot, user in schedule.touches(task):
                first, last = used[ring, slot].get(user, (start, end))
                used[ring, slot][user] = min(start, first), max(end, last)
        for users in used.values():
            ordered = [users[user] for user in sorted(users)]
            assert all(before[1] <= after[0] for before, after in pairwise(ordered))


def test_buffers_lie_within_their_ring() -> None:
    for seed in range(30):
        for kind in SCHEDULES.values():
            schedule = kind(random_moves(Random(seed)))
            for task in schedule.tasks():
                for ring, slot, _ in schedule.touches(task):
                    data = next(data for data in MOVED if ring.startswith(f"{data}."))
                    assert 0 <= slot < schedule.buffers_of(data) <= max(schedule.weight_buffers, schedule.buffers)


@every_schedule
def test_in_models_with_states_only_their_users_take_buffers_of_kv_and_of_states(kind: type[Schedule]) -> None:
    """Of nine layers two have states and one has KV, as in blocks with experts. Without states all visits take a buffer."""
    hybrid = Traffic(3, 9, 2, 4, state={(0, 0): DISK, (0, 1): DISK, (4, 0): DEVICE}, kv={(8, 0): DISK})
    schedules = kind(hybrid), kind(replace(hybrid, state={}))
    for schedule in schedules:
        check(schedule)
    found = [[schedule.buffers_of(data) for data in (Data.STATE, Data.KV)] for schedule in schedules]
    batch_by_batch = kind is RowByRow  # no two visits with states follow each other, and none is stored beside others
    assert found == [[1, 1] if batch_by_batch else [3, 2], [schedules[0].buffers] * 2]


def test_a_ring_with_fewer_buffers_than_visits_that_follow_each_other_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Zigzag(Traffic(3, 9, 3, 4, state={(0, batch): DISK for batch in range(3)}))
    check(schedule)
    monkeypatch.setattr(Zigzag, "_users", {(Data.STATE, 0): schedule._users[Data.STATE, 0]._replace(buffers=2)})
    with pytest.raises(ScheduleError, match=r"still uses buffer \d of state\.host"):
        check(Zigzag(schedule.traffic))


@every_schedule
def test_a_plan_that_moves_nothing_only_computes(kind: type[Schedule]) -> None:
    traffic = Traffic(2, 2, 2, accelerator=False, weights_on_host=frozenset({0, 1}), kv={(0, 0): HOST}, hidden=(HOST, HOST))
    assert {task.op for task in kind(traffic).tasks()} == {Op.COMPUTE}


def test_zigzag_fetches_the_next_layer_in_slices_beside_the_computes() -> None:
    assert written(Zigzag(streamed(steps=1, layers=3, batches=2, buffers=2))) == [
        "READ_W 0.0.0",
        "READ_W 0.0.1",
        "READ_W 0.1.0",
        "COMPUTE 0.0.0 < READ_W 0.0.0, READ_W 0.0.1",
        "READ_W 0.1.1",
        "COMPUTE 0.0.1",
        "READ_W 0.2.0 < COMPUTE 0.0.1",
        "COMPUTE 0.1.0 < COMPUTE 0.0.0, READ_W 0.1.0, READ_W 0.1.1",
        "READ_W 0.2.1 < COMPUTE 0.0.1",
        "COMPUTE 0.1.1 < COMPUTE 0.0.1",
        "COMPUTE 0.2.0 < COMPUTE 0.1.0, READ_W 0.2.0, READ_W 0.2.1",
        "COMPUTE 0.2.1 < COMPUTE 0.1.1",
    ]


def test_zigzag_with_one_buffer_reads_a_layer_only_after_the_one_before() -> None:
    assert written(Zigzag(streamed(steps=1, layers=2, batches=2, buffers=1))) == [
        "READ_W 0.0.0",
        "READ_W 0.0.1",
        "COMPUTE 0.0.0 < READ_W 0.0.0, READ_W 0.0.1",
        "COMPUTE 0.0.1",
        "READ_W 0.1.0 < COMPUTE 0.0.1",
        "READ_W 0.1.1 < COMPUTE 0.0.1",
        "COMPUTE 0.1.0 < COMPUTE 0.0.0, READ_W 0.1.0, READ_W 0.1.1",
        "COMPUTE 0.1.1 < COMPUTE 0.0.1",
    ]


def test_zigzag_on_an_accelerator_moves_kv_and_hidden_states_through_their_tiers() -> None:
    traffic = Traffic(2, 2, 1, 2, accelerator=True, weights_on_host=frozenset({1}), kv={(0, 0): DISK}, hidden=(HOST,))
    assert [str(task) for task in Zigzag(traffic).tasks()] == [
        "LOAD_W 0.1.0",
        "COMPUTE 0.0.0",
        "STORE_H 0.0.0",
        "STORE_KV 0.0.0",
        "WRITE_KV 0.0.0",
        "READ_KV 1.0.0",
        "LOAD_KV 1.0.0",
        "LOAD_H 0.1.0",
        "COMPUTE 0.1.0",
        "LOAD_W 1.1.0",
        "COMPUTE 1.0.0",
        "STORE_H 1.0.0",
        "LOAD_H 1.1.0",
        "COMPUTE 1.1.0",
    ]


def test_the_barrier_loop_makes_every_visit_wait_for_all_of_the_one_before() -> None:
    assert written(FlexGenBarrier(streamed(steps=1, layers=2, batches=2, buffers=2))) == [
        "READ_W 0.0.0",
        "READ_W 0.1.0 < READ_W 0.0.0",
        "COMPUTE 0.0.0 < READ_W 0.0.0",
        "COMPUTE 0.0.1 < READ_W 0.1.0, COMPUTE 0.0.0",
        "COMPUTE 0.1.0 < COMPUTE 0.0.0, READ_W 0.1.0, COMPUTE 0.0.1",
        "COMPUTE 0.1.1 < COMPUTE 0.0.1, COMPUTE 0.1.0",
    ]


def test_the_barrier_loop_copies_hidden_states_before_it_computes_and_behind_weights_on_the_link() -> None:
    traffic = Traffic(1, 3, 2, accelerator=True, weights_on_host=frozenset({1, 2}), hidden=(HOST, HOST))
    tasks = list(FlexGenBarrier(traffic).tasks())
    copies = {Key(Op.STORE_H, 0, 0, 1), Key(Op.LOAD_H, 0, 1, 1)}  # of the batch before and of the one that comes
    assert copies < set(next(task for task in tasks if task.key == Key(Op.COMPUTE, 0, 1, 0)).needs)
    trace = simulate(tasks, lambda task: {Op.LOAD_W: 5.0, Op.COMPUTE: 3.0}.get(task.op, 0.0))
    starts = {span.key: span.start for span in trace.spans}
    assert starts[Key(Op.LOAD_W, 0, 2, 0)] + 5.0 == starts[Key(Op.COMPUTE, 0, 1, 0)]


def test_row_by_row_reads_all_weights_anew_for_every_batch() -> None:
    assert written(RowByRow(streamed(steps=1, layers=2, batches=2, buffers=2))) == [
        "READ_W 0.0.0",
        "READ_W 0.1.0",
        "COMPUTE 0.0.0 < READ_W 0.0.0",
        "READ_W 0.0.1 < COMPUTE 0.0.0",
        "COMPUTE 0.1.0 < COMPUTE 0.0.0, READ_W 0.1.0",
        "READ_W 0.1.1 < COMPUTE 0.1.0",
        "COMPUTE 0.0.1 < READ_W 0.0.1",
        "COMPUTE 0.1.1 < COMPUTE 0.0.1, READ_W 0.1.1",
    ]


def test_moves_refuses_sizes_below_one() -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        Traffic(steps=0, layers=1, batches=1)
