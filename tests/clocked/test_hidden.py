"""Hidden states on their way to the disk and back while nothing else makes the host wait: a model's head would hide faults."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from h2o_flexgen.core.site import DISK, HOST
from h2o_flexgen.core.workload import Batch, Block
from h2o_flexgen.engine.executor import Executor
from h2o_flexgen.engine.stores.hidden import HiddenStore
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.models import create_model, load_config
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.schedule.ops import Op, Task
from h2o_flexgen.schedule.traffic import Traffic
from tests.clocked.checker import Checker
from tests.clocked.context import checked
from tests.clocked.device import ClockedDevice
from tests.clocked.test_planted_faults import never_finished
from tests.helpers.contract import Checkpoints

LAYERS, ROWS = 3, 2


def carry(schedule_name: str, hidden: tuple[str, ...], checkpoints: Checkpoints, offload: Path) -> None:
    """Adds one in each layer to what two batches begin with, three steps long."""
    spec = create_model(load_config(str(checkpoints.folder("opt"))), "float32").spec
    traffic = Traffic(steps=3, layers=LAYERS, batches=len(hidden), buffers=2, accelerator=True, hidden=hidden)
    schedule = SCHEDULES[schedule_name](traffic)
    block = Block(tuple(Batch((2 * place, 2 * place + 1), (1, 1)) for place in range(len(hidden))), 3)
    device = ClockedDevice()
    memories = Memories(device, offload)
    store = HiddenStore(spec, block, schedule, memories)

    def compute(task: Task) -> int:
        if task.layer == 0:
            store.put(task, torch.full((ROWS, 1, spec.width), float(task.batch), device=device.torch_device))
        elif task.layer < LAYERS - 1:
            store.put(task, store.take(task.batch) + 1)
        else:
            outcomes.append((task.batch, store.take(task.batch) + 1))
        return 0

    outcomes: list[tuple[int, torch.Tensor]] = []
    actions = {Op.COMPUTE: compute, Op.LOAD_H: store.load, Op.STORE_H: store.store}
    try:
        Executor(actions, device, schedule.ahead).run(schedule.tasks())
        assert len(outcomes) == 3 * len(hidden)
        assert all(torch.equal(values.cpu(), torch.full((ROWS, 1, spec.width), batch + 2.0)) for batch, values in outcomes)
    finally:
        outcomes.clear()
        store.close()
        memories.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("hidden", [(DISK, DISK), (DISK, HOST, DISK), (DISK,) * 4])
def test_nothing_races(schedule: str, hidden: tuple[str, ...], by_twins: Checkpoints, offload: Path, checker: Checker) -> None:
    carry(schedule, hidden, by_twins, offload)


def test_a_read_of_the_disk_waits_for_copies_from_the_same_place(by_twins: Checkpoints, offload: Path) -> None:
    with checked() as checker, never_finished(Op.LOAD_H)():
        carry("zigzag", (DISK,) * 4, by_twins, offload)
    assert any("of LOAD_H" in fault and "(writes)" in fault for fault in checker.faults)


def test_times_between_markers_that_may_not_be_passed_are_found() -> None:
    with checked() as checker:
        device = ClockedDevice()
        with device.stream("compute"):
            start = device.mark(timed=True)
        with device.stream("load"):
            first, last = device.mark(timed=True), device.mark(timed=True)
        last.synchronize()
        assert first.query() and last.query() and not start.query()
        device.seconds_between(first, last)
        assert checker.faults == []
        device.seconds_between(start, last)
        assert len(checker.faults) == 1
        with pytest.raises(RuntimeError, match="no times"):
            device.seconds_between(first, device.mark())
