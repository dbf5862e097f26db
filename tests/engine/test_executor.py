"""Executor: what runs when, how errors and interrupts come out, and that no thread outlives a run."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import pytest

from h2o_flexgen.core.site import DISK, HOST
from h2o_flexgen.engine.executor import Action, Executor, TaskFailed, shortage_in
from h2o_flexgen.engine.recorder import TIMED_EVERY
from h2o_flexgen.memory.device import Device, EventMarker, Marker, StreamEvent, open_device
from h2o_flexgen.memory.host import Shortage
from h2o_flexgen.memory.threads import Latch
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.schedule.ops import COMPUTE_LANE, WORKERS, Key, Op, Task
from h2o_flexgen.schedule.trace import Trace
from h2o_flexgen.schedule.traffic import Traffic
from tests.helpers.patience import PATIENCE_SECONDS
from tests.helpers.pretended import PretendedDevice
from tests.helpers.threads import new_threads

Result = TypeVar("Result")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert not new_threads(before)


def in_time(run: Callable[[], Result]) -> Result:
    """The result or the error of `run`; a deadlock is a failure and not a test that hangs."""
    outcome: list[object] = []

    def attempt() -> None:
        try:
            outcome.append(run())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive(), "deadlock"
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]  # type: ignore[return-value]


def moves_of_all_kinds(
    accelerator: bool, buffers: int, batches: int = 3, layers: int = 4, steps: int = 3, attends_on_host: bool = False
) -> Traffic:
    tiers = (DISK, HOST, "device")
    return Traffic(
        steps,
        layers,
        batches,
        buffers,
        accelerator,
        weights_on_disk=frozenset(range(0, layers, 2)),
        weights_on_host=frozenset(range(1, layers)),
        kv={(layer, batch): tiers[(layer + batch) % 3] for layer in range(1, layers - 1) for batch in range(batches)},
        hidden=tuple(tiers[batch % 3] for batch in range(batches)),
        attends_on_host=attends_on_host,
        state={(layer, batch): tiers[(layer + batch) % 3] for layer in range(1, layers - 1) for batch in range(batches)},
        choosing=frozenset() if accelerator else frozenset((1,)),
    )


OF_ONE_DEVICE = [op for op in Op if op is not Op.PASS_H]


def tasks_with(op: Op) -> list[Task]:
    """The tasks of a schedule in which the op occurs."""
    made = SCHEDULES["zigzag"](moves_of_all_kinds(op is not Op.CHOOSE, 2, attends_on_host=op is Op.ATTEND))
    return list(made.tasks())


def same_for_all(action: Action) -> dict[Op, Action]:
    return dict.fromkeys(Op, action)


def execute(tasks: Iterable[Task], action: Action, device: Device | None = None, ahead: int = 1) -> Trace:
    return in_time(lambda: Executor(same_for_all(action), device or open_device("cpu"), ahead).run(tasks))


def assert_needs_were_met(tasks: Iterable[Task], trace: Trace) -> None:
    spans = {span.key: span for span in trace.spans}
    for task in tasks:
        for need in task.needs:
            assert spans[need].end <= spans[task.key].start, f"{task} began before {need} had ended"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("accelerator", [False, True])
def test_every_task_runs_once_and_after_its_needs_whatever_tasks_take(name: str, buffers: int, accelerator: bool) -> None:
    tasks = list(SCHEDULES[name](moves_of_all_kinds(accelerator, buffers)).tasks())
    draw = random.Random(buffers)
    seconds = {task.key: draw.choice([0, 0, 0.0002, 0.002]) for task in tasks}

    def action(task: Task) -> int:
        time.sleep(seconds[task.key])
        return 10 + task.layer

    trace = execute(tasks, action, PretendedDevice() if accelerator else None, ahead=buffers - 1)
    assert Counter(span.key for span in trace.spans) == Counter(task.key for task in tasks)
    assert_needs_were_met(tasks, trace)
    for lane in {task.lane for task in tasks}:
        assert trace.moved_bytes(lane) == sum(10 + task.layer for task in tasks if task.lane == lane)


@pytest.mark.parametrize("lane", sorted({task.lane for task in SCHEDULES["zigzag"](moves_of_all_kinds(True, 2)).tasks()}))
def test_a_lane_begins_its_tasks_in_the_order_of_issue(lane: str) -> None:
    tasks = list(SCHEDULES["zigzag"](moves_of_all_kinds(True, 2)).tasks())
    begun: list[Key] = []
    draw = random.Random(0)

    def action(task: Task) -> int:
        if task.lane == lane:
            begun.append(task.key)
        time.sleep(draw.choice([0, 0.001]))
        return 0

    execute(tasks, action, PretendedDevice())
    issued = [task.key for task in tasks if task.lane == lane]
    if WORKERS[lane] == 1:
        assert begun == issued
    else:  # two workers take them in order, but the second may begin many while the first is at one
        assert Counter(begun) == Counter(issued)


def test_a_lane_of_one_worker_does_one_task_at_a_time_and_compute_stays_in_the_callers_thread() -> None:
    tasks = list(SCHEDULES["zigzag"](moves_of_all_kinds(True, 3)).tasks())
    busy: dict[str, int] = {}
    threads: set[threading.Thread] = set()

    def action(task: Task) -> int:
        busy[task.lane] = busy.get(task.lane, 0) + 1
        assert busy[task.lane] <= WORKERS[task.lane]
        if task.lane == COMPUTE_LANE:
            threads.add(threading.current_thread())
        time.sleep(0.0003)
        busy[task.lane] -= 1
        return 0

    callers: list[threading.Thread] = []

    def run() -> None:
        callers.append(threading.current_thread())
        Executor(same_for_all(action), PretendedDevice(), ahead=2).run(tasks)

    in_time(run)
    assert threads == set(callers)


def test_transfers_run_beside_compute() -> None:
    """Each fetch waits until the COMPUTE beside which it is issued has begun: one after the other, nothing would end."""
    fetches = [Task(Op.READ_W, 0, layer, 0) for layer in range(3)]
    computes = [Task(Op.COMPUTE, 0, layer, 0, (fetches[layer].key,)) for layer in range(3)]
    begun = [threading.Event() for _ in computes]

    def action(task: Task) -> int:
        if task.op is Op.COMPUTE:
            begun[task.layer].set()
        elif task.layer:
            assert begun[task.layer - 1].wait(PATIENCE_SECONDS)
        return 0

    trace = execute([fetches[0], fetches[1], computes[0], fetches[2], *computes[1:]], action, ahead=1)
    assert len(trace.spans) == 6


def test_with_nothing_ahead_what_stands_behind_a_compute_is_issued_when_it_is_over() -> None:
    tasks = [Task(Op.READ_W, 0, 0, 0), Task(Op.COMPUTE, 0, 0, 0), Task(Op.READ_W, 0, 1, 0), Task(Op.COMPUTE, 0, 1, 0)]

    def action(task: Task) -> int:
        time.sleep(0.002)
        return 0

    spans = {span.key: span for span in execute(tasks, action, ahead=0).spans}
    assert spans[tasks[2].key].start >= spans[tasks[1].key].end


# -- errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OF_ONE_DEVICE, ids=str)
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_an_error_in_any_op_comes_out_with_its_task_named(op: Op, ahead: int) -> None:
    tasks = tasks_with(op)
    failing = [task for task in tasks if task.op is op]
    victim = failing[len(failing) // 2]
    done_after = []

    def action(task: Task) -> int:
        if task == victim:
            raise ZeroDivisionError("seven")
        if victim.key in task.needs:
            done_after.append(task)
        return 0

    with pytest.raises(TaskFailed, match=rf"ZeroDivisionError: seven \(while running {victim}\)") as caught:
        execute(tasks, action, PretendedDevice(), ahead)
    assert caught.value.doing == victim
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not done_after, "a task ran on the result of one that failed"


@pytest.mark.parametrize("op", OF_ONE_DEVICE, ids=str)
def test_an_error_in_the_very_last_task_of_a_lane_is_not_lost(op: Op) -> None:
    tasks = tasks_with(op)
    victim = [task for task in tasks if task.op is op][-1]

    def action(task: Task) -> int:
        if task == victim:
            time.sleep(0.01)
            raise OSError("disk is gone")
        return 0

    with pytest.raises(TaskFailed, match="disk is gone") as caught:
        execute(tasks, action, PretendedDevice())
    assert caught.value.doing == victim


def test_after_an_error_hardly_anything_more_is_done() -> None:
    tasks = list(SCHEDULES["zigzag"](moves_of_all_kinds(False, 2, layers=6, steps=20)).tasks())
    done = []

    def action(task: Task) -> int:
        if task.op is Op.READ_W and task.step == 1:
            raise OSError("no more")
        done.append(task)
        return 0

    with pytest.raises(TaskFailed):
        execute(tasks, action)
    assert max(task.step for task in done if task.op is Op.COMPUTE) <= 1


def test_an_error_while_others_sleep_does_not_wait_for_the_tasks_that_were_still_queued() -> None:
    reads = [Task(Op.READ_W, 0, layer, 0) for layer in range(200)]
    tasks = [Task(Op.COMPUTE, 0, 0, 0), *reads, Task(Op.COMPUTE, 0, 1, 0, (reads[-1].key,))]
    slept: list[int] = []

    def action(task: Task) -> int:
        if task.layer == 3:
            raise OSError("third")
        slept.append(task.layer)
        time.sleep(0.05)
        return 0

    with pytest.raises(TaskFailed, match="third"):
        execute(tasks, action)
    assert len(slept) < 100, "of nearly 200 that were queued"


def test_an_error_of_the_schedule_itself_comes_out_as_it_is() -> None:
    def tasks() -> Iterator[Task]:
        yield Task(Op.READ_W, 0, 0, 0)
        yield Task(Op.COMPUTE, 0, 0, 0, (Key(Op.READ_W, 0, 0, 0),))
        raise LookupError("no schedule")

    with pytest.raises(LookupError, match="no schedule"):
        execute(tasks(), lambda task: 0)


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """A process that was started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_ctrl_c")
@pytest.mark.parametrize("where", ["action", "waiting"])
def test_ctrl_c_comes_out_as_keyboard_interrupt(where: str) -> None:
    """A real signal to the main thread, in a COMPUTE and while it waits for a read. Not `in_time`: signals reach only it."""
    tasks = list(SCHEDULES["zigzag"](moves_of_all_kinds(False, 2, steps=30)).tasks())
    begun, released = threading.Event(), threading.Event()

    def action(task: Task) -> int:
        if task.op is Op.COMPUTE and where == "action" and task.step == 1:
            begun.set()
            time.sleep(PATIENCE_SECONDS)
        if task.op is Op.READ_W and where == "waiting" and task.step == 1:
            begun.set()
            released.wait(PATIENCE_SECONDS)
        return 0

    def interrupt() -> None:
        begun.wait(PATIENCE_SECONDS)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        released.set()

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        Executor(same_for_all(action), open_device("cpu"), ahead=1).run(tasks)
    other.join()


