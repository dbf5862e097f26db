"""Faults that are planted one by one: the checker has to find each, whether or not a token is wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from h2o_flexgen.core.buffer_layout import PromptPlaces
from h2o_flexgen.engine import executor
from h2o_flexgen.engine.executor import Executor, TaskFailed
from h2o_flexgen.engine.recorder import Recorder
from h2o_flexgen.engine.stores import kv
from h2o_flexgen.engine.stores.hidden import HiddenStore
from h2o_flexgen.engine.stores.host_attention_exchange import AskedStore
from h2o_flexgen.engine.stores.kv import KVStore
from h2o_flexgen.engine.stores.row_stores import StateStore
from h2o_flexgen.formats.kernel_table import TORCH
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory.device import EventMarker, Marker, StreamEvent
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.schedule.barrier import FlexGenBarrier
from h2o_flexgen.schedule.ops import COMPUTE_LANE, STORE, Key, Op, Task
from h2o_flexgen.schedule.pipeline import Pipeline
from h2o_flexgen.schedule.row_by_row import RowByRow
from h2o_flexgen.schedule.schedule import Schedule
from h2o_flexgen.schedule.zigzag import Zigzag
from tests.clocked.checker import Checker, current
from tests.clocked.context import checked
from tests.clocked.device import ClockedDevice
from tests.clocked.tensor import NAME
from tests.helpers.contract import POLICIES, Case, Checkpoints
from tests.helpers.samples import every_nth, slow
from tests.kernels.variants import used

DISK = Case("opt", (0, 0, 0, 0, 0, 0), (3, 2, 4, 2), 3, device=NAME)
HOST = replace(DISK, percent=(0, 100, 0, 100, 0, 100))
RESIDENT = replace(DISK, percent=(100, 0, 100, 0, 100, 0))
KV_ON_DISK = replace(DISK, percent=(100, 0, 0, 0, 100, 0))
KV_ON_HOST = replace(DISK, percent=(100, 0, 0, 100, 100, 0))
HIDDEN_ON_DISK = replace(DISK, percent=(100, 0, 100, 0, 0, 0))
THREE_BUFFERS = replace(KV_ON_DISK, buffers=3)
STATES = tuple(replace(case, kind="lfm2") for case in (KV_ON_HOST, KV_ON_DISK, THREE_BUFFERS))  # they lie where KV does
Fault = Callable[[], AbstractContextManager[object]]


def generated(case: Case, llm: LLM) -> None:
    llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len, ignore_eos=True))


def said(case: Case, llm: LLM) -> None:
    with llm.converse(60) as talk:
        for prompt in case.prompts:
            talk.reply(prompt, SamplingParams(max_tokens=case.gen_len, ignore_eos=True))


def run(
    case: Case,
    fault: Fault,
    checkpoints: Checkpoints,
    offload: Path,
    work: Callable[[Case, LLM], None] = generated,
) -> Checker:
    """The checker of a run with a fault, which may also end in an error of its own. That proves nothing, unless a thread that
    is early misses what another one has yet to put into a store."""
    checkpoints.folder(case.kind)
    with used(TORCH), checked() as checker, case.open(checkpoints, offload) as llm, fault():
        try:
            work(case, llm)
        except TaskFailed as error:
            checker.faults += [str(error)] * isinstance(error.cause, KeyError)
    return checker


# -- what waits ------------------------------------------------------------------------------------------------------------


def no_stream_waits() -> AbstractContextManager[object]:
    return patch.object(ClockedDevice, "wait", lambda device, marker: None)


def no_wait_of_the_host_before(op: Op) -> Fault:
    """Tasks of the host wait for their needs in a stream, as if they were copies."""
    return lambda: patch.object(op, "by_host", False)


def events_before_the_work() -> AbstractContextManager[object]:
    """The marker that a task leaves is the one it began with."""
    mark, begun = ClockedDevice.mark, dict[str, Marker | None]()

    def first(device: ClockedDevice, timed: bool = False, blocking: bool = False) -> Marker | None:
        task = current().task
        if not task:
            return mark(device, timed, blocking)
        if task not in begun:
            begun[task] = mark(device, True)
        return begun[task]

    return patch.object(ClockedDevice, "mark", first)


def without_needs(op: Op, *needs: Op, kind: type[Schedule] = Zigzag) -> Fault:
    """A schedule that forgets all needs of some kinds."""
    tasks = kind.tasks

    def forgetful(schedule: Schedule) -> Iterator[Task]:
        for task in tasks(schedule):
            kept = tuple(need for need in task.needs if need.op not in needs)
            yield task._replace(needs=kept) if task.op is op else task

    return lambda: patch.object(kind, "tasks", forgetful)


def never_finished(op: Op) -> Fault:
    """The processor works in memory without waiting for its stream."""
    finish = ClockedDevice.finish

    def unless(device: ClockedDevice) -> None:
        if not current().task.startswith(op.name):
            finish(device)

    return lambda: patch.object(ClockedDevice, "finish", unless)


def never_settled(at_beginning: bool, at_end: bool) -> Fault:
    """Blocks begin or end without waiting for all streams. They settle once before and once after."""
    settle, calls = ClockedDevice.settle, count()

    def sometimes(device: ClockedDevice) -> None:
        is_end = next(calls) % 2
        if not (at_end if is_end else at_beginning):
            settle(device)

    return lambda: patch.object(ClockedDevice, "settle", sometimes)


@contextmanager
def tasks_are_forgotten_before_they_are_over() -> Iterator[None]:
    """A collection hears that all is over, which nothing knows yet."""
    collect = Recorder.collect

    def hasty(recorder: Recorder) -> Iterator[Key]:
        with patch.object(EventMarker, "query", lambda marker: True), patch.object(ClockedDevice, "seconds_between", no_time):
            yield from list(collect(recorder))

    with patch.object(Recorder, "collect", hasty), patch.object(executor, "COLLECTED_EVERY", 1):
        yield


def no_time(device: ClockedDevice, start: Marker, end: Marker) -> float:
    return 0.0


def a_wait_for_one_lane_counts_for_all() -> AbstractContextManager[object]:
    def waits(own: Executor, task: Task, other: str, marker: Marker, number: int) -> None:
        lane = own._lane_of(task)
        if lane != other and number > own._waited.get((lane, ""), 0):
            own._devices[own._device_of(task.layer)].wait(marker)
            own._waited[lane, ""] = number

    return patch.object(Executor, "_wait_on_stream", waits)


def a_wait_counts_for_all_that_was_marked_since() -> AbstractContextManager[object]:
    def waits(own: Executor, task: Task, other: str, marker: Marker, number: int) -> None:
        lane = own._lane_of(task)
        if lane != other and number > own._waited.get((lane, other), 0):
            own._devices[own._device_of(task.layer)].wait(marker)
            own._waited[lane, other] = own._marked[other] + 1

    return patch.object(Executor, "_wait_on_stream", waits)


def events_are_given_back_too_early() -> AbstractContextManager[object]:
    """A marker's event is unused as soon as it was recorded: the next marker of any lane records it again."""

    def made(marker: EventMarker, event: StreamEvent, unused: deque[StreamEvent]) -> None:
        marker.event, marker._unused = event, deque()
        unused.append(event)

    return patch.object(EventMarker, "__init__", made)


