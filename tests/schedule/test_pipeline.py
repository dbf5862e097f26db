"""The pipeline as a schedule: sound for random traffics, and devices compute at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

import pytest

from h2o_flexgen.core.site import DEVICE, DISK
from h2o_flexgen.schedule.check import ORDERED_LANES, ScheduleError, check
from h2o_flexgen.schedule.ops import Data, Key, Op, Task, Visit
from h2o_flexgen.schedule.pipeline import Pipeline
from h2o_flexgen.schedule.simulate import simulate
from h2o_flexgen.schedule.traffic import Traffic
from tests.planning.worlds import random_moves

RESIDENT = Traffic(steps=3, layers=4, batches=2, accelerator=True, hidden=(DEVICE,) * 2, device_of=(0, 0, 1, 1))


def random_pipeline(random: Random, layers: int = 6, batches: int = 5) -> Pipeline:
    moves = random_moves(random, layers, batches)
    devices = random.randint(1, min(4, moves.layers))
    starts = sorted(random.sample(range(1, moves.layers), devices - 1))
    device_of = tuple(sum(layer >= start for start in starts) for layer in range(moves.layers))
    return Pipeline(
        replace(
            moves,
            accelerator=True,
            attends_on_host=False,
            kv_before=False,
            rows_join=False,
            choosing=frozenset(),
            device_of=device_of,
        )
    )


def with_tasks(schedule: Pipeline, tasks: list[Task]) -> Pipeline:
    @dataclass(frozen=True)
    class Changed(Pipeline):
        def tasks(self) -> Iterator[Task]:
            return iter(tasks)

    return Changed(schedule.traffic)


@pytest.mark.parametrize("seed", range(40))
def test_random_traffics_are_sound_and_visits_keep_their_numbers(seed: int) -> None:
    schedule = random_pipeline(Random(seed))
    check(schedule)
    for number in range(schedule.traffic.visits):
        assert schedule.number(*schedule.visit(number)) == number


def test_on_devices_with_states_only_their_users_take_buffers_of_kv_and_of_states() -> None:
    """The first device has states in one of five layers and KV in another one, the second has KV alone. What a device sees of
    the schedule has the same buffers."""
    kv = {(layer, batch): DISK for layer in (3, 5, 6) for batch in range(2)}
    whole = Traffic(4, 7, 2, 4, accelerator=True, state={(0, 0): DISK, (0, 1): DISK}, kv=kv, device_of=(0,) * 5 + (1,) * 2)
    check(Pipeline(whole))
    asked = (Data.STATE, Data.KV)
    assert [Pipeline(whole).buffers_of(data) for data in asked] == [2, 5]
    sections = [
        replace(whole, state=whole.state if first else {}, kv={place: DISK for place in kv if (place[0] == 3) == first})
        for first in (True, False)
    ]
    assert [[Pipeline(section).buffers_of(data) for data in asked] for section in sections] == [[2, 2], [5, 5]]
    for section in sections:
        for layer, batch in section.kv:
            for step in range(4):
                visit = Visit(step, layer, batch)
                assert Pipeline(section).buffer_of(Data.KV, visit) == Pipeline(whole).buffer_of(Data.KV, visit)


@pytest.mark.parametrize("seed", range(20))
def test_buffers_meet_in_no_more_ways_than_are_counted(seed: int) -> None:
    random = Random(seed)
    moves = replace(random_pipeline(random).traffic, steps=60, buffers=random.randint(1, 4))
    places = [(layer, batch) for layer in range(moves.layers) for batch in range(moves.batches)]
    kv, state = ({place: DISK for place in places if random.random() < share} for share in (0.7, 0.5))
    schedule = Pipeline(replace(moves, kv=kv, state=state))
    for layer, batch in places:
        of_rows = [data for data, homes in ((Data.KV, kv), (Data.STATE, state)) if (layer, batch) in homes]
        assert met_in(schedule, layer, batch, Data.WEIGHTS, *of_rows) <= schedule.ways(Data.WEIGHTS, *of_rows)


def met_in(schedule: Pipeline, layer: int, batch: int, *moved: Data) -> int:
    visits = (Visit(step, layer, batch) for step in range(schedule.traffic.steps))
    return len({tuple(schedule.buffer_of(data, visit) for data in moved) for visit in visits})


@pytest.mark.parametrize(("buffers", "ways"), [(1, 1), (2, 6), (4, 20)])
def test_a_layer_with_kv_and_a_state_has_few_ways(buffers: int, ways: int) -> None:
    homes = {(layer, 0): DISK for layer in range(6)}
    schedule = Pipeline(Traffic(60, 6, 1, buffers, accelerator=True, kv=homes, state=homes, device_of=(0,) * 5 + (1,)))
    assert schedule.ways(Data.WEIGHTS, Data.KV, Data.STATE) == ways


def test_devices_with_fewer_buffers_may_have_more_ways() -> None:
    """The first device has three buffers of states beside four of weights and five of KV, the second five of states."""
    kv = {(layer, batch): DISK for layer in range(6) for batch in range(2)}
    state = {(layer, batch): DISK for layer in (0, 3, 4, 5) for batch in range(2)}
    schedule = Pipeline(Traffic(60, 6, 2, 4, accelerator=True, kv=kv, state=state, device_of=(0,) * 3 + (1,) * 3))
    asked = (Data.WEIGHTS, Data.KV, Data.STATE)
    assert [schedule.buffers_of(data) for data in asked] == [4, 5, 5]
    assert 20 < met_in(schedule, 0, 0, *asked) <= schedule.ways(*asked)


def test_every_need_matters_unless_others_imply_it() -> None:
    """Dropping any one is found."""
    dropped = passes = 0
    for seed in range(8):
        schedule = random_pipeline(Random(seed), layers=4, batches=3)
        tasks = list(schedule.tasks())
        for at, task in enumerate(tasks):
            for need in set(task.needs):
                kept = tuple(other for other in task.needs if other != need)
                mutant = [*tasks[:at], task._replace(needs=kept), *tasks[at + 1 :]]
                if need not in over_before(schedule, mutant, at):
                    dropped += 1
                    passes += Op.PASS_H in (task.op, need.op)
                    with pytest.raises(ScheduleError, match=f"^{task} "):
                        check(with_tasks(schedule, mutant))
    assert dropped > 100 and passes > 5


def over_before(schedule: Pipeline, tasks: list[Task], at: int) -> set[Key]:
    """What is over before a task, found by walking: its needs, and the task before it in a lane of one worker."""
    ancestors: dict[Key, set[Key]] = {}
    last: dict[str, Key] = {}
    for task in islice(tasks, at + 1):
        direct, lane = set(task.needs), schedule.traffic.lanes.of(task)
        if task.op.lane in ORDERED_LANES:
            direct |= {last[lane]} if lane in last else set()
            last[lane] = task.key
        ancestors[task.key] = direct.union(*(ancestors[key] for key in direct))
    return ancestors[tasks[at].key]


def test_hidden_states_that_are_not_handed_on_are_missed() -> None:
    schedule = Pipeline(RESIDENT)
    tasks = [task for task in schedule.tasks() if task.op is not Op.PASS_H]
    with pytest.raises(ScheduleError, match=r"needs PASS_H 0.1.0, which was not issued before it"):
        check(with_tasks(schedule, tasks))
    without = [task._replace(needs=tuple(need for need in task.needs if need.op is not Op.PASS_H)) for task in tasks]
    with pytest.raises(ScheduleError, match=r"PASS_H 0.1.0 is never issued"):
        check(with_tasks(schedule, without))


def test_hidden_states_are_handed_on_where_the_device_changes_and_nowhere_else() -> None:
    passed = [task.key for task in Pipeline(RESIDENT).tasks() if task.op is Op.PASS_H]
    assert sorted(passed, key=lambda key: key[1:]) == [
        Key(Op.PASS_H, step, 1, batch) for step in range(3) for batch in range(2)
    ]
    alone = replace(RESIDENT, device_of=(0,) * 4)
    assert not [task for task in Pipeline(alone).tasks() if task.op is Op.PASS_H]


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_with_as_many_batches_as_devices_all_compute_at_once(devices: int) -> None:
    traffic = Traffic(
        steps=10,
        layers=4 * devices,
        batches=devices,
        accelerator=True,
        hidden=(DEVICE,) * devices,
        device_of=tuple(device for device in range(devices) for _ in range(4)),
    )
    schedule = Pipeline(traffic)
    trace = simulate(schedule.tasks(), lambda task: float(task.op is Op.COMPUTE), schedule.ahead, lanes=traffic.lanes)
    fill = 4 * (devices - 1)  # rounds in which a device has nothing, at the beginning and at the end
    assert trace.makespan == traffic.visits / devices + fill
    assert [lane for lane in trace.lanes if lane.startswith("compute")] == [f"compute {device}" for device in range(devices)]


def test_one_batch_is_computed_by_one_device_at_a_time() -> None:
    schedule = Pipeline(replace(RESIDENT, batches=1, hidden=(DEVICE,)))
    seconds = simulate(schedule.tasks(), lambda task: 1.0, schedule.ahead, lanes=schedule.traffic.lanes).makespan
    assert seconds == schedule.traffic.visits + schedule.traffic.steps  # and once a step they are handed on
