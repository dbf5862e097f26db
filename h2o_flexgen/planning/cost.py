"""The cost of a task: the bytes that it moves and the flops that it does. `pricing` turns them into seconds.

The bytes are exact: a test compares them with what a run moved.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import NamedTuple

from h2o_flexgen.core.buffer_layout import KVLayout
from h2o_flexgen.core.model_spec import ModelSpec, TensorSpec
from h2o_flexgen.core.site import DISK, HOST
from h2o_flexgen.core.workload import Block
from h2o_flexgen.formats.kernel_sizes import FLOAT_BYTES
from h2o_flexgen.planning.batch_pass import BatchPass, StepOfBatch, products_of, tokens_of
from h2o_flexgen.planning.block_plan import BlockPlan, BlockPlans
from h2o_flexgen.planning.seating import Seating
from h2o_flexgen.policies.recall import ALL, attended, index_bytes
from h2o_flexgen.schedule.ops import LANES, Data, Key, Op, Task, Visit
from h2o_flexgen.schedule.schedule import Schedule


class AtLevel(NamedTuple):
    """What the heads of one level do in a visit."""

    level: int
    heads: int  # KV heads of the layer at this level, one at least
    one: BatchPass


class ReadSlots(NamedTuple):
    """What a decode step reads of the slots of its rows, their newest ones included."""

    attended: float  # slots of which it reads keys and values
    indexed: float = 0.0  # slots of which it reads the index, to choose them


class MovedPages(NamedTuple):
    """What a visit moves of KV that lies row by row on disk, in page groups, which are read and written whole."""

    nbytes: float
    pieces: float  # those that the disk is asked for one by one


@dataclass(frozen=True)
class Cost:
    planned: BlockPlan
    known_seating: Seating | None = None  # that of the block, if it is known already

    @property
    def spec(self) -> ModelSpec:
        return self.planned.spec

    @property
    def block(self) -> Block:
        return self.planned.block

    @property
    def schedule(self) -> Schedule:
        return self.planned.schedule

    # -- passes --------------------------------------------------------------------------------------------------------

    @cached_property
    def seating(self) -> Seating:
        """The rows that have a seat in each pass, where rows come and go."""
        return self.known_seating or Seating.of(self.planned)

    @property
    def passes(self) -> int:
        """The passes over the weights, the first one included."""
        return self.seating.passes if self.block.is_running else self.block.gen_len

    def batch_pass(self, step: int, batch: int, level: int = 0) -> BatchPass:
        """What a batch does in a pass. Its rows and prompts are the same at all levels, its slots are those of one."""
        if (step, batch, level) not in self._passes:
            self._passes[step, batch, level] = self._pass(step, batch, level)
        return self._passes[step, batch, level]

    def _pass(self, step: int, batch: int, level: int) -> BatchPass:
        if self.block.is_running:
            return self.seating.at(step, batch, level)
        return StepOfBatch(self.planned.kv.occupancies[level][batch], step, self.planned.plan.prefill_tokens)

    @cached_property
    def _passes(self) -> dict[tuple[int, int, int], BatchPass]:
        return {}

    def by_level(self, task: Task | Key) -> list[AtLevel]:
        """What the levels do that have heads in the layer of a visit."""
        step, layer, batch = task.step, task.layer, task.batch
        heads = enumerate(self.planned.kv.heads(layer))
        return [AtLevel(level, own, self.batch_pass(step, batch, level)) for level, own in heads if own]

    def read_slots(self, at: AtLevel) -> ReadSlots:
        """What the newest tokens read in each head of a level."""
        held, share = at.one.slots + at.one.rows, self.planned.levels[at.level].policy.recall
        if share == ALL or not at.one.rows:
            return ReadSlots(held)
        return ReadSlots(at.one.rows * attended(share, held // at.one.rows), held)

    def bytes_to_read(self, at: AtLevel) -> float:
        """Bytes of KV and of the index that all heads of a level read for them."""
        of_slot = self.planned.kv.specs[at.level].kv_bytes_per_head
        return at.heads * self.read_slots(at).attended * of_slot + self.index_to_read(at)

    def index_to_read(self, at: AtLevel) -> float:
        """Those of the index alone."""
        spec, share = self.planned.kv.specs[at.level], self.planned.levels[at.level].policy.recall
        of_index = index_bytes(share, spec) or spec.kv_bytes_per_head / spec.kv_sets  # keys may be their own index
        return at.heads * self.read_slots(at).indexed * of_index

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def nbytes(self, task: Task | Key) -> float:
        """Bytes moved by one task; a slice of a layer's weights counts as its even part."""
        parts = self.schedule.parts(task.op)
        return self.transfer_bytes(task) if parts == 1 else self.transfer_bytes(task) / parts

    def transfer_bytes(self, task: Task | Key) -> int:
        """Bytes moved by all tasks of this task's transfer."""
        op = task.op
        if op.data is Data.WEIGHTS:
            return (self.stored_bytes if op.uses_disk else self.loaded_bytes)(task.step)[task.layer]
        if op.data is Data.KV:
            if op is Op.ATTEND:
                return self._crossing_bytes(task.layer, self.batch_pass(task.step, task.batch))
            if op.chooses or self.schedule.traffic.brings_chosen(task.layer, task.batch):
                return 0 if op.chooses else self._bytes_row_by_row(task)
            if not op.uses_disk and self.schedule.traffic.is_beside(task.layer, task.batch):
                return self._whole_row_bytes(task)
            of_head = self.spec.at(task.layer).kv_bytes_per_head
            return sum(_kv_slots(op, at.one) * at.heads * of_head for at in self.by_level(task))
        if op.data is Data.STATE:
            return self._state_rows(task) * self.planned.states[task.layer, task.batch].row_bytes
        return self._hidden_bytes(task) if op.data is Data.HIDDEN else 0

    def _bytes_row_by_row(self, task: Task | Key) -> int:
        """What a visit brings home, fetches for a text that goes on, or brings of what it chooses, if of a disk no two heads
        choose alike."""
        of_head = self.spec.at(task.layer).kv_bytes_per_head
        return sum(self._tokens_row_by_row(task, at) * at.heads * of_head for at in self.by_level(task))

    def _tokens_row_by_row(self, task: Task | Key, at: AtLevel) -> int:
        """The tokens of a level that it moves. On a disk one has all heads side by side. Devices bring each head by itself."""
        if task.op.stores:
            return at.one.changed
        if not self.brings_chosen(task):
            return at.one.read
        choosing = self.planned.levels[at.level].policy.choosing(at.heads if task.op.uses_disk else 1)
        return sum(choosing.most_brought(count + 1) for count in at.one.counts)

    def brings_chosen(self, task: Task | Key) -> bool:
        """Whether it brings those slots of KV that its visit has chosen."""
        return task.op.data is Data.KV and task.op.fetches and self.schedule.traffic.chooses(Visit(*task[1:4]))

    def moved_pages(self, task: Task | Key) -> MovedPages:
        """What a visit is expected to move of KV that lies in pages on disk."""
        each = [self._moved_pages(task, at) for at in self.by_level(task)]
        return MovedPages(sum(one.nbytes for one in each), sum(one.pieces for one in each))

    def _moved_pages(self, task: Task | Key, at: AtLevel) -> MovedPages:
        layout, policy = self.planned.kv.layouts(task.layer, task.batch)[at.level], self.planned.levels[at.level].policy
        assert layout is not None, "its heads are at this level"
        of_group, choosing = layout.page_group_tokens, policy.choosing(at.heads)
        if self.brings_chosen(task):
            groups = sum(choosing.page_groups_brought(count + 1, of_group) for count in at.one.counts)
            return MovedPages(groups * layout.page_group_bytes, groups)
        tokens = at.one.changed if task.op.stores else at.one.read
        if task.op.stores and not policy.keeps_all:  # each head has its newest token in another page group
            return _with_single(layout, at, tokens)
        return _of_ranges(layout, tokens, at.one.rows + at.one.joining)

    def _state_rows(self, task: Task | Key) -> int:
        """Rows of which the states are brought, which are those of the step before, or brought home."""
        step = max(0, task.step - 1) if task.op.fetches else task.step
        one = self.batch_pass(step, task.batch)
        return one.rows + one.joining

    def _crossing_bytes(self, layer: int, one: BatchPass) -> int:
        """Bytes of what rows ask of the host in decode, and of what it answers."""
        spec = self.spec.at(layer)
        values = one.rows * (2 * spec.heads + spec.kv_sets * spec.kv_heads) * spec.head_dim * spec.itemsize
        # the weight of one more key, with its values where it represents a prefix
        more = 1 + spec.head_dim if one.shared.tokens else int(spec.sink_scores)
        shared = one.rows * spec.heads * more * FLOAT_BYTES
        worth = one.rows * spec.kv_heads * FLOAT_BYTES if self._is_judged(layer) else 0
        return values + shared + worth

    def _is_judged(self, layer: int) -> bool:
        """Whether any head of a layer uses the worth that tokens have when they are written."""
        place = self.spec.kv_layers.index(layer)
        return any(level.policy.judge is not None and level.heads[place] for level in self.planned.levels)

    def _whole_row_bytes(self, task: Task | Key) -> int:
        """Bytes of all slots of the rows for which prompts are read, with the notes on these slots."""
        joining = self.batch_pass(task.step, task.batch).joining
        kv = self.planned.kv
        return joining * sum(
            layout.slots * (layout.row_bytes + layout.heads * kv.note_bytes(level))
            for level, layout in enumerate(kv.layouts(task.layer, task.batch))
            if layout is not None
        )

    def mean_nbytes(self, task: Task | Key) -> float:
        """The same; reads of KV on disk grow with the journal until it starts anew, so their mean counts."""
        if task.op.data is not Data.KV or not task.op.uses_disk or self.schedule.traffic.in_pages(task.layer, task.batch):
            return self.nbytes(task)
        fetches, of_head = task.op.fetches, self.spec.at(task.layer).kv_bytes_per_head
        return sum((at.one.mean_read if fetches else at.one.mean_written) * (at.heads * of_head) for at in self.by_level(task))

    def stored_bytes(self, step: int) -> tuple[int, ...]:
        """Bytes of weights per layer that a step reads from disk."""
        return self._bytes_by_layer(step, lambda tensor: tensor.stored_nbytes, DISK)

    def loaded_bytes(self, step: int) -> tuple[int, ...]:
        """Bytes of weights per layer that an accelerator must fetch for a step."""
        return self._bytes_by_layer(step, lambda tensor: tensor.nbytes, HOST, DISK)

    def _bytes_by_layer(self, step: int, nbytes: Callable[[TensorSpec], int], *tiers: str) -> tuple[int, ...]:
        spec, placed = self.planned.spec_at(step), self.planned.placement.weights
        key = Cost._bytes_by_layer, self.planned.plan.weights, tiers
        if key not in spec.worked_out:
            found = ([tensor for tensor in layer.stored if placed[tensor.name] in tiers] for layer in spec.layers)
            spec.worked_out[key] = tuple(sum(map(nbytes, own)) for own in found)
        known: tuple[int, ...] = spec.worked_out[key]
        return known

    def _hidden_bytes(self, task: Task | Key) -> int:
        """Bytes of the hidden states that come from the layer before, or that go to the next."""
        layer = task.layer - 1 if task.op.fetches else task.layer
        tokens = tokens_of(self.batch_pass(task.step, task.batch))
        return tokens * self.planned.spec_at(task.step).layers[layer].out_width * self.spec.itemsize

    def op_bytes(self) -> Counter[Op]:
        """Bytes that a whole run of the block moves, by op, if no row finishes early. A long job has very many tasks, so
        steps with the same transfers are counted together."""
        moved = Counter[Op]()
        for steps in self._phases:
            for key in self.schedule.in_step(steps[0]):
                moved[key.op] += self._moved(key, steps)
        return moved

    @property
    def _phases(self) -> Iterable[range]:
        """Steps in which the visits have the same transfers. In a running block it is not known which pass will be the last."""
        if self.block.is_running:
            return filter(None, (range(1), range(1, self.passes)))
        return self.schedule.traffic.phases

    def _moved(self, key: Key, steps: range) -> int:
        """Bytes that a transfer moves in all of these steps."""
        if key.op.data is Data.WEIGHTS or (key.op.data is Data.HIDDEN and not self.block.is_running):
            return len(steps) * self.transfer_bytes(key)
        of_layer = self.planned.kv.heads(key.layer) if key.op.data is Data.KV else key.layer  # in KV such layers are alike
        kind = key.op, key.batch, steps, of_layer
        if kind not in self._known_moved:
            self._known_moved[kind] = sum(self.transfer_bytes(key._replace(step=step)) for step in steps)
        return self._known_moved[kind]

    @cached_property
    def _known_moved(self) -> dict[tuple[Op, int, range, int | tuple[int, ...]], int]:
        return {}

    def op_bytes_until(self, stop_at: Callable[[Task], bool]) -> Counter[Op]:
        moved: dict[Op, float] = defaultdict(float)
        for task in takewhile(lambda task: not stop_at(task), self.schedule.tasks()):
            moved[task.op] += self.nbytes(task)
        return Counter({op: round(nbytes) for op, nbytes in moved.items()})

    # -- flops -------------------------------------------------------------------------------------------------------

    def flops(self, task: Task) -> float:
        spec = self.planned.spec_at(task.step)
        if not spec.layers[task.layer].has_kv:
            one = self.batch_pass(task.step, task.batch)
            return _flops(spec, task.layer, one, one.slots + one.rows)
        heads = spec.at(task.layer).kv_heads
        each = ((at, self.read_slots(at)) for at in self.by_level(task))  # only the keys of an index are multiplied with
        return sum(at.heads / heads * _flops(spec, task.layer, at.one, read.attended + read.indexed / 2) for at, read in each)

    def product_rows(self, task: Task) -> int:
        """Rows of the matrix products of a COMPUTE, in its largest part."""
        return max(products_of(self.batch_pass(task.step, task.batch)))