def no_wait_for_what_is_read_back() -> AbstractContextManager[object]:
    return patch.object(EventMarker, "synchronize", lambda marker: None)


def no_wait_between_parts(stream: str) -> Fault:
    """While prompts are computed part by part, one of the streams does not wait for the other."""
    wait = ClockedDevice.wait

    def unless(device: ClockedDevice, marker: Marker | None) -> None:
        if not (current().task.startswith(Op.COMPUTE.name) and current().stream == stream):
            wait(device, marker)

    return lambda: patch.object(ClockedDevice, "wait", unless)


# -- where things lie ------------------------------------------------------------------------------------------------------


def hidden_states_in_memory_of_their_own() -> AbstractContextManager[object]:
    def put(store: HiddenStore, task: Task, hidden: Tensor) -> None:
        store._now[task.batch] = hidden

    return patch.object(HiddenStore, "put", put)


def rings_that_are_too_short() -> AbstractContextManager[object]:
    """All visits share one buffer of the KV."""
    return patch.object(KVStore, "_working_region", lambda store, task: (store._device_ring or store._host_ring)[0])


def all_states_come_through_one_buffer() -> AbstractContextManager[object]:
    return patch.object(StateStore, "_working_region", lambda store, task: (store._device_ring or store._host_ring)[0])


