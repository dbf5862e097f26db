"""The cost of a task: the bytes that it moves and the flops that it does. `pricing` makes seconds of them.

The bytes are exact: a test compares them with what a run moved.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.tiers import DISK, HOST
from h2o_flexgen.core.workload import Batch, Block
from h2o_flexgen.planning.block_plan import BlockPlan, BlockPlans
from h2o_flexgen.policies.occupancy import Occupancy
from h2o_flexgen.schedule.ops import LANES, Data, Op
from h2o_flexgen.schedule.schedule import Schedule
from h2o_flexgen.schedule.task import Key, Task


@dataclass(frozen=True)
class Cost:
    planned: BlockPlan

    @property
    def spec(self) -> ModelSpec:
        return self.planned.spec

    @property
    def block(self) -> Block:
        return self.planned.block

    @property
    def schedule(self) -> Schedule:
        return self.planned.schedule

    @property
    def occupancy(self) -> tuple[Occupancy, ...]:
        """The occupancy of each batch."""
        return self.planned.occupancy

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def nbytes(self, task: Task | Key) -> float:
        """Bytes moved by one task; a slice of a layer's weights counts as its even part."""
        parts = self.schedule.parts(task.op)
        return self.transfer_bytes(task) if parts == 1 else self.transfer_bytes(task) / parts

    def transfer_bytes(self, task: Task | Key) -> int:
        """Bytes moved by all tasks of this task's transfer."""
        op = task.op
        if op.data is Data.WEIGHTS:
            return (self.stored_bytes if op.uses_disk else self.loaded_bytes)[task.layer]
        if op.data is Data.KV:
            return self._kv_slots(op, self.occupancy[task.batch], task.step) * self._kv_slot_bytes(task.batch)
        return self._hidden_bytes(task) if op.data is Data.HIDDEN else 0

    def mean_nbytes(self, task: Task | Key) -> float:
        """The same; KV on disk counts as its mean over the steps that evict, as reads grow with the journal until it starts
        anew."""
        if task.op.data is not Data.KV or not task.op.uses_disk:
            return self.nbytes(task)
        occupancy = self.occupancy[task.batch]
        moved = occupancy.mean_read(task.step) if task.op.fetches else occupancy.mean_written(task.step)
        return moved * self._kv_slot_bytes(task.batch)

    @cached_property
    def stored_bytes(self) -> tuple[int, ...]:
        """Bytes of weights per layer that are read from disk."""
        tiers = self.planned.placement.weights
        return tuple(
            sum(tensor.stored_nbytes for _, tensor in layer.tensors if tiers[tensor.name] == DISK) for layer in self.spec.layers
        )

    @cached_property
    def loaded_bytes(self) -> tuple[int, ...]:
        """Bytes of weights per layer that an accelerator must fetch."""
        tiers = self.planned.placement.weights
        return tuple(
            sum(tensor.nbytes for _, tensor in layer.tensors if tiers[tensor.name] in (DISK, HOST))
            for layer in self.spec.layers
        )

    def _kv_slots(self, op: Op, occupancy: Occupancy, step: int) -> int:
        """Slots, over all rows, that one task of a batch moves."""
        if op.stores:
            return occupancy.written(step) if op.uses_disk else occupancy.stored(step)
        return occupancy.held(step) + (occupancy.journal_entries(step) if op.uses_disk else 0)

    def _kv_slot_bytes(self, batch: int) -> int:
        return self.block.batches[batch].size * self.spec.kv_bytes_per_slot

    def _hidden_bytes(self, task: Task | Key) -> int:
        """Bytes of the hidden states that come from the layer before, or that go to the next."""
        batch, layer = self.block.batches[task.batch], task.layer - 1 if task.op.fetches else task.layer
        tokens = batch.prompt_len if task.step == 0 else 1
        return batch.size * tokens * self.spec.layers[layer].out_width * self.spec.itemsize

    def lane_bytes(self) -> dict[str, int]:
        """Bytes that a whole run of the block moves, by lane, if no row finishes early. A long job has very many tasks, so
        steps with the same transfers are counted together."""
        moved = dict.fromkeys(LANES, 0)
        for steps in self.schedule.traffic.phases:
            for key in self.schedule.in_step(steps[0]):
                moved[key.op.lane] += self._moved(key, steps)
        return {lane: nbytes for lane, nbytes in moved.items() if nbytes}

    def _moved(self, key: Key, steps: range) -> int:
        """Bytes that a transfer moves in all of these steps."""
        if key.op.data is not Data.KV:
            return len(steps) * self.transfer_bytes(key)
        kind = key.op, key.batch, steps  # the same in all layers
        if kind not in self._kv_moved:
            self._kv_moved[kind] = sum(self.transfer_bytes(key._replace(step=step)) for step in steps)
        return self._kv_moved[kind]

    @cached_property
    def _kv_moved(self) -> dict[tuple[Op, int, range], int]:
        return {}

    def lane_bytes_until(self, stop_at: Callable[[Task], bool]) -> dict[str, int]:
        moved: dict[str, float] = defaultdict(float)
        for task in takewhile(lambda task: not stop_at(task), self.schedule.tasks()):
            moved[task.lane] += self.nbytes(task)
        return {lane: round(nbytes) for lane, nbytes in moved.items() if nbytes}

    # -- flops -------------------------------------------------------------------------------------------------------

    def flops(self, task: Task) -> float:
        batch, held = self.block.batches[task.batch], self.occupancy[task.batch].held(task.step)
        if task.step:
            return self.spec.flops(task.layer, batch.size, 1, held + 1)
        return sum(
            self.spec.flops(task.layer, part.size, part.prompt_len, held + (part.prompt_len + 1) / 2)
            for part in self.parts[task.batch]
        )

    def product_rows(self, task: Task) -> int:
        """Rows of the matrix products of a COMPUTE, in its largest part."""
        if task.step:
            return self.block.batches[task.batch].size
        return max(part.size * part.prompt_len for part in self.parts[task.batch])

    @cached_property
    def parts(self) -> tuple[tuple[Batch, ...], ...]:
        """The parts of each batch whose prompts are computed at once."""
        return tuple(batch.parts(self.planned.plan.prefill_tokens) for batch in self.block.batches)


def predicted_bytes(blocks: BlockPlans, stop_at: Callable[[Task], bool] | None = None) -> dict[str, int]:
    """Bytes that a run of these blocks moves, by lane, if no row finishes early; `stop_at` ends the run at a task."""
    total: Counter[str] = Counter()
    for block, count in blocks.alike:
        cost = Cost(block)
        moved = cost.lane_bytes() if stop_at is None else cost.lane_bytes_until(stop_at)
        total.update({lane: nbytes * count for lane, nbytes in moved.items()})
    return dict(total)
