"""check: proves that a schedule is sound, however long its tasks take.

A task *happens before* another if the other needs it, or follows it in a lane with one worker, or over several such steps. That
holds on a device too, where a stream does a lane's tasks: what the processor itself does for one of them, it does only when the
stream has done all before (`Device.finish`). So every promise of a schedule is a question about ancestors: does the data exist
when it is used, and is a buffer free before its next user comes? The check suits schedules of some thousand tasks, as every
task keeps one bit per possible ancestor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from h2o_flexgen.core.model_spec import LayerName
from h2o_flexgen.core.site import DEVICE, DISK, HOST
from h2o_flexgen.schedule.ops import WORKERS, Data, Key, Op, Task, Visit
from h2o_flexgen.schedule.schedule import Schedule

ORDERED_LANES = tuple(lane for lane, workers in WORKERS.items() if workers == 1)  # the order of others proves nothing


class ScheduleError(ValueError):
    """A schedule that could use data before it is there, or a buffer that is still in use. The message names the task: `reason`
    has a place for each of the keys, and `names` say what their layers are."""

    def __init__(
        self, reason: str, keys: Sequence[Key], tasks: Sequence[Task], at: int, names: Sequence[LayerName] = ()
    ) -> None:
        self._said = reason, keys, tasks, at
        super().__init__(reason.format(*(key.said(names) for key in keys)) + _excerpt(tasks, at, names))

    def with_names(self, names: Sequence[LayerName]) -> ScheduleError:
        return ScheduleError(*self._said, names)


def check(schedule: Schedule, names: Sequence[LayerName] = ()) -> None:
    """Refuses what is not sound. `names` say what each layer is, for the reader of the message."""
    try:
        _prove(schedule)
    except ScheduleError as error:
        if not names:
            raise
        raise error.with_names(names) from None


def _prove(schedule: Schedule) -> None:
    tasks = list(schedule.tasks())
    place = _check_issue(tasks)
    _check_visits(schedule, tasks)
    _check_complete(schedule, tasks, place)
    ancestors = _ancestors(schedule, tasks, place)
    _check_data_flow(schedule, tasks, place, ancestors)
    _check_buffers(schedule, tasks, ancestors)


# -- what is issued ------------------------------------------------------------------------------------------------------


def _check_issue(tasks: Sequence[Task]) -> dict[Key, int]:
    """No task is issued twice, and its needs are issued before it, so that first-in-first-out lanes cannot block each other."""
    place: dict[Key, int] = {}
    for at, task in enumerate(tasks):
        if task.key in place:
            raise ScheduleError("{} is issued twice", [task.key], tasks, at)
        for need in task.needs:
            if need not in place:
                raise ScheduleError("{} needs {}, which was not issued before it", [task.key, need], tasks, at)
        place[task.key] = at
    return place


def _check_visits(schedule: Schedule, tasks: Sequence[Task]) -> None:
    """Computes come in the order of their numbers; a batch goes through its layers in order, and step follows step."""
    computed = [at for at, task in enumerate(tasks) if task.op is Op.COMPUTE]
    layers, reached = schedule.traffic.layers, [-1] * schedule.traffic.batches
    for number, at in enumerate(computed):
        visit = Visit(*tasks[at].key[1:])
        if schedule.number(*visit) != number or schedule.visit(number) != visit:
            reason = f"{{}} is visit {schedule.number(*visit)} but is computed as visit {number}"
            raise ScheduleError(reason, [tasks[at].key], tasks, at)
        reached[visit.batch] += 1
        if visit.step * layers + visit.layer != reached[visit.batch]:
            step, layer = divmod(reached[visit.batch], layers)
            earlier = Key(Op.COMPUTE, step, layer, visit.batch)
            raise ScheduleError("{} is computed before {}", [tasks[at].key, earlier], tasks, at)
    if len(computed) != schedule.traffic.visits:
        raise ScheduleError(f"{len(computed)} of {schedule.traffic.visits} visits are computed", [], tasks, len(tasks) - 1)


def _check_complete(schedule: Schedule, tasks: Sequence[Task], place: dict[Key, int]) -> None:
    """Everything that the plan moves is moved, and nothing else."""
    expected = set(_expected(schedule))
    if missing := sorted(expected - place.keys(), key=_in_order):
        raise ScheduleError(f"{{}} is never issued ({len(missing)} tasks are missing)", missing[:1], tasks, len(tasks) - 1)
    if surplus := sorted(place.keys() - expected, key=_in_order):
        raise ScheduleError("{} would move nothing", surplus[:1], tasks, place[surplus[0]])


def _in_order(key: Key) -> tuple[str | int, ...]:
    return str(key.op), *key[1:]


def _expected(schedule: Schedule) -> Iterator[Key]:
    traffic = schedule.traffic
    for number in range(traffic.visits):
        visit = schedule.visit(number)
        step, layer, batch = visit
        yield Key(Op.COMPUTE, *visit)
        if traffic.reads_weights(step, layer):
            yield from _slices(schedule, Op.READ_W, visit)
        if traffic.loads_weights(step, layer):
            yield from _slices(schedule, Op.LOAD_W, visit)
        if traffic.moves_hidden(batch):
            if layer > 0:
                yield Key(Op.LOAD_H, *visit)
            if layer < traffic.layers - 1:
                yield Key(Op.STORE_H, *visit)
        if _is_passed_on(schedule, visit):
            yield Key(Op.PASS_H, *visit)
        if _is_attended_by_host(schedule, visit):
            yield Key(Op.ATTEND, *visit)
        if _is_chosen(schedule, visit):
            yield Key(Op.CHOOSE, *visit)
        if traffic.fetches_kv(visit):
            yield from (Key(op, *visit) for op in _fetches(schedule, visit))
        if traffic.stores_kv(visit):
            yield from (Key(op, *visit) for op in _stores(schedule, visit))
        yield from (Key(op, *visit) for op in (*_fetches_of_state(schedule, visit), *_stores_of_state(schedule, visit)))


def _is_chosen(schedule: Schedule, visit: Visit) -> bool:
    """Whether a visit decides what is brought of its KV: from a disk to the host, or from there to a device that attends it."""
    traffic = schedule.traffic
    tier, elsewhere = traffic.kv.get((visit.layer, visit.batch), DEVICE), (HOST, DISK) if traffic.accelerator else (DISK,)
    is_brought = tier in elsewhere and not _is_attended_by_host(schedule, visit)
    return is_brought and visit.layer in traffic.choosing and visit.step > 0


def _slices(schedule: Schedule, op: Op, visit: Visit) -> Iterator[Key]:
    """The tasks that bring the weights of a visit: slices named by number, or the whole named by the batch it came for."""
    cut = range(schedule.traffic.batches) if schedule.cuts_layers else (schedule.weight_batch(visit.batch),)
    return (Key(op, visit.step, visit.layer, part) for part in cut)


def _fetches(schedule: Schedule, visit: Visit) -> list[Op]:
    """The device fetches all that it attends; for decode steps that the host attends nothing crosses the link."""
    traffic = schedule.traffic
    on_disk = traffic.kv_on_disk(visit.layer, visit.batch)
    return [Op.READ_KV] * on_disk + [Op.LOAD_KV] * (traffic.accelerator and not _is_attended_by_host(schedule, visit))


def _stores(schedule: Schedule, visit: Visit) -> list[Op]:
    """The device stores what it has computed: all changes, or what is kept of prompts."""
    traffic = schedule.traffic
    on_disk, is_computed = traffic.kv_on_disk(visit.layer, visit.batch), not _is_attended_by_host(schedule, visit)
    stores = traffic.accelerator and (is_computed or traffic.rows_join)
    return [Op.STORE_KV] * stores + [Op.WRITE_KV] * on_disk


def _fetches_of_state(schedule: Schedule, visit: Visit) -> list[Op]:
    """What brings a state to where it is computed with: there is one from the second step on, or from an earlier block."""
    is_there = visit.step > 0 or schedule.traffic.kv_before
    return [op for op in _ways_of_state(schedule, visit, Op.READ_S, Op.LOAD_S) if is_there]


def _stores_of_state(schedule: Schedule, visit: Visit) -> list[Op]:
    """What brings a state home that a later step needs, or a later block."""
    is_needed = visit.step < schedule.traffic.steps - 1 or schedule.traffic.kv_after
    return [op for op in _ways_of_state(schedule, visit, Op.STORE_S, Op.WRITE_S) if is_needed]


def _ways_of_state(schedule: Schedule, visit: Visit, *ops: Op) -> list[Op]:
    traffic = schedule.traffic
    home = traffic.state.get((visit.layer, visit.batch), DEVICE)
    return [op for op in ops if (home == DISK if op.uses_disk else traffic.accelerator and home != DEVICE)]


def _is_attended_by_host(schedule: Schedule, visit: Visit) -> bool:
    traffic = schedule.traffic
    elsewhere = traffic.kv.get((visit.layer, visit.batch), DEVICE) != DEVICE
    return traffic.accelerator and traffic.attends_on_host and elsewhere and visit.step > 0


def _is_passed_on(schedule: Schedule, visit: Visit) -> bool:
    """Whether the next layer is another device's, and hidden states rest on devices."""
    devices, hidden = schedule.traffic.device_of, schedule.traffic.hidden
    crosses = visit.layer + 1 < len(devices) and devices[visit.layer] != devices[visit.layer + 1]
    return crosses and (not hidden or hidden[visit.batch] == DEVICE)