def one_place_for_all_parts() -> AbstractContextManager[object]:
    return patch.object(PromptPlaces, "start", lambda places, part: 0)


def gathered_on_a_stream_of_its_own() -> AbstractContextManager[object]:
    """Nothing waits for the stream on which changed slots are gathered."""
    gather = kv.gather_slots

    def elsewhere(image: Tensor, slots: Tensor, out: Tensor) -> None:
        with current().on("elsewhere"):
            gather(image, slots, out)

    return patch.object(kv, "gather_slots", elsewhere)


@contextmanager
def uploads_through_one_place() -> Iterator[None]:
    """Small values are written over those that a stream may have yet to read."""
    page_locked, places = ClockedDevice._page_locked, dict[tuple[torch.Size, torch.dtype], Tensor]()

    def the_same(device: ClockedDevice, like: Tensor) -> Tensor:
        kind = like.shape, like.dtype
        if kind not in places:
            places[kind] = page_locked(device, like)
        return places[kind]

    with patch.object(ClockedDevice, "_page_locked", the_same):
        yield
    places.clear()


def all_batches_ask_in_one_place() -> AbstractContextManager[object]:
    view = AskedStore._view

    def of_the_first(store: AskedStore, batch: int, *where: Any) -> Tensor:
        return view(store, 0, *where)

    return patch.object(AskedStore, "_view", of_the_first)


def questions_are_sent_on_a_stream_of_their_own() -> AbstractContextManager[object]:
    sent = AskedStore._sent

    def elsewhere(store: AskedStore, batch: int, place: int, tensor: Tensor) -> Tensor:
        with current().on("elsewhere"):
            return sent(store, batch, place, tensor)

    return patch.object(AskedStore, "_sent", elsewhere)


@dataclass(frozen=True)
class Planted:
    what: str
    fault: Fault
    cases: Sequence[Case]  # one of them shows it
    work: Callable[[Case, LLM], None] = generated
    is_alike: bool = False  # an earlier one is the same in another schedule

    def __str__(self) -> str:
        return self.what


def likeliest_first(op: Op, cases: Sequence[Case]) -> list[Case]:
    """Those first in which the KV moves where a fault is of that: the first case that shows a fault is the last one run."""
    return sorted(cases, key=lambda case: case not in KV) if op.name.endswith("KV") else [*cases]


