"""`check` finds what it is there to find: a schedule with one thing changed is refused, and the task is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import pytest

from h2o_flexgen.core.model_spec import LayerName
from h2o_flexgen.core.site import DISK, HOST
from h2o_flexgen.schedule.barrier import FlexGenBarrier
from h2o_flexgen.schedule.check import ORDERED_LANES, ScheduleError, check
from h2o_flexgen.schedule.ops import Data, Key, Op, Task
from h2o_flexgen.schedule.row_by_row import RowByRow
from h2o_flexgen.schedule.schedule import Schedule
from h2o_flexgen.schedule.traffic import Traffic
from h2o_flexgen.schedule.zigzag import Zigzag
from tests.planning.worlds import random_moves

EVERYTHING_ON_DISK = Traffic(
    steps=3,
    layers=3,
    batches=2,
    buffers=2,
    accelerator=True,
    weights_on_disk=frozenset(range(3)),
    kv={(1, 0): DISK, (1, 1): HOST},
    hidden=(HOST, DISK),
)
STATES_ON_DISK = Traffic(steps=3, layers=3, batches=2, accelerator=True, state={(1, 0): DISK, (1, 1): HOST})
KV_OPS = (Op.READ_KV, Op.LOAD_KV, Op.STORE_KV, Op.WRITE_KV)


def changed(schedule: Schedule, tasks: list[Task]) -> Schedule:
    """The same schedule, with these tasks instead of its own."""

    @dataclass(frozen=True)
    class Changed(type(schedule)):  # type: ignore[misc]
        def tasks(self) -> Iterator[Task]:
            return iter(tasks)

    return Changed(schedule.traffic)


def refused(schedule: Schedule, tasks: list[Task], match: str) -> None:
    with pytest.raises(ScheduleError, match=match):
        check(changed(schedule, tasks))


def ordered_pairs(tasks: list[Task]) -> list[set[Key]]:
    """What is over before each task, found by walking back: needs, and the task before it in a lane of one worker."""
    ancestors: dict[Key, set[Key]] = {}
    last: dict[str, Key] = {}
    for task in tasks:
        direct = set(task.needs)
        if task.lane in ORDERED_LANES:
            direct |= {last[task.lane]} if task.lane in last else set()
            last[task.lane] = task.key
        ancestors[task.key] = direct.union(*(ancestors[key] for key in direct))
    return list(ancestors.values())


@pytest.mark.parametrize("kind", [Zigzag, RowByRow])
def test_every_need_matters_unless_others_imply_it(kind: type[Schedule]) -> None:
    """Dropping any one is found. (Of the barrier schedule the needs that are its barrier do not matter, on purpose.)"""
    dropped = 0
    for seed in range(25):
        schedule = kind(random_moves(Random(seed), layers=3, batches=3))
        tasks = list(schedule.tasks())
        for at, task in enumerate(tasks):
            for need in set(task.needs):
                kept = tuple(other for other in task.needs if other != need)
                mutant = [*tasks[:at], task._replace(needs=kept), *tasks[at + 1 :]]
                if need not in ordered_pairs(mutant)[at]:
                    dropped += 1
                    refused(schedule, mutant, f"^{task} ")
    assert dropped > 100


@pytest.mark.parametrize(
    ("op", "need", "match"),
    [
        (Op.READ_W, Op.LOAD_W, "still uses buffer . of weights.host"),
        (Op.LOAD_W, Op.COMPUTE, "still uses buffer . of weights.device"),
        (Op.LOAD_W, Op.READ_W, "may start before READ_W"),
        (Op.COMPUTE, Op.LOAD_W, "may start before LOAD_W"),
        (Op.COMPUTE, Op.LOAD_KV, "may start before LOAD_KV"),
        (Op.COMPUTE, Op.LOAD_H, "may start before LOAD_H"),
        (Op.READ_KV, Op.WRITE_KV, "may start before WRITE_KV|still uses buffer . of kv.host"),
        (Op.LOAD_KV, Op.READ_KV, "may start before READ_KV"),
        (Op.LOAD_H, Op.STORE_H, "may start before STORE_H|still uses buffer . of hidden"),
        (Op.STORE_KV, Op.COMPUTE, "may start before COMPUTE|still uses"),
        (Op.STORE_H, Op.COMPUTE, "may start before COMPUTE|still uses"),
        (Op.WRITE_KV, Op.STORE_KV, "may start before STORE_KV"),
    ],
)
def test_without_needs_of_one_kind_a_schedule_is_refused(op: Op, need: Op, match: str) -> None:
    of_kv = op in KV_OPS or need in KV_OPS
    schedule = Zigzag(
        replace(EVERYTHING_ON_DISK, hidden=()) if of_kv else EVERYTHING_ON_DISK
    )  # in a lane hidden states mask KV
    tasks = [
        task._replace(needs=tuple(key for key in task.needs if (task.op, key.op) != (op, need))) for task in schedule.tasks()
    ]
    refused(schedule, tasks, match)


@pytest.mark.parametrize(
    ("op", "need", "match"),
    [
        (Op.READ_S, Op.WRITE_S, "may start before WRITE_S|still uses buffer . of states.host"),
        (Op.LOAD_S, Op.READ_S, "may start before READ_S"),
        (Op.COMPUTE, Op.LOAD_S, "may start before LOAD_S"),
        (Op.STORE_S, Op.COMPUTE, "may start before COMPUTE|still uses"),
        (Op.WRITE_S, Op.STORE_S, "may start before STORE_S"),
    ],
)
@pytest.mark.parametrize("kind", [Zigzag, RowByRow])
def test_without_needs_of_one_kind_states_are_refused(kind: type[Schedule], op: Op, need: Op, match: str) -> None:
    schedule = kind(STATES_ON_DISK)
    tasks = [
        task._replace(needs=tuple(key for key in task.needs if (task.op, key.op) != (op, need))) for task in schedule.tasks()
    ]
    check(schedule)
    refused(schedule, tasks, match)


@pytest.mark.parametrize("kind", [Zigzag, FlexGenBarrier, RowByRow])
def test_a_missing_task_of_a_state_is_named(kind: type[Schedule]) -> None:
    """Each of them, also those that others need."""
    tasks = list(kind(STATES_ON_DISK).tasks())
    moved = [task for task in tasks if task.op.data is Data.STATE]
    assert {task.op for task in moved} == {Op.READ_S, Op.LOAD_S, Op.STORE_S, Op.WRITE_S}
    for gone in moved:
        rest = [task._replace(needs=tuple(key for key in task.needs if key != gone.key)) for task in tasks if task is not gone]
        refused(kind(STATES_ON_DISK), rest, f"^{gone} is never issued")


@pytest.mark.parametrize("kind", [Zigzag, FlexGenBarrier, RowByRow])
def test_a_missing_task_is_named(kind: type[Schedule]) -> None:
    schedule = kind(EVERYTHING_ON_DISK)
    tasks = list(schedule.tasks())
    needed = {need for task in tasks for need in task.needs}
    for at in (at for at, task in enumerate(tasks) if task.key not in needed):
        last = "is computed as visit|of 18 visits are computed" if tasks[at].op is Op.COMPUTE else "^$"
        refused(schedule, tasks[:at] + tasks[at + 1 :], f"^{tasks[at]} is never issued|{last}")


def test_a_task_issued_twice_is_named() -> None:
    schedule = Zigzag(EVERYTHING_ON_DISK)
    tasks = list(schedule.tasks())
    refused(schedule, [*tasks, tasks[0]], "READ_W 0.0.0 is issued twice")


def test_a_task_that_moves_nothing_is_named() -> None:
    schedule = Zigzag(Traffic(1, 2, 1))
    refused(schedule, [Task(Op.READ_W, 0, 1, 0), *schedule.tasks()], "READ_W 0.1.0 would move nothing")


def test_a_need_that_was_not_issued_before_is_named() -> None:
    schedule = Zigzag(EVERYTHING_ON_DISK)
    tasks = list(schedule.tasks())
    at = next(at for at, task in enumerate(tasks) if task.op is Op.LOAD_KV)
    need = next(place for place, task in enumerate(tasks) if task.key in tasks[at].needs)
    refused(schedule, [*tasks[:need], *tasks[need + 1 :], tasks[need]], f"needs {tasks[need]}, which was not issued before it")


def test_visits_out_of_order_are_refused() -> None:
    schedule = Zigzag(Traffic(1, 2, 2))
    first, second, *rest = schedule.tasks()
    refused(schedule, [second, first, *rest], "COMPUTE 0.0.1 is visit 1 but is computed as visit 0")


def test_a_numbering_that_puts_a_layer_before_the_one_it_follows_is_refused() -> None:
    @dataclass(frozen=True)
    class Backwards(Zigzag):
        def visit(self, number: int) -> object:  # type: ignore[override]
            return super().visit(self.traffic.visits - 1 - number)

        def number(self, step: int, layer: int, batch: int) -> int:
            return self.traffic.visits - 1 - super().number(step, layer, batch)

    tasks = [Task(Op.COMPUTE, 0, layer, 0) for layer in (1, 0)]
    refused(Backwards(Traffic(1, 2, 1)), tasks, "COMPUTE 0.1.0 is computed before COMPUTE 0.0.0")


def test_kv_fetched_further_ahead_than_its_own_store_is_refused() -> None:
    @dataclass(frozen=True)
    class Hasty(Zigzag):
        def tasks(self) -> Iterator[Task]:
            tasks = list(super().tasks())
            fetch = next(at for at, task in enumerate(tasks) if task.op is Op.READ_KV)
            store = next(at for at, task in enumerate(tasks) if task.op is Op.COMPUTE)
            return iter([*tasks[:store], tasks[fetch], *tasks[store:fetch], *tasks[fetch + 1 :]])

    with pytest.raises(ScheduleError, match=r"READ_KV 1.0.0 needs WRITE_KV 0.0.0, which was not issued before it"):
        check(Hasty(Traffic(2, 1, 1, kv={(0, 0): DISK})))


def test_a_ring_with_fewer_slots_than_are_fetched_ahead_is_refused() -> None:
    @dataclass(frozen=True)
    class Cramped(Zigzag):
        @property
        def weight_buffers(self) -> int:
            return 1

    with pytest.raises(ScheduleError, match=r"not issued before it|still uses buffer 0 of weights"):
        check(Cramped(EVERYTHING_ON_DISK))


def test_the_error_shows_the_place_in_the_issue_order() -> None:
    schedule = Zigzag(EVERYTHING_ON_DISK)
    tasks = list(schedule.tasks())
    with pytest.raises(ScheduleError) as caught:
        check(changed(schedule, [*tasks, tasks[0]]))
    lines = str(caught.value).splitlines()
    assert [line for line in lines if line.endswith("<-- here")] == [lines[-1]]
    assert lines[-1].split()[:3] == [str(len(tasks)), "READ_W", "0.0.0"]
    assert 3 <= len(lines) <= 10


def test_with_names_the_message_says_what_layers_are() -> None:
    schedule = Zigzag(EVERYTHING_ON_DISK)
    tasks = [task for task in schedule.tasks() if str(task) != "COMPUTE 1.1.0"]
    names = [LayerName("embed"), LayerName("experts 0-7 of block 0", 0, is_of_experts=True), LayerName("logits")]
    with pytest.raises(ScheduleError) as plain:
        check(changed(schedule, tasks))
    with pytest.raises(ScheduleError) as named:
        check(changed(schedule, tasks), names)
    assert "experts" not in str(plain.value) and " (experts 0-7 of block 0)" in str(named.value).splitlines()[0]
    said = str(named.value)
    for name in names:
        said = said.replace(f" ({name.title})", "")
    assert said.splitlines()[0] == str(plain.value).splitlines()[0]
    check(schedule, names)