# -- what happens before what --------------------------------------------------------------------------------------------


def _ancestors(schedule: Schedule, tasks: Sequence[Task], place: dict[Key, int]) -> list[int]:
    """The tasks that are over before each task starts, under any timing: bit n is the n-th task issued."""
    ancestors: list[int] = []
    last: dict[str, int] = {}
    for at, task in enumerate(tasks):
        before = [place[need] for need in task.needs]
        if task.op.lane in ORDERED_LANES:
            lane = schedule.traffic.lanes.of(task)
            before += [last[lane]] if lane in last else []
            last[lane] = at
        bits = 0
        for earlier in before:
            bits |= ancestors[earlier] | 1 << earlier
        ancestors.append(bits)
    return ancestors


def _check_data_flow(schedule: Schedule, tasks: Sequence[Task], place: dict[Key, int], ancestors: Sequence[int]) -> None:
    for at, task in enumerate(tasks):
        for source in _sources(schedule, task):
            if not ancestors[at] >> place[source] & 1:
                raise ScheduleError("{} may start before {} has ended", [task.key, source], tasks, at)


def _sources(schedule: Schedule, task: Task) -> Iterator[Key]:
    """The tasks that produce what a task uses."""
    traffic, visit = schedule.traffic, Visit(*task.key[1:])
    step, layer, batch = visit
    if task.op is Op.COMPUTE:
        yield from _inputs(schedule, visit)
    elif task.op is Op.CHOOSE:  # its queries come of all that is computed with but the KV; the newest has to be home by then
        yield from _inputs_beside_kv(schedule, visit)
        yield _brought_home(schedule, visit)
    elif _is_chosen(schedule, visit) and task.op is _fetches(schedule, visit)[0]:
        yield Key(Op.CHOOSE, *visit)
        yield _brought_home(schedule, visit)
    elif task.op.data is Data.STATE:
        yield from _before_in_chain(schedule, task.op, visit)
    elif task.op is Op.LOAD_W and traffic.reads_weights(step, layer):
        yield Key(Op.READ_W, *visit)
    elif task.op is Op.LOAD_H:
        yield Key(Op.STORE_H, step, layer - 1, batch)
    elif task.op is Op.ATTEND:
        yield from _attended(schedule, visit)
    elif task.op in (Op.STORE_H, Op.PASS_H):
        yield Key(Op.COMPUTE, *visit)
    elif task.op is Op.STORE_KV:  # the host first moves rows up to where others have left
        yield Key(Op.COMPUTE, *visit)
        if _is_attended_by_host(schedule, visit):
            yield Key(Op.ATTEND, *visit)
    elif task.op is Op.WRITE_KV:
        yield from (Key(op, *visit) for op in _changing(schedule, visit))
    elif task.op is Op.LOAD_KV and traffic.kv_on_disk(layer, batch):
        yield Key(Op.READ_KV, *visit)
    elif task.op in (Op.READ_KV, Op.LOAD_KV) and step > 0:  # the first step finds what was stored long ago
        yield _brought_home(schedule, visit)