H2O = POLICIES[1]
MOST = (DISK, replace(DISK, kind="llama-gqa", policy=H2O), HOST)
KV = (KV_ON_HOST, replace(KV_ON_DISK, policy=H2O), THREE_BUFFERS)
SINGLE_SLOTS = (replace(KV_ON_HOST, policy=H2O),)
BESIDE = tuple(replace(case, attend_on="host", policy=H2O) for case in (KV_ON_HOST, KV_ON_DISK))
BY_PART = tuple(replace(case, lengths=(3, 2, 4, 2, 3, 1, 2), gpu_batch_size=4, prefill_tokens=2) for case in BESIDE)
TALK = (replace(KV_ON_HOST, prefill_tokens=2), replace(HOST, prefill_tokens=2))
FAULTS = [
    Planted("no block waits before it begins", never_settled(True, False), (KV_ON_HOST,)),
    Planted("no block waits when it ends", never_settled(False, True), TALK, said),
    Planted("no block waits at all", never_settled(True, True), TALK, said),
    Planted("no stream waits", no_stream_waits, MOST),
    Planted("events are recorded before the work", events_before_the_work, MOST),
    Planted("hidden states are stored from their own memory", hidden_states_in_memory_of_their_own, MOST),
    Planted("KV has one buffer", rings_that_are_too_short, KV),
    Planted("changed slots are gathered on a stream that nothing waits for", gathered_on_a_stream_of_its_own, SINGLE_SLOTS),
    *(
        Planted(f"the host does not wait before {op}", no_wait_of_the_host_before(op), likeliest_first(op, (*MOST, *KV)))
        for op in (Op.READ_W, Op.READ_KV, Op.WRITE_KV)
    ),
    Planted("the host does not wait before ATTEND", no_wait_of_the_host_before(Op.ATTEND), BESIDE),
    *(
        Planted(f"{op} does not need {', '.join(map(str, needs))}", without_needs(op, *needs), BESIDE)
        for op, *needs in (
            (Op.ATTEND, Op.COMPUTE),
            (Op.ATTEND, Op.READ_KV),
            (Op.ATTEND, Op.STORE_KV),
            (Op.COMPUTE, Op.ATTEND),
            (Op.COMPUTE, Op.STORE_KV),
            (Op.COMPUTE, Op.WRITE_KV),
            (Op.WRITE_KV, Op.ATTEND),
        )
    ),
    Planted("a part does not wait until its place is free", no_wait_between_parts(COMPUTE_LANE), BY_PART),
    Planted("a part goes home before it is computed", no_wait_between_parts(STORE), BY_PART),
    Planted("all parts have one place", one_place_for_all_parts, BY_PART),
    *(
        Planted(f"{op} is never finished", never_finished(op), cases)
        for op, cases in ((Op.STORE_H, (HIDDEN_ON_DISK,)), (Op.STORE_KV, SINGLE_SLOTS))
    ),
    *(
        Planted(
            f"{op} does not need {', '.join(map(str, needs))}", without_needs(op, *needs), likeliest_first(op, (*MOST, *KV))
        )
        for op, *needs in (
            (Op.LOAD_W, Op.COMPUTE),
            (Op.LOAD_W, Op.READ_W),
            (Op.READ_W, Op.LOAD_W),
            (Op.COMPUTE, Op.LOAD_W),
            (Op.COMPUTE, Op.LOAD_KV),
            (Op.COMPUTE, Op.LOAD_H),
            (Op.LOAD_KV, Op.STORE_KV),
            (Op.LOAD_KV, Op.STORE_KV, Op.COMPUTE),
            (Op.LOAD_KV, Op.READ_KV),
            (Op.READ_KV, Op.WRITE_KV),
            (Op.LOAD_H, Op.STORE_H),
            (Op.STORE_H, Op.COMPUTE),
            (Op.STORE_KV, Op.COMPUTE),
            (Op.WRITE_KV, Op.STORE_KV),
        )
    ),
]


