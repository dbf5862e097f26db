"""Where steps choose what is read of their KV: the order of visits, how early they choose, and faults that `check` finds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from h2o_flexgen.core.site import DISK, HOST
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.schedule.check import ScheduleError, check
from h2o_flexgen.schedule.ops import READ, Data, Key, Op, Task, Visit
from h2o_flexgen.schedule.schedule import Schedule
from h2o_flexgen.schedule.simulate import simulate
from h2o_flexgen.schedule.traffic import Traffic
from h2o_flexgen.schedule.zigzag import Zigzag
from tests.planning.worlds import choosing_moves

LAYERS, ATTENTION = 6, (1, 3)  # an embedding, two of attention, each with one behind it, and a head
SECONDS = {Op.COMPUTE: 3.0, Op.CHOOSE: 2.0, Op.READ_KV: 10.0, Op.WRITE_KV: 1.0}
every_schedule = pytest.mark.parametrize("kind", SCHEDULES.values(), ids=SCHEDULES.keys())


def choosing(batches: int = 2, **values: Any) -> Traffic:
    kv = {(layer, batch): DISK for layer in ATTENTION for batch in range(batches)}
    return Traffic(3, LAYERS, batches, **{"kv": kv, "choosing": frozenset(ATTENTION), **values})


def of_step(schedule: Schedule, step: int = 1) -> str:
    """The choices and the computes of a step, in order: layer and batch of each, choices in brackets."""
    said = {Op.CHOOSE: "({0.layer}.{0.batch})", Op.COMPUTE: "{0.layer}.{0.batch}"}
    return " ".join(said[task.op].format(task) for task in schedule.tasks() if task.op in said and task.step == step)


@every_schedule
def test_choices_are_sound_in_random_plans(kind: type[Schedule]) -> None:
    for seed in range(80):
        schedule = kind(choosing_moves(Random(seed)))
        check(schedule)
        numbers = range(schedule.traffic.visits)
        assert [schedule.number(*schedule.visit(number)) for number in numbers] == [*numbers]


def test_a_batch_passes_what_rests_behind_a_choice_before_the_next_one_comes() -> None:
    """So it can choose in the next layer while the KV of the batches behind it is read for this one."""
    two = "0.0 (1.0) 0.1 (1.1) 1.0 2.0 (3.0) 1.1 2.1 (3.1) 3.0 4.0 5.0 3.1 4.1 5.1"
    three = "0.0 (1.0) 0.1 (1.1) 0.2 (1.2) 1.0 2.0 (3.0) 1.1 2.1 (3.1) 1.2 2.2 (3.2) 3.0 4.0 5.0 3.1 4.1 5.1 3.2 4.2 5.2"
    assert (of_step(Zigzag(choosing())), of_step(Zigzag(choosing(3)))) == (two, three)


@pytest.mark.parametrize(
    ("moved", "order"),
    [
        ({"buffers": 1}, "0.0 0.1 (1.0) 1.0 (1.1) 1.1 2.0 2.1 (3.0) 3.0 (3.1) 3.1 4.0 4.1 5.0 5.1"),
        ({"weights_on_disk": frozenset({2, 5})}, "0.0 (1.0) 0.1 (1.1) 1.0 1.1 2.0 (3.0) 2.1 (3.1) 3.0 4.0 3.1 4.1 5.0 5.1"),
        ({"weights_on_disk": frozenset({3})}, "0.0 (1.0) 0.1 (1.1) 1.0 2.0 1.1 2.1 (3.0) (3.1) 3.0 3.1 4.0 4.1 5.0 5.1"),
        ({"hidden": (DISK, HOST)}, "0.0 (1.0) 0.1 (1.1) 1.0 1.1 2.0 (3.0) 2.1 (3.1) 3.0 3.1 4.0 4.1 5.0 5.1"),
    ],
)
def test_layers_of_which_something_moves_are_computed_one_by_one(moved: Mapping[str, Any], order: str) -> None:
    """And none waits for weights to choose, as long as there is something to compute."""
    schedule = Zigzag(choosing(**moved))
    check(schedule)
    assert of_step(schedule) == order


@pytest.mark.parametrize("batches", [2, 3, 5])
def test_reads_that_take_longest_follow_each_other_without_a_pause(batches: int) -> None:
    schedule = Zigzag(choosing(batches))
    spans = simulate(schedule.tasks(), lambda task: SECONDS[task.op], schedule.ahead).spans
    reads = sorted(span[2:4] for span in spans if span.lane == READ and span.key.step == 1)
    assert len(reads) == len(ATTENTION) * batches
    assert all(after[0] == before[1] for before, after in pairwise(reads))


def test_no_choice_waits_for_the_store_of_the_visit_right_before() -> None:
    """Of layers with nothing behind their attention: one of three buffers is being stored."""
    kv = {(layer, batch): DISK for layer in range(1, 5) for batch in range(4)}
    schedule, last = Zigzag(Traffic(3, LAYERS, 4, kv=kv, choosing=frozenset(range(1, 5)))), Visit(0, 0, 0)
    waits = []
    for task in schedule.tasks():
        last = task.visit if task.op is Op.COMPUTE else last
        waits += [task.key] * (task.op is Op.CHOOSE and Key(Op.WRITE_KV, *last) in task.needs)
    assert of_step(schedule).startswith("0.0 (1.0) 0.1 (1.1) 0.2 (1.2) 0.3 1.0 1.1 (1.3) 1.2 (2.0) 1.3") and not waits


def test_packed_weights_are_decoded_where_another_layer_was_computed_before() -> None:
    layers = [(layer, batch) for layer in range(LAYERS) for batch in range(2)]
    assert [place for place in layers if not Zigzag(choosing()).begins_layer(*place)] == [(0, 1)]
    assert all(Zigzag(choosing(buffers=1)).begins_layer(*place) == (place[1] == 0) for place in layers)


def test_a_choice_before_its_batch_has_left_the_layer_before_is_refused() -> None:
    schedule, left, chosen = Zigzag(choosing()), Key(Op.COMPUTE, 1, 2, 0), Key(Op.CHOOSE, 1, 3, 0)
    tasks = list(schedule.tasks())
    at, early = next((at, task) for at, task in enumerate(tasks) if task.key == chosen)
    begins = next(at for at, task in enumerate(tasks) if task.key == left)
    for needs, said in ((early.needs, "which was not issued before it"), (early.needs[1:], f"may start before {left}")):
        with pytest.raises(ScheduleError, match=f"{chosen} .*{said}"):
            check(_issuing(schedule, [*tasks[:begins], early._replace(needs=needs), *tasks[begins:at], *tasks[at + 1 :]]))


def test_what_a_device_chooses_is_brought_behind_its_choice_and_behind_the_last_store() -> None:
    kv = dict.fromkeys(((layer, batch) for layer in ATTENTION for batch in range(2)), HOST)
    assert of_step(Zigzag(choosing(accelerator=True, kv=kv))) == of_step(Zigzag(choosing())), "a link is as a disk here"
    schedule = Zigzag(choosing(accelerator=True, kv=kv, buffers=6))  # so many that none is waited for
    chosen, load = Key(Op.CHOOSE, 1, 3, 0), Key(Op.LOAD_KV, 1, 3, 0)
    tasks, stored = list(schedule.tasks()), Key(Op.STORE_KV, 0, 3, 0)
    for key, need in ((load, chosen), (Key(Op.COMPUTE, 1, 3, 0), load), (chosen, stored)):
        at, task = next((at, task) for at, task in enumerate(tasks) if task.key == key)
        early = task._replace(needs=tuple(one for one in task.needs if one != need))
        with pytest.raises(ScheduleError, match=f"{key} may start before {need} has ended"):
            check(_issuing(schedule, [*tasks[:at], early, *tasks[at + 1 :]]))


def test_what_a_device_chooses_of_a_disk_is_read_behind_its_choice_and_loaded_behind_that() -> None:
    schedule = Zigzag(choosing(accelerator=True, buffers=6))
    check(schedule)
    assert of_step(Zigzag(choosing(accelerator=True))) == of_step(Zigzag(choosing()))
    chosen, read, load, compute = (Key(op, 1, 3, 0) for op in (Op.CHOOSE, Op.READ_KV, Op.LOAD_KV, Op.COMPUTE))
    stored, written = (Key(op, 0, 3, 0) for op in (Op.STORE_KV, Op.WRITE_KV))
    for key, need in ((read, chosen), (load, read), (compute, load), (chosen, written), (written, stored)):
        tasks = list(schedule.tasks())
        at, task = next((at, task) for at, task in enumerate(tasks) if task.key == key)
        early = task._replace(needs=tuple(one for one in task.needs if one != need))
        with pytest.raises(ScheduleError, match=f"{key} may start before {need} has ended"):
            check(_issuing(schedule, [*tasks[:at], early, *tasks[at + 1 :]]))


def test_a_device_chooses_while_others_are_still_written_to_the_disk() -> None:
    """A choice takes a buffer of the device. That of the host waits for the read."""
    waits: dict[Op, set[Op]] = {Op.CHOOSE: set(), Op.READ_KV: set()}
    for task in Zigzag(choosing(3, accelerator=True)).tasks():
        if task.op in waits and task.step == 1:
            waits[task.op] |= {need.op for need in task.needs if need.op.stores and need[2:] != task[2:4]}
    assert waits == {Op.CHOOSE: {Op.STORE_KV}, Op.READ_KV: {Op.WRITE_KV}}


def test_a_choice_for_a_buffer_that_is_still_attended_is_refused() -> None:
    """With five batches there are more that could choose than buffers."""

    @dataclass(frozen=True)
    class Hasty(Zigzag):
        def _chooses_before(self, later: int, number: int) -> bool:
            return True

    check(Zigzag(choosing(5)))
    with pytest.raises(ScheduleError, match=r"may start while .* still uses buffer \d of kv.host"):
        check(Hasty(choosing(5)))


def test_choices_that_share_too_few_buffers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Zigzag(choosing(3))
    users = schedule.users_of(Data.KV)
    assert users is not None and users.buffers == schedule.buffers == schedule.buffers_of(Data.KV)
    monkeypatch.setattr(Zigzag, "buffer_of", lambda own, data, visit: users._replace(buffers=2).buffer(own.number(*visit)))
    with pytest.raises(ScheduleError, match=r"may start while .* still uses buffer \d of kv.host"):
        check(Zigzag(choosing(3)))


@pytest.mark.parametrize(("batches", "buffers", "there"), [(1, 2, 2), (2, 2, 3), (3, 2, 3), (2, 4, 3), (3, 4, 4), (5, 4, 5)])
def test_as_many_buffers_as_batches_can_use_at_once(batches: int, buffers: int, there: int) -> None:
    """One is stored, one computed with, and others read, if there are other batches."""
    schedule = Zigzag(replace(choosing(batches), buffers=buffers))
    check(schedule)
    assert schedule.buffers_of(Data.KV) == there


def _issuing(schedule: Schedule, tasks: list[Task]) -> Schedule:
    @dataclass(frozen=True)
    class Changed(Zigzag):
        def tasks(self) -> Iterator[Task]:
            return iter(tasks)

    return Changed(schedule.traffic)