def wait_until_caller_is_in(function: str) -> None:
    """Of the executor: until the main thread has been called into it."""
    caller = threading.main_thread().ident
    assert caller is not None
    while not any(frame.f_code.co_name == function for frame, _ in traceback.walk_stack(sys._current_frames()[caller])):
        time.sleep(0.01)


@pytest.mark.usefixtures("hears_ctrl_c")
def test_a_second_ctrl_c_while_the_lanes_are_let_go_leaves_no_thread_either() -> None:
    tasks = [Task(Op.READ_W, 0, 0, 0), Task(Op.COMPUTE, 0, 0, 0)]
    begun, released = threading.Event(), threading.Event()

    def action(task: Task) -> int:
        if task.op is Op.COMPUTE:
            begun.wait(PATIENCE_SECONDS)
            raise KeyboardInterrupt
        begun.set()
        released.wait(PATIENCE_SECONDS)  # the caller waits for this one's end when the second signal comes
        return 0

    def interrupt() -> None:
        wait_until_caller_is_in("_end_lanes")
        os.kill(os.getpid(), signal.SIGINT)
        released.set()

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        Executor(same_for_all(action), open_device("cpu"), ahead=0).run(tasks)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lane-")]
    other.join()


# -- ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 5, 17, 40])
def test_a_schedule_that_ends_early_ends_the_run_after_what_was_issued(count: int) -> None:
    tasks = list(SCHEDULES["zigzag"](moves_of_all_kinds(True, 3)).tasks())[:count]
    done = []

    def action(task: Task) -> int:
        done.append(task.key)
        return 1

    trace = execute(iter(tasks), action, PretendedDevice(), ahead=2)
    assert Counter(done) == Counter(task.key for task in tasks) == Counter(span.key for span in trace.spans)