IN_ORDER = (  # what any schedule has to say of what is needed
    (Op.LOAD_W, Op.COMPUTE),
    (Op.LOAD_W, Op.READ_W),
    (Op.READ_W, Op.LOAD_W),
    (Op.COMPUTE, Op.LOAD_W),
    (Op.COMPUTE, Op.LOAD_KV),
    (Op.COMPUTE, Op.LOAD_H),
    (Op.LOAD_KV, Op.STORE_KV),
    (Op.LOAD_KV, Op.READ_KV),
    (Op.READ_KV, Op.WRITE_KV),
    (Op.LOAD_H, Op.STORE_H),
    (Op.STORE_H, Op.COMPUTE),
    (Op.STORE_KV, Op.COMPUTE),
    (Op.WRITE_KV, Op.STORE_KV),
)
PIPELINE = replace(HOST, gpu_batch_size=1, percent=(0, 100, 100, 0, 100, 0), policy=(("pipeline", 2),))
FAULTS += [
    Planted(
        f"{op} does not need {need} in {kind.name}",
        without_needs(op, need, kind=kind),
        [replace(case, schedule=kind.name) for case in likeliest_first(op, (*MOST, *KV))],
        is_alike=(op, need) != IN_ORDER[3],
    )
    for kind in (RowByRow, FlexGenBarrier)
    for op, need in IN_ORDER
    if (kind, op, need) != (FlexGenBarrier, Op.READ_W, Op.LOAD_W)  # the barrier has it: the COMPUTE before needs that load
]
OF_STATES = (
    (Op.COMPUTE, Op.LOAD_S),
    (Op.LOAD_S, Op.STORE_S),
    (Op.LOAD_S, Op.READ_S),
    (Op.READ_S, Op.WRITE_S),
    (Op.STORE_S, Op.COMPUTE),
    (Op.WRITE_S, Op.STORE_S),
)
HOME_AND_BACK = (Op.LOAD_S, Op.STORE_S), (Op.READ_S, Op.WRITE_S)  # the barrier has them: COMPUTEs between need the first
FAULTS += [
    Planted(
        f"{op} does not need {need} in {kind.name}",
        without_needs(op, need, kind=kind),
        [replace(case, schedule=kind.name) for case in STATES],
        is_alike=kind is not Zigzag,
    )
    for kind in (Zigzag, RowByRow, FlexGenBarrier)
    for op, need in OF_STATES
    if kind is not FlexGenBarrier or (op, need) not in HOME_AND_BACK
]
FAULTS += [
    Planted("states have one buffer", all_states_come_through_one_buffer, STATES),
    *(Planted(f"the host does not wait before {op}", no_wait_of_the_host_before(op), STATES) for op in (Op.READ_S, Op.WRITE_S)),
]
FAULTS += [
    *(
        Planted(f"{op} does not need {need} in a pipeline", without_needs(op, need, kind=Pipeline), (PIPELINE,))
        for op, need in ((Op.PASS_H, Op.COMPUTE), (Op.COMPUTE, Op.PASS_H), (Op.LOAD_W, Op.COMPUTE), (Op.COMPUTE, Op.LOAD_W))
    ),
    Planted("tasks are forgotten before they are over", tasks_are_forgotten_before_they_are_over, MOST),
    Planted("a wait for one lane counts for all", a_wait_for_one_lane_counts_for_all, (*MOST, *KV)),
    Planted("a wait counts for all that was marked since", a_wait_counts_for_all_that_was_marked_since, (*MOST, *KV)),
    Planted("events are given back too early", events_are_given_back_too_early, MOST),
    Planted("nothing waits for what is read back", no_wait_for_what_is_read_back, (RESIDENT,)),
    Planted("uploads go through one place", uploads_through_one_place, MOST),
    Planted("all batches ask the host in one place", all_batches_ask_in_one_place, BESIDE),
    Planted("questions are sent on a stream that nothing waits for", questions_are_sent_on_a_stream_of_their_own, BESIDE),
]
OWN = every_nth((one for one in FAULTS if not one.is_alike), 2)
OF_OTHERS = [slow(one) for one in FAULTS if one.is_alike]


@pytest.mark.parametrize("planted", OWN + OF_OTHERS, ids=str)
def test_a_planted_fault_is_found(planted: Planted, by_twins: Checkpoints, offload: Path) -> None:
    assert any(run(case, planted.fault, by_twins, offload, planted.work).faults for case in planted.cases)


@contextmanager
def nothing() -> Iterator[None]:
    yield


SOUND = [*MOST, *KV, *STATES, *SINGLE_SLOTS, *BESIDE, *BY_PART, HIDDEN_ON_DISK, PIPELINE, RESIDENT]
OTHERS = [replace(case, schedule=kind.name) for kind in (RowByRow, FlexGenBarrier) for case in (DISK, *KV, STATES[1])]


@pytest.mark.parametrize("case", every_nth([*SOUND, *OTHERS], 3), ids=str)
def test_nothing_is_found_where_nothing_is_planted(case: Case, by_twins: Checkpoints, offload: Path) -> None:
    assert run(case, nothing, by_twins, offload).faults == []