def _brought_home(schedule: Schedule, visit: Visit) -> Key:
    """What has brought home last what the step before changed."""
    before = visit._replace(step=visit.step - 1)
    return Key(_stores(schedule, before)[-1], *before)


def _before_in_chain(schedule: Schedule, op: Op, visit: Visit) -> Iterator[Key]:
    """What has brought a state to where a task finds it. That of an earlier block was brought home long ago."""
    fetches, stores = _fetches_of_state(schedule, visit), _stores_of_state(schedule, visit)
    chain = [*fetches, Op.COMPUTE, *stores]
    place = chain.index(op)
    if place:
        yield Key(chain[place - 1], *visit)
    elif visit.step:
        before = visit._replace(step=visit.step - 1)
        yield Key(_stores_of_state(schedule, before)[-1], *before)


def _attended(schedule: Schedule, visit: Visit) -> Iterator[Key]:
    """The task that asks, and the task that last changed or fetched what is attended."""
    step, layer, batch = visit
    yield Key(Op.COMPUTE, *visit)
    if schedule.traffic.kv_on_disk(layer, batch):
        yield Key(Op.READ_KV, *visit)
    else:
        yield from (Key(op, step - 1, layer, batch) for op in _changing(schedule, Visit(step - 1, layer, batch)))


def _changing(schedule: Schedule, visit: Visit) -> Iterator[Op]:
    """The tasks that change KV on the host in a visit."""
    if _is_attended_by_host(schedule, visit):
        yield Op.ATTEND
    if stored := [op for op in _stores(schedule, visit) if op is Op.STORE_KV]:
        yield from stored
    elif not _is_attended_by_host(schedule, visit):
        yield Op.COMPUTE


