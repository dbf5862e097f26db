"""KVStore: what a step leaves in the slots of a row is there at its next step, wherever the slots live meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen.core import buffer_layout
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import Batch, Block
from h2o_flexgen.engine.stores.kv import KVStore
from h2o_flexgen.memory.device import DeviceTier
from h2o_flexgen.memory.disk import DiskTier
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies.by_position import Full
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.schedule.ops import Op, Task
from h2o_flexgen.schedule.schedule import Schedule
from tests.engine.stores import opened_memories
from tests.planning.worlds import block_of, tiny_spec

ON_DEVICE, ON_HOST, ON_DISK, MIXED = (100, 0), (0, 100), (0, 0), (30, 30)
LENGTHS, STEPS = ([5, 2, 4], [3, 3], [1]), 5


@dataclass
class Rows:
    """Stands in for BatchRows: which rows are alive, and which moved where."""

    batch: Batch
    step: int = 0
    generation: int = 0
    changes_all: bool = False
    kept: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.batch.size

    def changed(self, level: int) -> tuple[int, int]:
        assert level == 0
        return Full().occupancy(self.batch, STEPS).at(self.step).changed

    def drop(self, place: int) -> None:
        """The last row takes the place of one that has ended."""
        alive = list(range(self.batch.size))
        alive[place] = alive[-1]
        self.places_before = alive[:-1]
        self.held_before = (self.changed(0)[1],)
        self.generation += 1
        rows, lengths = self.batch.rows, self.batch.lengths
        self.batch = Batch(
            tuple(rows[each] for each in self.places_before), tuple(lengths[each] for each in self.places_before)
        )


@contextmanager
def opened_store(
    kv: tuple[int, int], device: str, offload: Path, schedule: str = "zigzag", buffers: int = 2
) -> Iterator[tuple[KVStore, Schedule, ModelSpec, Block, Memories]]:
    spec, block = tiny_spec(blocks=3), block_of(LENGTHS, STEPS)
    plan = Plan(num_gpu_batches=len(LENGTHS), buffers=buffers).with_percent((100, 0, *kv, 100, 0))
    with opened_memories(device, offload) as memories:
        site = Site(memories.device.accelerator)
        planned = BlockPlan.of(spec, replace(plan.at(site), schedule=schedule), block, site)
        with closing(KVStore(planned, 0, memories, {})) as store:
            yield store, planned.schedule, spec, block, memories


def slot_value(layer: int, row: int, slot: int) -> float:
    return 1000 * layer + 10 * row + slot / 16


def attend(store: KVStore, task: Task, rows: Rows) -> None:
    """What COMPUTE does with a cache: looks at all that is held, writes what is new."""
    rows.step = task.step
    image = store.open(task, rows).image  # type: ignore[arg-type]
    for place_, (row, length) in enumerate(zip(rows.batch.rows, rows.batch.lengths)):
        held = 0 if task.step == 0 else length + task.step - 1
        for slot in range(held):
            expected = torch.full_like(image[:, place_, :, slot], slot_value(task.layer, row, slot))
            assert torch.equal(image[:, place_, :, slot], expected), f"slot {slot} of row {row} at {task}"
        for slot in range(held, length if task.step == 0 else held + 1):
            image[:, place_, :, slot] = slot_value(task.layer, row, slot)


def run(store: KVStore, schedule: Schedule, block: Block, drops: dict[tuple[int, int], int] | None = None) -> dict[Op, int]:
    """All tasks in order of issue; after the last layer of (step, batch) a row may end."""
    rows = [Rows(batch) for batch in block.batches]
    actions: dict[Op, Callable[[Task], int]] = {
        Op.READ_KV: store.read,
        Op.LOAD_KV: store.load,
        Op.STORE_KV: store.store,
        Op.WRITE_KV: store.write,
    }
    moved = dict.fromkeys(actions, 0)
    for task in schedule.tasks():
        if task.op in actions:
            moved[task.op] += actions[task.op](task)
            store._memories.device.settle()  # there is no executor here to wait for what was only issued
        elif task.op is Op.COMPUTE and (task.layer, task.batch) in schedule.traffic.kv:
            attend(store, task, rows[task.batch])
        if task.op is Op.COMPUTE and task.layer == schedule.traffic.layers - 1 and (task.step, task.batch) in (drops or {}):
            rows[task.batch].drop((drops or {})[task.step, task.batch])
    return moved


@pytest.mark.parametrize("kv", [ON_DEVICE, ON_HOST, ON_DISK, MIXED])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_what_a_step_leaves_is_there_at_the_next(
    kv: tuple[int, int], schedule: str, buffers: int, any_device: str, offload: Path
) -> None:
    with opened_store(kv, any_device, offload, schedule, buffers) as (store, made, _, block, _), torch.inference_mode():
        run(store, made, block)


@pytest.mark.parametrize("kv", [ON_DEVICE, ON_HOST, ON_DISK, MIXED])
def test_rows_that_move_up_find_what_they_left(kv: tuple[int, int], any_device: str, offload: Path) -> None:
    drops = {(0, 0): 1, (2, 0): 0, (1, 1): 1}
    with opened_store(kv, any_device, offload) as (store, made, _, block, _), torch.inference_mode():
        run(store, made, block, drops)


def test_only_what_changed_is_stored_and_all_that_is_held_is_fetched(any_device: str, offload: Path) -> None:
    with opened_store(ON_DISK, any_device, offload) as (store, made, spec, block, _), torch.inference_mode():
        moved = run(store, made, block)
    layers, per_slot = len(spec.kv_layers), spec.kv_bytes_per_slot
    stored = fetched = 0
    for batch in block.batches:
        spread = max(batch.lengths) - min(batch.lengths)
        stored += layers * batch.size * per_slot * (max(batch.lengths) + (STEPS - 2) * (1 + spread))
        fetched += layers * batch.size * per_slot * sum(max(batch.lengths) + step - 1 for step in range(1, STEPS))
    assert (moved[Op.WRITE_KV], moved[Op.READ_KV]) == (stored, fetched)
    assert (moved[Op.STORE_KV], moved[Op.LOAD_KV]) == ((0, 0) if any_device == "cpu" else (stored, fetched))


def test_large_ranges_are_cut_for_the_disk_threads(offload: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_layout, "CHUNK_BYTES", 2 * 4096)  # two slots
    with opened_store(ON_DISK, "cpu", offload) as (store, made, _, block, memories), torch.inference_mode():
        counts: list[int] = []
        each = memories.files.each

        def counted(action: Callable[..., None], items: Sequence[object]) -> None:
            counts.append(len(items))
            each(action, items)

        monkeypatch.setattr(memories.files, "each", counted)
        run(store, made, block)
    assert max(counts) >= 4


def test_everything_is_given_back_at_the_end(any_device: str, offload: Path) -> None:
    with opened_store(MIXED, any_device, offload) as (_, _, _, _, memories):
        assert memories.disk.meter.used_bytes > 0 and memories.host.meter.used_bytes > 0
    memories.host.trim()
    assert memories.disk.meter.used_bytes == memories.host.meter.used_bytes == 0
    if isinstance(memories.compute, DeviceTier):
        assert memories.compute.meter.used_bytes == 0


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_store_that_cannot_be_made_gives_back_what_it_had(calls: int, offload: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alloc, count = DiskTier.alloc, iter(range(calls))

    def refuse(tier: DiskTier, nbytes: int) -> Any:
        if next(count, None) is None:
            raise OSError(28, "full")
        return alloc(tier, nbytes)

    monkeypatch.setattr(DiskTier, "alloc", refuse)
    with opened_memories("cpu", offload) as memories:
        spec, block = tiny_spec(blocks=3), block_of(LENGTHS, STEPS)
        plan = Plan().with_percent((100, 0, 0, 40, 100, 0)).folded()
        with pytest.raises(OSError, match="full"):
            KVStore(BlockPlan.of(spec, plan, block, Site()), 0, memories, {})
        memories.host.trim()
        assert memories.disk.meter.used_bytes == memories.host.meter.used_bytes == 0


def test_images_are_laid_out_as_their_place_asks(offload: Path) -> None:
    """Beside the CPU head by head; where a device fetches them slot by slot, so that what is held is one range."""
    strides: dict[str, Tensor] = {}
    for device in ("cpu", "pretended"):
        with opened_store(ON_DEVICE, device, offload) as (store, _, spec, block, _):
            task = Task(Op.COMPUTE, 0, spec.kv_layers[0], 0)
            image = store.open(task, Rows(block.batches[0])).image  # type: ignore[arg-type]
            assert image.shape == (2, 3, spec.kv_heads, 5 + STEPS - 1, spec.head_dim)
            strides[device] = image
    assert strides["cpu"].is_contiguous() and strides["pretended"].permute(3, 0, 1, 2, 4).is_contiguous()
