"""The engine: the one place where the halves meet. It turns a plan into a schedule, gives every op its small action, and runs the
blocks of a workload one after the other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterator, Sequence

import torch
from torch import Tensor

from h2o_flexgen.kv.policy import POLICIES
from h2o_flexgen.memory.device import Device, DeviceTier
from h2o_flexgen.memory.disk import DiskTier, Files
from h2o_flexgen.memory.host import HostTier
from h2o_flexgen.models import base
from h2o_flexgen.models.checkpoint import WeightSource
from h2o_flexgen.planning.placement import moves, place
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.schedule import SCHEDULES, Op, Schedule, Task
from h2o_flexgen.planning.trace import Trace
from h2o_flexgen.planning.workload import Batch, Block, Workload
from h2o_flexgen.runtime.executor import Executor
from h2o_flexgen.runtime.hidden import HiddenStore
from h2o_flexgen.runtime.kvstore import KVStore
from h2o_flexgen.runtime.rows import BatchRows, Row
from h2o_flexgen.runtime.sampling import Sampler
from h2o_flexgen.runtime.weights import WeightStore

OnVisit = Callable[[Task, int], None]  # a COMPUTE is over; tokens picked so far in its block


class Memories:
    """The device, the tiers and the disk threads of an engine: opened once, closed whatever happens."""

    def __init__(self, device: Device, offload_folder: Path, pin_host: bool = True) -> None:
        self.device = device
        self.host = HostTier(pinned=pin_host and device.accelerator)
        self.compute: HostTier | DeviceTier = device.memory(self.host)
        self.files = Files()
        self.disk = DiskTier(self.files, offload_folder)

    def close(self) -> None:
        self.device.close()
        self.files.close()
        self.disk.close()


@dataclass(frozen=True)
class BlockRun:
    """What happened in one block."""

    block: Block
    schedule: Schedule
    trace: Trace
    prefill_seconds: float
    decode_seconds: float
    step_seconds: tuple[float, ...]  # of each decode step
    tokens: int  # generated


@dataclass
class _Progress:
    """What the actions of a running block share."""

    rows: list[BatchRows]
    kv: KVStore
    hidden: HiddenStore
    sampler: Sampler
    started: float = field(default_factory=time.perf_counter)
    step_ends: dict[int, float] = field(default_factory=dict)
    tokens: int = 0

    @property
    def is_done(self) -> bool:
        return all(rows.is_done for rows in self.rows)


class Engine:
    def __init__(self, model: base.Model, source: WeightSource, plan: Plan, workload: Workload, memories: Memories) -> None:
        self._model = model
        self._spec = model.spec
        self._plan = plan
        self._memories = memories
        self._policy = POLICIES[plan.kv_policy]
        first = workload.blocks(plan.gpu_batch_size, plan.num_gpu_batches)[0]
        self.placement = place(self._spec, plan, first)
        self.weights = WeightStore(self._spec, self.placement.weights, source, memories)

    def schedule(self, block: Block) -> Schedule:
        placement = place(self._spec, self._plan, block)
        return SCHEDULES[self._plan.schedule](
            moves(self._spec, self._plan, block, placement, self._memories.device.accelerator)
        )

    def run(
        self,
        block: Block,
        rows: Sequence[Row],
        sampler: Sampler,
        on_visit: OnVisit | None = None,
        until: Callable[[Task], bool] | None = None,
    ) -> BlockRun:
        """Generates one block. `rows` are all rows of the workload, in input order; `until` ends the run early at a task."""
        schedule = self.schedule(block)
        self.weights.prepare(schedule)
        memories = self._memories
        kv = KVStore(self._spec, self._policy, block, schedule, memories, memories.disk)
        hidden = HiddenStore(self._spec, block, schedule, memories, memories.disk)
        state = _Progress([self._rows_of(batch, rows, kv.capacity(at)) for at, batch in enumerate(block.batches)], kv, hidden, sampler)
        try:
            with torch.inference_mode():
                executor = Executor(self._actions(state, on_visit), memories.device, ahead=self._plan.slots - 1)
                trace = executor.run(self._tasks(schedule, state, until))
        finally:
            kv.close()
            hidden.close()
        return self._summary(block, schedule, trace, state)

    def _rows_of(self, batch: Batch, rows: Sequence[Row], capacity: int) -> BatchRows:
        return BatchRows(batch, [rows[row] for row in batch.rows], capacity, self._memories.device.torch_device)

    def _tasks(self, schedule: Schedule, state: _Progress, until: Callable[[Task], bool] | None) -> Iterator[Task]:
        """The schedule, until nobody is left to compute for."""
        for task in schedule.tasks():
            if state.is_done or (until is not None and until(task)):
                return
            yield task

    # -- actions -------------------------------------------------------------------------------------------------------

    def _actions(self, state: _Progress, on_visit: OnVisit | None) -> dict[Op, Callable[[Task], int]]:
        def for_the_living(action: Callable[[Task], int]) -> Callable[[Task], int]:
            return lambda task: 0 if state.rows[task.batch].is_done else action(task)

        def for_anyone(action: Callable[[Task], int]) -> Callable[[Task], int]:
            """Weights serve all batches when they are cut in slices, else the batch in whose name they come."""
            return lambda task: 0 if state.is_done else action(task)

        def compute(task: Task) -> int:
            if not state.rows[task.batch].is_done:
                self._compute(task, state)
                if on_visit is not None:
                    on_visit(task, state.tokens)
            return 0

        return {
            Op.READ_W: for_anyone(self.weights.read),
            Op.LOAD_W: for_anyone(self.weights.load),
            Op.READ_KV: for_the_living(state.kv.read),
            Op.LOAD_KV: for_the_living(state.kv.load),
            Op.LOAD_H: for_the_living(state.hidden.load),
            Op.COMPUTE: compute,
            Op.STORE_H: for_the_living(state.hidden.store),
            Op.STORE_KV: for_the_living(state.kv.store),
            Op.WRITE_KV: for_the_living(state.kv.write),
        }

    def _compute(self, task: Task, state: _Progress) -> None:
        """One layer on one batch."""
        rows, layer = state.rows[task.batch], self._spec.layers[task.layer]
        weights = self.weights.views(task.step, task.layer, task.batch)
        if layer.kind == "embed":
            state.hidden.put(task.batch, self._model.embed(rows.tokens, rows.now.positions, weights))
            return
        hidden = state.hidden.take(task.batch)
        if layer.kind == "head":
            logits = self._model.head(rows.last_hidden(hidden), weights)
            state.tokens += rows.advance(logits, state.sampler, task.step)
            state.step_ends[task.step] = time.perf_counter()
        elif layer.kind == "mlp":
            state.hidden.put(task.batch, self._model.mlp(hidden, weights))
        else:
            state.hidden.put(task.batch, self._attend_layer(task, layer.kind, state, hidden, weights))

    def _attend_layer(self, task: Task, kind: str, state: _Progress, hidden: Tensor, weights: dict[str, Tensor]) -> Tensor:
        rows = state.rows[task.batch]
        cache = state.kv.open(task, rows)

        def attend(q: Tensor, k: Tensor, v: Tensor, rotate: base.Rotate | None = None) -> Tensor:
            return cache.attend(rows.now, q, k, v, rotate)

        if kind == "block":
            return base.block(self._model, hidden, weights, attend)
        return self._model.attention(hidden, weights, attend)

    # -- what happened -------------------------------------------------------------------------------------------------

    def _summary(self, block: Block, schedule: Schedule, trace: Trace, state: _Progress) -> BlockRun:
        ends = [state.started, *(state.step_ends[step] for step in sorted(state.step_ends))]
        steps = [later - earlier for earlier, later in zip(ends, ends[1:])]
        return BlockRun(block, schedule, trace, sum(steps[:1]), sum(steps[1:]), tuple(steps[1:]), state.tokens)