def test_spans_come_in_the_order_of_their_starts_and_count_from_the_start_of_the_run() -> None:
    tasks = list(SCHEDULES["zigzag"](moves_of_all_kinds(True, 2)).tasks())
    trace = execute(tasks, lambda task: 0, PretendedDevice())
    starts = [span.start for span in trace.spans]
    assert starts == sorted(starts) and starts[0] >= 0
    assert all(span.start <= span.end for span in trace.spans) and trace.makespan < PATIENCE_SECONDS


def test_two_runs_at_the_same_time_do_not_meet() -> None:
    tasks = list(SCHEDULES["zigzag"](moves_of_all_kinds(False, 2)).tasks())
    traces: list[Trace] = []
    runs = [threading.Thread(target=lambda: traces.append(execute(tasks, lambda task: 1))) for _ in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(PATIENCE_SECONDS)
    assert [len(trace.spans) for trace in traces] == [len(tasks)] * 3


def test_what_was_done_before_a_failure_is_in_the_trace() -> None:
    tasks = list(SCHEDULES["zigzag"](moves_of_all_kinds(False, 2)).tasks())

    def action(task: Task) -> int:
        if task.op is Op.COMPUTE and task.step == 1:
            raise MemoryError("no room")
        return 7

    executor = Executor(same_for_all(action), open_device("cpu"))
    with pytest.raises(TaskFailed, match="no room") as caught:
        in_time(lambda: executor.run(tasks))
    assert shortage_in(caught.value) == Shortage("host", "no room")
    done = [span.key for span in executor.trace.spans if span.key.op is Op.COMPUTE]
    assert done == [task.key for task in tasks if task.op is Op.COMPUTE and task.step == 0]
    assert executor.trace.moved_bytes("read") > 0


# -- a device with streams -----------------------------------------------------------------------------------------------


class Noted:
    """A marker that everybody has passed, at a time that is counted and not measured."""

    def __init__(self, at: float, timed: bool, blocking: bool) -> None:
        self.at, self.timed, self.blocking = at, timed, blocking
        self.slept = 0

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.slept += 1


class MarkingDevice(PretendedDevice):
    """A device that marks what its streams have reached, each marker a second behind the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[Noted] = []
        self.waited = 0
        self._lock = threading.Lock()

    def mark(self, timed: bool = False, blocking: bool = False) -> Noted:
        with self._lock:
            self.marks.append(Noted(float(len(self.marks)), timed, blocking))
            return self.marks[-1]

    def wait(self, marker: Marker | None) -> None:
        with self._lock:
            self.waited += 1

    def seconds_between(self, start: Marker, end: Marker) -> float:
        assert isinstance(start, Noted) and isinstance(end, Noted) and start.timed and end.timed
        return end.at - start.at


def run_on(device: Device, tasks: Iterable[Task], times_all: bool) -> Executor:
    executor = Executor(same_for_all(lambda task: 3), device, ahead=1, times_all=times_all)
    in_time(lambda: executor.run(tasks))
    return executor


def of_steps(steps: int) -> list[Task]:
    """A load and a COMPUTE in each of many steps, one behind the other."""
    tasks: list[Task] = []
    for step in range(steps):
        before = (tasks[-1].key,) if tasks else ()
        tasks.append(Task(Op.LOAD_W, step, 0, 0, before))
        tasks.append(Task(Op.COMPUTE, step, 0, 0, (tasks[-1].key,)))
    return tasks


def test_without_a_trace_few_markers_are_timed_and_the_rest_counts_as_they_do() -> None:
    tasks = of_steps(41)
    all_timed, some_timed = (run_on(MarkingDevice(), tasks, times_all) for times_all in (True, False))
    assert len(all_timed.trace.spans) == 82
    timed = {0, *range(1, 41, TIMED_EVERY)}
    assert {span.key.step for span in some_timed.trace.spans} == timed
    assert all_timed.moved_bytes == some_timed.moved_bytes == {"load": 41 * 3, "compute": 41 * 3}
    for lane, seconds in some_timed.lane_seconds.items():
        spans = [span.end - span.start for span in some_timed.trace.spans if span.lane == lane and span.key.step]
        first = sum(span.end - span.start for span in some_timed.trace.spans if span.lane == lane and not span.key.step)
        assert seconds == pytest.approx(first + 40 * sum(spans) / len(spans))


def test_markers_that_are_not_timed_are_one_for_each_task_and_waiting_for_one_is_sleep() -> None:
    device = MarkingDevice()
    run_on(device, of_steps(8), times_all=False)
    assert sum(not mark.timed for mark in device.marks) == 2 * 6, "steps 0 and 1 are timed"
    assert sum(mark.blocking for mark in device.marks) == 16, "those behind tasks"


def test_a_stream_waits_for_the_last_of_several_slices_and_not_for_itself() -> None:
    slices = [Task(Op.LOAD_W, 0, 0, part) for part in range(4)]
    computes = [Task(Op.COMPUTE, 0, 0, 0, tuple(task.key for task in slices))]
    computes.append(Task(Op.COMPUTE, 0, 0, 1, (computes[0].key, *(task.key for task in slices))))
    device = MarkingDevice()
    run_on(device, [*slices, *computes], times_all=False)
    assert device.waited == 1, "the second batch is behind the first, which has waited for all slices"


def test_the_host_sleeps_until_what_the_disk_needs_is_over() -> None:
    tasks = [Task(Op.STORE_KV, 0, 0, 0), Task(Op.WRITE_KV, 0, 0, 0, (Key(Op.STORE_KV, 0, 0, 0),))]
    device = MarkingDevice()
    run_on(device, [Task(Op.COMPUTE, 0, 0, 0), *tasks], times_all=False)
    assert [mark.blocking for mark in device.marks if mark.slept] == [True]


def test_an_event_is_used_again_once_nothing_holds_its_marker() -> None:
    spare: deque[StreamEvent] = deque()
    event = object()
    held = [EventMarker(event, spare)]  # type: ignore[arg-type]
    held.append(held[0])
    held.pop()
    assert not spare
    held.pop()
    assert list(spare) == [event]


def test_a_latch_lets_all_pass_once_it_is_set_however_often_and_by_which_thread() -> None:
    latch, passed = Latch(), list[int]()
    threads = [threading.Thread(target=lambda: (latch.wait(), passed.append(1))) for _ in range(8)]
    setters = [threading.Thread(target=latch.set) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert not latch.is_set() and not passed
    for thread in setters:
        thread.start()
    for thread in (*threads, *setters):
        thread.join(PATIENCE_SECONDS)
    latch.wait()
    assert latch.is_set() and len(passed) == 8