def _inputs(schedule: Schedule, visit: Visit) -> Iterator[Key]:
    yield from _inputs_beside_kv(schedule, visit)
    if schedule.traffic.fetches_kv(visit) and not _is_attended_by_host(schedule, visit):
        yield Key(_fetches(schedule, visit)[-1], *visit)


def _inputs_beside_kv(schedule: Schedule, visit: Visit) -> Iterator[Key]:
    traffic = schedule.traffic
    step, layer, batch = visit
    before = Visit(step, layer - 1, batch) if layer else Visit(step - 1, traffic.layers - 1, batch)
    if before.step >= 0:
        yield Key(Op.COMPUTE, *before)
        if _is_passed_on(schedule, before):
            yield Key(Op.PASS_H, *before)
        if _is_attended_by_host(schedule, before):
            yield Key(Op.ATTEND, *before)
    if traffic.loads_weights(step, layer):
        yield from _slices(schedule, Op.LOAD_W, visit)
    elif traffic.reads_weights(step, layer):
        yield from _slices(schedule, Op.READ_W, visit)
    if fetches := _fetches_of_state(schedule, visit):
        yield Key(fetches[-1], *visit)
    if layer > 0 and traffic.moves_hidden(batch):
        yield Key(Op.LOAD_H, *visit)


def _check_buffers(schedule: Schedule, tasks: Sequence[Task], ancestors: Sequence[int]) -> None:
    """Everything that one user of a buffer does there is over before anything of the next user starts."""
    buffers: dict[tuple[str, int], dict[int, list[int]]] = {}
    for at, task in enumerate(tasks):
        for touch in schedule.touches(task):
            buffers.setdefault((touch.ring, touch.buffer), {}).setdefault(touch.user, []).append(at)
    for (ring, buffer), users in buffers.items():
        numbers = sorted(users)
        for user, after in itertools.pairwise(numbers):
            for at in users[after]:
                for earlier in users[user]:
                    if not ancestors[at] >> earlier & 1:
                        reason = f"{{}} may start while {{}} still uses buffer {buffer} of {ring}"
                        raise ScheduleError(reason, [tasks[at].key, tasks[earlier].key], tasks, at)


def _excerpt(tasks: Sequence[Task], at: int, names: Sequence[LayerName], around: int = 4) -> str:
    """The tasks issued around the one at fault, one a line."""
    lines = []
    for place in range(max(0, at - around), min(len(tasks), at + around + 1)):
        task = tasks[place]
        needs = f" needs {', '.join(map(str, task.needs))}" if task.needs else ""
        lines.append(f"\n  {place:5d} {task.key.said(names)}{needs}" + ("  <-- here" if place == at else ""))
    return "".join(lines)
