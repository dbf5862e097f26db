"""The engine: the one place where the halves meet. It turns a plan into a schedule, gives every op its small action, and runs
the blocks of a workload one after the other.
"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from h2o_flexgen.core.workload import Batch, Block
from h2o_flexgen.engine.executor import Executor, shortage_in
from h2o_flexgen.engine.head import AtHead
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.rows import BatchRows, Part
from h2o_flexgen.engine.stores.hidden import HiddenStore
from h2o_flexgen.engine.stores.kv import KVStore
from h2o_flexgen.engine.stores.weights import WeightStore
from h2o_flexgen.kv.cache import KVCache
from h2o_flexgen.memory.host import give_back_freed
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.memory.shortage import HostGuard, Shortage
from h2o_flexgen.memory.threads import refuse_forked
from h2o_flexgen.models import base
from h2o_flexgen.models.checkpoint import WeightSource
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.placement import place_weights
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.schedule.ops import Op
from h2o_flexgen.schedule.schedule import Schedule
from h2o_flexgen.schedule.task import Task, Visit
from h2o_flexgen.schedule.trace import Trace

OnVisit = Callable[[Task, int], None]  # a COMPUTE is over; tokens picked so far in its block
Until = Callable[[Task], bool]


@dataclass(frozen=True)
class BlockRun:
    """What happened in one block."""

    planned: BlockPlan
    trace: Trace
    prefill_seconds: float
    step_seconds: tuple[float, ...]  # seconds of each decode step
    tokens: int  # tokens generated or scored
    moved_bytes: Mapping[str, int]  # bytes per lane
    busy_seconds: Mapping[str, float]
    shortage: Shortage | None = None  # a want of memory that ended it early: unfinished rows start anew

    @property
    def block(self) -> Block:
        return self.planned.block

    def without_trace(self) -> BlockRun:
        return replace(self, trace=Trace(()))

    @property
    def decode_seconds(self) -> float:
        return sum(self.step_seconds)


@dataclass
class _Measures:
    """Figures that are counted while a block runs; they survive its failure."""

    tokens: int = 0
    step: int = 0  # the step that is computed
    clock: float = field(default_factory=time.perf_counter)  # when a head was last computed
    step_seconds: Counter[int] = field(default_factory=Counter)
    trace: Trace = field(default_factory=lambda: Trace(()))

    def count(self, step: int, tokens: int) -> None:
        """Counts the time since the last head for this one: whatever the order of the schedule, each step gets its own."""
        now = time.perf_counter()
        self.step_seconds[step] += now - self.clock  # type: ignore[assignment]
        self.clock = now
        self.tokens += tokens


@dataclass
class _Progress:
    """The state that the actions of a running block share."""

    rows: list[BatchRows]
    kv: KVStore
    hidden: HiddenStore
    at_head: AtHead
    on_visit: OnVisit | None
    guard: HostGuard | None
    measures: _Measures

    @property
    def is_done(self) -> bool:
        return all(rows.is_done for rows in self.rows)

    def is_wanted(self, task: Task) -> bool:
        """Whether anybody will need what this task stores."""
        rows = self.rows[task.batch]
        return rows.last_step is None or (rows.batch.lives_on and task.step <= rows.last_step)


class Engine:
    def __init__(self, model: base.Model, source: WeightSource, plan: Plan, memories: Memories) -> None:
        self._model = model
        self._spec = model.spec
        self._plan = plan
        self._memories = memories
        self._process = os.getpid()
        self._weights = WeightStore(self._spec, place_weights(self._spec, plan), source, memories)

    def trim(self) -> None:
        """Frees buffers that the blocks of an earlier workload left for reuse: the next ones may have other sizes."""
        self._memories.host.trim()

    def restart_peaks(self) -> None:
        self._memories.disk.meter.restart_peak()
        self._memories.device.restart_peak()

    @property
    def weight_files(self) -> tuple[Path, ...]:
        return self._weights.files

    @property
    def is_forked(self) -> bool:
        """Whether this is a fork's copy of an engine, whose memory belongs to the parent."""
        return self._process != os.getpid()

    def open_kv(self, planned: BlockPlan) -> KVStore:
        """A home for the block's KV; the caller closes it. That of texts that live on is handed to `run` again."""
        with torch.inference_mode():
            return KVStore(self._spec, self._plan.policy, planned.block, planned.schedule, self._memories)

    def run(
        self,
        planned: BlockPlan,
        rows: Sequence[RowState],
        at_head: AtHead,
        on_visit: OnVisit | None = None,
        stop_at: Until | None = None,
        kv: KVStore | None = None,
        may_run_out: bool = False,
    ) -> BlockRun:
        """Runs one block. `rows` are all rows of the workload, in input order; `stop_at` ends the run early at a task; `kv`
        holds what an earlier block has left. Want of memory is an error, unless it `may_run_out`: then it ends the block,
        everything held for it is given back, and the run reports the `shortage`."""
        refuse_forked(self._process, f"the engine of {self._spec.name}")
        block, schedule, measures, shortage = planned.block, planned.schedule, _Measures(), None

        def run() -> None:
            """Runs the block in a call of its own: everything it holds is freed when the call returns."""
            self._weights.prepare(schedule)
            guard = HostGuard(self._memories.host.spare_bytes) if may_run_out else None
            with ExitStack() as opened, torch.inference_mode():
                if kv is None:
                    own = opened.enter_context(closing(self.open_kv(planned)))
                else:
                    own = kv
                    own.prepare(block, schedule)
                hidden = opened.enter_context(closing(HiddenStore(self._spec, block, schedule, self._memories)))
                alive = [self._rows_of(batch, rows, block.gen_len) for batch in block.batches]
                measures.clock = time.perf_counter()
                state = _Progress(alive, own, hidden, at_head, on_visit, guard, measures)
                executor = Executor(self._actions(schedule, state), self._memories.device, ahead=schedule.ahead)
                try:
                    executor.run(self._tasks(schedule, state, stop_at))
                finally:
                    measures.trace = executor.trace

        try:
            run()
        except Exception as error:
            shortage = shortage_in(error) if may_run_out else None
            if shortage is None:
                raise
            measures.count(measures.step, 0)
        if shortage is not None:
            self._give_back()  # not earlier: the error's traceback held what the block did
        return _summary(planned, measures, shortage)

    def _give_back(self) -> None:
        gc.collect()
        self._memories.host.trim()
        self._memories.device.give_back_freed()
        give_back_freed()

    def _rows_of(self, batch: Batch, rows: Sequence[RowState], gen_len: int) -> BatchRows:
        alive, device = [rows[row] for row in batch.rows], self._memories.device.torch_device
        return BatchRows(batch, alive, self._plan, gen_len, device)

    def _tasks(self, schedule: Schedule, state: _Progress, stop_at: Until | None) -> Iterator[Task]:
        """The tasks of the schedule, until nobody is left to compute for."""
        for task in schedule.tasks():
            if state.is_done or (stop_at is not None and stop_at(task)):
                return
            yield task

    # -- actions -------------------------------------------------------------------------------------------------------

    def _actions(self, schedule: Schedule, state: _Progress) -> dict[Op, Callable[[Task], int]]:
        def for_the_living(action: Callable[[Task], int]) -> Callable[[Task], int]:
            return lambda task: 0 if state.rows[task.batch].is_done else action(task)

        def while_wanted(action: Callable[[Task], int]) -> Callable[[Task], int]:
            return lambda task: action(task) if state.is_wanted(task) else 0

        def for_its_users(action: Callable[[Task], int]) -> Callable[[Task], int]:
            """Skips the action if nobody needs its data any more. Weights cut in slices serve all batches."""
            return lambda task: 0 if state.is_done or is_for_nobody(task) else action(task)

        def is_for_nobody(task: Task) -> bool:
            users = (rows for batch, rows in enumerate(state.rows) if schedule.weight_batch(batch) == task.batch)
            return not schedule.cuts_layers and all(rows.is_done for rows in users)

        def compute(task: Task) -> int:
            if not state.rows[task.batch].is_done:
                state.measures.step = task.step
                if state.guard is not None:
                    state.guard.look()
                self._compute(task, state)
                if state.on_visit is not None:
                    state.on_visit(task, state.measures.tokens)
            return 0

        return {
            Op.READ_W: for_its_users(self._weights.read),
            Op.LOAD_W: for_its_users(self._weights.load),
            Op.READ_KV: for_the_living(state.kv.read),
            Op.LOAD_KV: for_the_living(state.kv.load),
            Op.LOAD_H: for_the_living(state.hidden.load),
            Op.COMPUTE: compute,
            Op.STORE_H: for_the_living(state.hidden.store),
            Op.STORE_KV: while_wanted(state.kv.store),
            Op.WRITE_KV: while_wanted(state.kv.write),
        }

    def _compute(self, task: Task, state: _Progress) -> None:
        """Computes one layer on one batch."""
        rows, layer = state.rows[task.batch], self._spec.layers[task.layer]
        if layer.makes_logits:

            def logits_of(hidden: Tensor) -> Tensor:
                return base.logits(self._model, layer, hidden, self._weights.logit_parts(task.visit))

            state.measures.count(task.step, state.at_head(rows, state.hidden.take(task.batch), logits_of, task.step))
            if task.step == 0:
                give_back_freed()  # prompts work in much more room than steps do; what they freed would stay
            return
        hidden = None if layer.takes_tokens else state.hidden.take(task.batch)
        cache = state.kv.open(task, rows) if layer.has_kv else None
        state.hidden.put(task, self._layer(task.visit, rows, hidden, cache))

    def _layer(self, visit: Visit, rows: BatchRows, hidden: Tensor | None, cache: KVCache | None) -> Tensor:
        """Computes all rows at once, or part by part: what a part allocates in passing is free for the next."""
        if len(rows.parts) == 1:
            return self._computed(visit, rows.parts[0], hidden, cache)
        out: Tensor | None = None
        for part in rows.parts:
            place = part.rows, slice(part.tokens.shape[1])
            own = None if cache is None else cache.part(part.rows)
            computed = self._computed(visit, part, None if hidden is None else hidden[place], own)
            out = computed.new_empty(rows.batch.size, rows.batch.prompt_len, computed.shape[-1]) if out is None else out
            out[place] = computed  # the rest are pads, which nobody reads
        assert out is not None
        return out

    def _computed(self, visit: Visit, part: Part, hidden: Tensor | None, cache: KVCache | None) -> Tensor:
        positions = part.now.positions
        given = base.Given(positions) if cache is None else base.Given(positions, partial(cache.attend, part.now))
        if hidden is None:
            x, weights = self._weights.look_up(visit, part.tokens)
        else:
            x, weights = hidden, self._weights.views(visit)
        return base.computed(self._model, self._spec.layers[visit.layer], x, weights, given)


def _summary(planned: BlockPlan, measures: _Measures, shortage: Shortage | None) -> BlockRun:
    steps, trace = [measures.step_seconds[step] for step in sorted(measures.step_seconds)], measures.trace
    return BlockRun(
        planned=planned,
        trace=trace,
        prefill_seconds=sum(steps[:1]),
        step_seconds=tuple(steps[1:]),
        tokens=measures.tokens,
        moved_bytes={lane: trace.moved_bytes(lane) for lane in trace.lanes},
        busy_seconds={lane: trace.busy_seconds(lane) for lane in trace.lanes},
        shortage=shortage,
    )
