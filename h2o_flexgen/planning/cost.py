"""The cost of a task: the bytes that it moves and the flops that it does, and from them its seconds on a machine.

The bytes are exact: a test holds them against what a run moved. The seconds are bytes over bandwidth and flops over rate.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from h2o_flexgen.kv.policy import POLICIES, KVPolicy
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.model_spec import ModelSpec
from h2o_flexgen.planning.placement import Placement
from h2o_flexgen.planning.plan import DISK, HOST, Plan
from h2o_flexgen.planning.schedule import Op, Schedule, Task
from h2o_flexgen.planning.workload import Block


@dataclass(frozen=True)
class Cost:
    spec: ModelSpec
    plan: Plan
    block: Block
    placement: Placement
    schedule: Schedule

    @property
    def policy(self) -> KVPolicy:
        return POLICIES[self.plan.kv_policy]

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def nbytes(self, task: Task) -> float:
        """Moved by one task; a slice of a layer's weights counts as its even part."""
        if task.op is Op.READ_W:
            return self.stored_bytes[task.layer] / self.schedule.slices
        if task.op is Op.LOAD_W:
            return self.loaded_bytes[task.layer] / self.schedule.slices
        if task.op in (Op.READ_KV, Op.LOAD_KV):
            return self._kv_bytes(task, self.policy.held(self.block.batches[task.batch], task.step))
        if task.op in (Op.STORE_KV, Op.WRITE_KV):
            first, last = self.policy.changed(self.block.batches[task.batch], task.step)
            return self._kv_bytes(task, last - first)
        if task.op is Op.LOAD_H:
            return self._hidden_bytes(task, task.layer - 1)
        return self._hidden_bytes(task, task.layer) if task.op is Op.STORE_H else 0

    @cached_property
    def stored_bytes(self) -> tuple[int, ...]:
        """Per layer: bytes of weights that are read from disk."""
        tiers = self.placement.weights
        return tuple(
            sum(tensor.stored_nbytes for _, tensor in layer.tensors if tiers[tensor.name] == DISK) for layer in self.spec.layers
        )

    @cached_property
    def loaded_bytes(self) -> tuple[int, ...]:
        """Per layer: bytes of weights that an accelerator has to fetch."""
        tiers = self.placement.weights
        return tuple(
            sum(tensor.nbytes for _, tensor in layer.tensors if tiers[tensor.name] in (DISK, HOST))
            for layer in self.spec.layers
        )

    def _kv_bytes(self, task: Task, slots: int) -> int:
        return slots * self.block.batches[task.batch].size * self.spec.kv_bytes_per_slot

    def _hidden_bytes(self, task: Task, layer: int) -> int:
        batch = self.block.batches[task.batch]
        tokens = batch.prompt_len if task.step == 0 else 1
        return batch.size * tokens * self.spec.layers[layer].out_width * self.spec.itemsize

    def lane_bytes(self) -> dict[str, int]:
        """What a whole run of the block moves, lane by lane."""
        moved: Counter[str] = Counter()
        for task in self.schedule.tasks():
            if task.op is not Op.COMPUTE:
                moved[task.lane] += self.nbytes(task)  # type: ignore[assignment]
        return {lane: round(nbytes) for lane, nbytes in moved.items()}

    # -- seconds -------------------------------------------------------------------------------------------------------

    def flops(self, task: Task) -> float:
        batch = self.block.batches[task.batch]
        tokens = batch.prompt_len if task.step == 0 else 1
        context = (tokens + 1) / 2 if task.step == 0 else self.policy.held(batch, task.step) + 1
        return self.spec.flops(task.layer, batch.size, tokens, context)

    def seconds(self, task: Task, machine: Machine) -> float:
        if task.op is not Op.COMPUTE:
            return self.nbytes(task) / machine.bandwidth(task.lane) + machine.task_seconds
        batch = self.block.batches[task.batch]
        rows = batch.size * (batch.prompt_len if task.step == 0 else 1)
        return self.flops(task) / machine.flop_rate(self.spec.dtype, rows) + machine.task_seconds