def _flops(spec: ModelSpec, layer: int, one: BatchPass, attended: float) -> float:
    """Flops if all heads hold what those of one level do. `attended`: slots that the newest tokens attend, over all rows."""
    newest = spec.flops(layer, one.rows, 1, attended / one.rows) if one.rows else 0.0
    return newest + sum(
        count * spec.flops(layer, part.rows, part.length_computed, part.attended) for part, count in one.prompts.items()
    )


def _of_ranges(layout: KVLayout, tokens: int, of_rows: int) -> MovedPages:
    """Ranges of rows: each has a page group at least, and its further tokens fill theirs."""
    rows = min(tokens, of_rows)
    groups = rows + (tokens - rows) / layout.page_group_tokens
    return MovedPages(groups * layout.page_group_bytes, max(rows, groups / layout.page_groups_at_once))


def _with_single(layout: KVLayout, at: AtLevel, tokens: int) -> MovedPages:
    """Prompts, and the newest tokens of other rows. Each head has its own in a page group, which is read first; as if it drew
    one."""
    prompts, of_row = _of_ranges(layout, tokens - at.one.rows, at.one.joining), -(-layout.slots // layout.page_group_tokens)
    groups = 2 * at.one.rows * of_row * (1 - (1 - 1 / of_row) ** at.heads)
    return MovedPages(prompts.nbytes + groups * layout.page_group_bytes, prompts.pieces + groups)


def _kv_slots(op: Op, one: BatchPass) -> int:
    """Slots that one task moves."""
    if op.stores:
        return one.written if op.uses_disk else one.stored
    return one.read if op.uses_disk else one.loaded


def predicted_bytes(blocks: BlockPlans, stop_at: Callable[[Task], bool] | None = None) -> Counter[Op]:
    """Bytes that a run of these blocks moves, by op, if no row finishes early; `stop_at` ends the run at a task."""
    total = Counter[Op]()
    for block, count in blocks.alike:
        cost = Cost(block)
        moved = cost.op_bytes() if stop_at is None else cost.op_bytes_until(stop_at)
        total.update({op: nbytes * count for op, nbytes in moved.items()})
    return total


def by_lane(moved: Mapping[Op, int]) -> dict[str, int]:
    """Bytes of each lane that moves any."""
    sums = {lane: sum(nbytes for op, nbytes in moved.items() if op.lane == lane) for lane in LANES}
    return {lane: nbytes for lane, nbytes in sums.items() if nbytes}
