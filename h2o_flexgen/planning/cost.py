"""The cost of a task: the bytes that it moves and the flops that it does. `pricing` makes seconds of them.

The bytes are exact: a test holds them against what a run moved.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.tiers import DISK, HOST
from h2o_flexgen.core.workload import Batch, Block
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.policies.occupancy import Occupancy
from h2o_flexgen.schedule.schedule import LANES, Key, Op, Schedule, Task

FETCHES, STORES = (Op.READ_KV, Op.LOAD_KV), (Op.STORE_KV, Op.WRITE_KV)  # of KV


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
    def slots(self) -> tuple[Occupancy, ...]:
        """Of each batch."""
        return self.planned.slots

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def nbytes(self, task: Task | Key) -> float:
        """Moved by one task; a slice of a layer's weights counts as its even part."""
        if task.op is Op.READ_W:
            return self.stored_bytes[task.layer] / self.schedule.slices
        if task.op is Op.LOAD_W:
            return self.loaded_bytes[task.layer] / self.schedule.slices
        if task.op in (*FETCHES, *STORES):
            return self._kv_slots(task.op, self.slots[task.batch], task.step) * self._kv_slot_bytes(task.batch)
        if task.op is Op.LOAD_H:
            return self._hidden_bytes(task, task.layer - 1)
        return self._hidden_bytes(task, task.layer) if task.op is Op.STORE_H else 0

    def mean_nbytes(self, task: Task | Key) -> float:
        """The same; of KV on disk the mean over the steps that evict, as reads grow with the journal until it starts anew."""
        if task.op not in (Op.READ_KV, Op.WRITE_KV):
            return self.nbytes(task)
        slots = self.slots[task.batch]
        moved = slots.mean_read(task.step) if task.op is Op.READ_KV else slots.mean_written(task.step)
        return moved * self._kv_slot_bytes(task.batch)

    @cached_property
    def stored_bytes(self) -> tuple[int, ...]:
        """Per layer: bytes of weights that are read from disk."""
        tiers = self.planned.placement.weights
        return tuple(
            sum(tensor.stored_nbytes for _, tensor in layer.tensors if tiers[tensor.name] == DISK) for layer in self.spec.layers
        )

    @cached_property
    def loaded_bytes(self) -> tuple[int, ...]:
        """Per layer: bytes of weights that an accelerator has to fetch."""
        tiers = self.planned.placement.weights
        return tuple(
            sum(tensor.nbytes for _, tensor in layer.tensors if tiers[tensor.name] in (DISK, HOST))
            for layer in self.spec.layers
        )

    def _kv_slots(self, op: Op, slots: Occupancy, step: int) -> int:
        """Moved by one task of a batch, as slots of all its rows."""
        if op is Op.STORE_KV:
            return slots.stored(step)
        if op is Op.WRITE_KV:
            return slots.written(step)
        return slots.held(step) + (slots.journal_entries(step) if op is Op.READ_KV else 0)

    def _kv_slot_bytes(self, batch: int) -> int:
        return self.block.batches[batch].size * self.spec.kv_bytes_per_slot

    def _hidden_bytes(self, task: Task | Key, layer: int) -> int:
        batch = self.block.batches[task.batch]
        tokens = batch.prompt_len if task.step == 0 else 1
        return batch.size * tokens * self.spec.layers[layer].out_width * self.spec.itemsize

    def lane_bytes(self) -> dict[str, int]:
        """What a whole run of the block moves, lane by lane, when no row finishes early. Sums, because a long job has more
        tasks than one would care to walk through: a test holds them against the tasks."""
        moved: Counter[str] = Counter()
        for sums in (self._weight_sums(), self._kv_sums(), self._hidden_sums()):
            moved.update(sums)
        return {lane: nbytes for lane, nbytes in moved.items() if nbytes}

    def lane_bytes_until(self, stop_at: Callable[[Task], bool]) -> dict[str, int]:
        moved: dict[str, float] = defaultdict(float)
        for task in takewhile(lambda task: not stop_at(task), self.schedule.tasks()):
            moved[task.lane] += self.nbytes(task)
        return {lane: round(nbytes) for lane, nbytes in moved.items() if nbytes}

    def _weight_sums(self) -> dict[str, int]:
        alone = {self.schedule.weight_batch(batch) for batch in range(len(self.block.batches))}
        passes = self.block.gen_len * len(alone)
        loaded = sum(self.loaded_bytes) if self.schedule.traffic.accelerator else 0
        return {LANES[Op.READ_W]: passes * sum(self.stored_bytes), LANES[Op.LOAD_W]: passes * loaded}

    def _kv_sums(self) -> Counter[str]:
        traffic, sums, gen_len = self.schedule.traffic, Counter[str](), self.block.gen_len
        fetching = range(0 if traffic.kv_before else 1, gen_len)
        storing = range(gen_len if traffic.kv_after else gen_len - 1)
        for number, slots in enumerate(self.slots):
            layers = [layer for layer in self.spec.kv_layers if traffic.moves_kv(layer, number)]
            from_disk = sum(traffic.kv_on_disk(layer, number) for layer in layers)
            linked = len(layers) if traffic.links_kv else 0
            for op in (*FETCHES, *STORES):
                moved = sum(self._kv_slots(op, slots, step) for step in (fetching if op in FETCHES else storing))
                units = from_disk if op in (Op.READ_KV, Op.WRITE_KV) else linked
                sums[LANES[op]] += units * moved * self._kv_slot_bytes(number)
        return sums

    def _hidden_sums(self) -> dict[str, int]:
        width = sum(layer.out_width for layer in self.spec.layers[:-1])
        tokens = sum(
            batch.size * (batch.prompt_len + self.block.gen_len - 1)
            for number, batch in enumerate(self.block.batches)
            if self.schedule.traffic.moves_hidden(number)
        )
        return {LANES[op]: tokens * width * self.spec.itemsize for op in (Op.LOAD_H, Op.STORE_H)}

    # -- flops -------------------------------------------------------------------------------------------------------

    def flops(self, task: Task) -> float:
        batch, held = self.block.batches[task.batch], self.slots[task.batch].held(task.step)
        if task.step:
            return self.spec.flops(task.layer, batch.size, 1, held + 1)
        return sum(
            self.spec.flops(task.layer, part.size, part.prompt_len, held + (part.prompt_len + 1) / 2)
            for part in self.parts[task.batch]
        )

    def product_rows(self, task: Task) -> int:
        """Rows of the matrix products of a COMPUTE: of its largest part."""
        if task.step:
            return self.block.batches[task.batch].size
        return max(part.size * part.prompt_len for part in self.parts[task.batch])

    @cached_property
    def parts(self) -> tuple[tuple[Batch, ...], ...]:
        """Of each batch, what is computed at once of its prompts."""
        return tuple(batch.parts(self.planned.plan.prefill_tokens) for batch in self.block.batches)


def predicted_bytes(blocks: Iterable[BlockPlan], stop_at: Callable[[Task], bool] | None = None) -> dict[str, int]:
    """What a run of these blocks moves, lane by lane, when no row finishes early; `stop_at` ends the run at a task."""
    total: Counter[str] = Counter()
    alike: dict[object, list[BlockPlan]] = defaultdict(list)
    for block in blocks:
        alike[block.shape].append(block)
    for first, *others in alike.values():
        cost = Cost(first)
        moved = cost.lane_bytes() if stop_at is None else cost.lane_bytes_until(stop_at)
        total.update({lane: nbytes * (1 + len(others)) for lane, nbytes in moved.items()})
    return dict(total)
