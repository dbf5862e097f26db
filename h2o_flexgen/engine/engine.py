"""The engine: the one place where planning and execution meet. It gives every op of a plan's schedule its action, and runs the
blocks of a workload one after the other.
"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.checkpoint import WeightSource
from h2o_flexgen.core.buffer_layout import prompt_form
from h2o_flexgen.core.workload import Batch, Block
from h2o_flexgen.engine.begun_layers import Begun, BegunLayers, as_they_are
from h2o_flexgen.engine.drafts import NONE_DRAFTED, Drafted, Drafts
from h2o_flexgen.engine.executor import Action, Executor, Past, shortage_in
from h2o_flexgen.engine.graphs import Afterwards, GraphPlace, LayerWork, Likeness, StepGraphs
from h2o_flexgen.engine.head import AtHead, OfHead
from h2o_flexgen.engine.masks import MaskMaker
from h2o_flexgen.engine.reports import OnPass, Pass
from h2o_flexgen.engine.row_adapters import LowRankStore, RowAdapters
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.rows import BatchRows, PartsThere, RowsPart
from h2o_flexgen.engine.seated_rows import SeatedRows, Waiting
from h2o_flexgen.engine.stores.hidden import HiddenStore
from h2o_flexgen.engine.stores.host_attention_exchange import AskedStore
from h2o_flexgen.engine.stores.layer_judges import judges_of
from h2o_flexgen.engine.stores.prefix_files import PrefixFiles
from h2o_flexgen.engine.stores.prefix_store import PrefixStore
from h2o_flexgen.engine.stores.row_stores import NO_STATES, KVLevels, OpenStates, RowStores, StateStore
from h2o_flexgen.engine.stores.states_of_visits import (
    EchoedStates,
    Replays,
    States,
    StatesInPassing,
    StatesOfSteps,
    begin_behind,
)
from h2o_flexgen.engine.stores.weights import WeightStore
from h2o_flexgen.kernels.recording import enter, kept
from h2o_flexgen.kv.layer_cache import LayerCache, OnlyChosen
from h2o_flexgen.memory.host import HostGuard, Shortage, give_back_freed
from h2o_flexgen.memory.memories import Memories
from h2o_flexgen.memory.threads import TakingTurns, refuse_forked
from h2o_flexgen.models import base
from h2o_flexgen.models.new_tokens import Attend, RowStates
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.placement import device_of_layers, layers_of, only_layers, place_weights
from h2o_flexgen.planning.plan import OFF, Plan
from h2o_flexgen.planning.working_space import positions_at_once
from h2o_flexgen.schedule.ops import Lanes, Op, Task, Visit, longest_by_kind, sum_by_kind
from h2o_flexgen.schedule.schedule import Schedule
from h2o_flexgen.schedule.trace import Trace

Thing = TypeVar("Thing")
Moved = TypeVar("Moved")  # what an action returns
OnVisit = Callable[[Task, int], None]  # a COMPUTE is over; tokens picked so far in its block
Until = Callable[[Task], bool]
AttendOf = Callable[[RowsPart], "Attend | None"]
WHOLE = slice(None)
PROMPTS_WORTH_IT = 1024  # tokens: the working memory of fewer is not worth a walk through the allocator's free memory


def _nothing_to_keep() -> None: ...


class Kept(NamedTuple):
    """What a layer is handed of the rows that it computes: their KV, by the function that attends it, and their states."""

    attend: Attend | None
    states: RowStates = base.NO_STATES
    keep: Callable[[], None] = _nothing_to_keep  # called behind all tokens of a part
    begun: Begun = as_they_are  # its weights, with what was made by them before


class KeptOfRows(NamedTuple):
    """The same of a batch, part by part."""

    attend_of: AttendOf
    states_of: Callable[[RowsPart], tuple[RowStates, Callable[[], None]]]  # and what is called behind all tokens of the part
    begun_of: Callable[[RowsPart], Begun]

    def part(self, part: RowsPart) -> Kept:
        """What a part is handed, once: its states begin then."""
        return Kept(self.attend_of(part), *self.states_of(part), self.begun_of(part))


@dataclass(frozen=True)
class BlockRun:
    """What happened in one block."""

    planned: BlockPlan
    trace: Trace
    prefill_seconds: float
    step_seconds: tuple[float, ...]  # seconds of each decode step
    tokens: int  # tokens generated or scored
    moved_bytes: Mapping[str, int]  # bytes per lane, of all devices
    skipped_bytes: Mapping[str, int]  # what was not moved: experts that no row chose, tokens that were there or chosen twice
    busy_seconds: Mapping[str, float]  # per lane, of the device on which the lane was busy longest
    moved_by_op: Mapping[Op, int] = field(default_factory=dict)  # bytes per op, of all devices
    replayed: int = 0  # COMPUTEs that were replayed as graphs
    graphs_given_up: str | None = None  # why none could be captured any more
    unrecorded: Mapping[str, str] = field(default_factory=dict)  # layers that were computed without one, and why
    drafted: Drafted = NONE_DRAFTED
    shortage: Shortage | None = None  # a lack of memory that ended it early: unfinished rows start again

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
    prompt_tokens: int = 0
    spared_tokens: int = 0  # of prompts, already computed for other rows
    computed_tokens: int = 0  # with pads
    step: int = 0  # the step that is computed
    clock: float = field(default_factory=time.perf_counter)  # when a head was last computed
    step_seconds: Counter[int] = field(default_factory=Counter)
    trace: Trace = field(default_factory=lambda: Trace(()))
    replayed: int = 0
    graphs_given_up: str | None = None
    unrecorded: Mapping[str, str] = field(default_factory=dict)
    drafted: Drafted = NONE_DRAFTED
    lane_seconds: Mapping[str, float] = field(default_factory=dict)
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    moved_by_op: Mapping[Op, int] = field(default_factory=dict)
    skipped_bytes: Mapping[str, int] = field(default_factory=dict)

    def count(self, step: int, tokens: int) -> None:
        """Counts the time since the last head for this one: whatever the order of the schedule, each step gets its own."""
        now = time.perf_counter()
        self.step_seconds[step] += now - self.clock  # type: ignore[assignment]
        self.clock = now
        self.tokens += tokens

    def take(self, ran: Executor) -> None:
        """Takes what an executor has counted."""
        self.trace = ran.trace
        self.lane_seconds = longest_by_kind(ran.lane_seconds)
        self.moved_bytes, self.moved_by_op = sum_by_kind(ran.moved_bytes), ran.moved_by_op


@dataclass(frozen=True)
class _Listening:
    """The callbacks of a block: for the last hidden states, for visits, for ending it early, and for passes."""

    at_head: AtHead
    on_visit: OnVisit | None
    stop_at: Until | None
    on_pass: OnPass | None


@dataclass
class _Progress:
    """The state that the actions of a running block share."""

    rows: list[BatchRows]
    stores: Sequence[RowStores]  # of each device
    hidden: HiddenStore
    prefixes: PrefixStore
    asked: AskedStore
    listening: _Listening
    guard: HostGuard | None
    graphs: StepGraphs | None
    measures: _Measures
    finished: list[RowState]  # rows that were not handed out yet
    seats: int
    busy_seconds: Callable[[], Mapping[str, float]]  # of each lane, so far
    begun: BegunLayers = field(default_factory=BegunLayers)
    heard: deque[Task] = field(default_factory=deque)  # COMPUTEs that are over, of all devices
    told: tuple[int, int, int, int] = (0, 0, 0, 0)  # tokens of passes reported so far: prompts, spared, generated, computed
    told_of_drafts: Drafted = NONE_DRAFTED

    @property
    def is_done(self) -> bool:
        return all(rows.is_done for rows in self.rows)

    def is_wanted(self, task: Task) -> bool:
        """Whether what this task stores will be needed."""
        rows = self.rows[task.batch]
        return rows.last_step is None or (rows.lives_on and task.step <= rows.last_step)

    def tell_of_visits(self) -> None:
        while self.heard:
            task = self.heard.popleft()
            if self.listening.on_visit is not None:
                self.listening.on_visit(task, self.measures.tokens)

    def at_the_head(self, rows: BatchRows, task: Task, made: OfHead) -> None:
        there, measures, prompt_tokens = list(rows.alive), self.measures, rows.prompt_tokens
        measures.prompt_tokens += prompt_tokens
        measures.spared_tokens += rows.spared_tokens
        measures.computed_tokens += rows.tokens
        try:
            tokens = self.listening.at_head(rows, self.hidden.take(task.batch), made, task.step)
        finally:
            self.finished += [row for row in there if row.finished]
        measures.count(task.step, tokens)
        if prompt_tokens:
            give_back_freed()  # prompts need much more working memory than steps; what they freed would stay allocated
        if self.listening.on_pass is not None and all(later.is_done for later in self.rows[task.batch + 1 :]):
            self._tell_of_pass(self.listening.on_pass, task.step)

    def _tell_of_pass(self, on_pass: OnPass, step: int) -> None:
        prompt, spared, generated, computed = self.told
        now = self.measures
        self.told = now.prompt_tokens, now.spared_tokens, now.tokens, now.computed_tokens
        drafted, before = Drafted.total(rows.drafted for rows in self.rows), self.told_of_drafts
        self.told_of_drafts = drafted
        on_pass(
            Pass(
                seats=self.seats,
                alive=sum(len(rows.alive) for rows in self.rows),
                prompt_tokens=now.prompt_tokens - prompt,
                spared_tokens=now.spared_tokens - spared,
                generated_tokens=now.tokens - generated,
                computed_tokens=now.computed_tokens - computed,
                seconds=now.step_seconds[step],
                busy_seconds=self.busy_seconds(),
                drafted=drafted.behind(before),
            )
        )


def _taken(things: list[Thing]) -> list[Thing]:
    """What has come since the last call."""
    taken = things[:]
    things.clear()
    return taken


class Engine:
    def __init__(
        self,
        model: base.Model,
        source: WeightSource,
        plan: Plan,
        memories: Memories,
        times_all: bool = True,
        prefix_files: PrefixFiles | None = None,
        adapters: RowAdapters | None = None,
    ) -> None:
        """`times_all`: traces have every task, also where times cost calls to the device's driver. `prefix_files`: where
        prefixes that rows share outlive the process. `adapters`: those that rows may have."""
        self._times_all = times_all
        self._prefix_files = prefix_files
        self._model = model
        self._spec = model.spec
        self._plan = plan
        self._memories = memories
        self._process = os.getpid()
        self._turns = TakingTurns(self._spec.name)  # all blocks have the same buffers
        tiers, device_of = place_weights(self._spec, plan), device_of_layers(self._spec, plan.pipeline)
        self._device_of = Lanes(device_of).device
        self._parts_of_devices = [PartsThere(own.device) for own in memories.of_devices]
        sections = (only_layers(self._spec, layers_of(device_of, device)) for device in range(plan.pipeline))
        specs = [self._spec] if plan.pipeline == 1 else list(sections)
        self._weights = [WeightStore(spec, tiers, source, own) for spec, own in zip(specs, memories.of_devices, strict=True)]
        own_adapters = RowAdapters() if adapters is None else adapters
        self._low_rank = [LowRankStore(own_adapters, spec, own) for spec, own in zip(specs, memories.of_devices)]
        judges = [judges_of(self._spec, spec, plan, own) for spec, own in zip(specs, memories.of_devices)]
        self._judges = {layer: judge for of_device in judges for layer, judge in of_device.items()}
        self._lasting: PrefixStore | None = None  # of a block that is over, for the next one
        self._known_to_read_back: dict[tuple[int, torch.Size, int], bool] = {}  # by layer, hidden states and buffer

    def load_adapters(self) -> None:
        """Loads the adapters of rows that are not loaded yet."""
        with torch.inference_mode():
            for own in self._low_rank:
                own.load()

    def trim(self) -> None:
        """Frees buffers that the blocks of an earlier workload left for reuse: the next ones may have other sizes."""
        self._memories.host.trim()

    def restart_peaks(self) -> None:
        self._memories.disk.meter.restart_peak()
        for own in self._memories.of_devices:
            own.device.restart_peak()

    def hand_round(self, give: Callable[[Tensor], None]) -> None:
        """Gives the weights that stay on the device to the processes that share those in host memory."""
        for weights in self._weights:
            weights.hand_round(give)

    @property
    def weight_files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(file for weights in self._weights for file in weights.files))

    @property
    def is_forked(self) -> bool:
        """Whether this is a fork's copy of an engine: its memory then belongs to the parent."""
        return self._process != os.getpid()

    def open_stores(self, planned: BlockPlan) -> RowStores:
        """Stores for what the block's rows keep; the caller closes them. Those of a conversation are handed to `run` again."""
        self._forget_prefixes()
        return self._stores_on(planned, self._memories)

    def _stores_on(self, planned: BlockPlan, memories: Memories) -> RowStores:
        with torch.inference_mode():
            return RowStores.on(planned, memories, self._judges)

    def run(
        self,
        planned: BlockPlan,
        rows: Sequence[RowState],
        at_head: AtHead,
        on_visit: OnVisit | None = None,
        stop_at: Until | None = None,
        stores: RowStores | None = None,
        may_run_out: bool = False,
    ) -> BlockRun:
        """Runs one block to its end, as `running` does."""
        running = self.running(planned, rows, at_head, on_visit, stop_at, stores, may_run_out)
        while True:
            try:
                next(running)
            except StopIteration as ended:
                run: BlockRun = ended.value
                return run

    def running(
        self,
        planned: BlockPlan,
        rows: Sequence[RowState] | Waiting,
        at_head: AtHead,
        on_visit: OnVisit | None = None,
        stop_at: Until | None = None,
        stores: RowStores | None = None,
        may_run_out: bool = False,
        on_pass: OnPass | None = None,
    ) -> Generator[RowState, None, BlockRun]:
        """Runs one block, and hands out rows as they finish. `rows` are all rows of the workload, in input order, or those that
        wait for a seat. `stop_at` ends the run early at a task. `on_pass` is called after a pass, when its rows were handed
        out, and may raise. `stores` hold what an earlier block has left. Rows that had finished before an error are handed out
        before it is raised. Running out of memory is an error, unless it `may_run_out`: then the block ends, its memory is
        freed, and the run reports the `shortage`."""
        refuse_forked(self._process, f"the engine of {self._spec.name}")
        measures, finished, passes, shortage = _Measures(), list[RowState](), list[Pass](), None
        listening = _Listening(at_head, on_visit, stop_at, None if on_pass is None else passes.append)

        def hand_out() -> Iterator[RowState]:
            yield from _taken(finished)
            for one in _taken(passes):
                assert on_pass is not None, "otherwise there are none"
                on_pass(one)

        def pauses() -> bool:
            return bool(finished or passes)

        try:
            block = self._block(planned, rows, listening, measures, finished, pauses, stores, may_run_out)
            with self._turns.taken(), closing(block):
                for _ in block:
                    yield from hand_out()
        except Exception as error:
            shortage = shortage_in(error) if may_run_out else None
            if shortage is None:
                yield from _taken(finished)
                raise
            measures.count(measures.step, 0)
        if shortage is not None:
            self._give_back()  # not earlier: the error's traceback kept the block's memory alive
        yield from hand_out()
        return _summary(planned, measures, shortage)

    def _block(
        self,
        planned: BlockPlan,
        rows: Sequence[RowState] | Waiting,
        listening: _Listening,
        measures: _Measures,
        finished: list[RowState],
        pauses: Callable[[], bool],
        stores: RowStores | None,
        may_run_out: bool,
    ) -> Generator[None, None, None]:
        """Runs the block in a generator of its own: all that the block holds is freed when the generator ends. It pauses when
        there is something to hand out."""
        block, schedule = planned.block, planned.schedule
        for weights in self._weights:
            weights.prepare(schedule)
        guard = HostGuard(self._memories.host.spare_bytes) if may_run_out else None
        with ExitStack() as opened:
            with torch.inference_mode():
                prefixes = opened.enter_context(self._prefixes(planned, rows if isinstance(rows, Waiting) else None))
                hidden = opened.enter_context(closing(HiddenStore(self._spec, block, schedule, self._memories)))
                asked = opened.enter_context(
                    closing(AskedStore(self._spec, bool(self._judges), block, schedule, self._memories))
                )
                masks = opened.enter_context(MaskMaker(self._spec.vocab, self._memories.of_devices[-1].device.handover))
                alive = [self._rows_of(place, planned, rows, prefixes, masks) for place in range(len(block.batches))]
                if stores is None:
                    each = zip(planned.sections, self._memories.of_devices, strict=True)
                    own = [opened.enter_context(closing(self._stores_on(section, there))) for section, there in each]
                else:
                    own = [stores]
                    stores.prepare(planned)
            measures.clock = time.perf_counter()
            state = _Progress(
                alive,
                own,
                hidden,
                prefixes,
                asked,
                listening,
                guard,
                StepGraphs.of(self._plan, self._memories.device, self._rests(schedule), prefixes.places),
                measures,
                finished,
                block.num_rows,
                lambda: longest_by_kind(executor.busy_seconds),
            )
            devices, lanes = [own.device for own in self._memories.of_devices], schedule.traffic.lanes
            actions, is_past = self._actions(schedule, state), _never if state.graphs is None else state.graphs.is_past
            executor = Executor(actions, devices, schedule.ahead, self._times_all, lanes, is_past)
            try:
                yield from executor.steps(self._tasks(schedule, state), pauses)
            finally:
                measures.take(executor)
                self._count_graphs(state.graphs, measures)
                measures.drafted = Drafted.total(batch.drafted for batch in alive)
                skipped = (*(weights.skipped_bytes for weights in self._weights), *(each.kv.skipped_bytes for each in own))
                measures.skipped_bytes = sum(skipped, Counter())
                actions.clear()  # they know `state`, which knows the executor: a circle would keep weights for long

    def _count_graphs(self, graphs: StepGraphs | None, measures: _Measures) -> None:
        if graphs is not None:
            measures.replayed, measures.graphs_given_up = graphs.replayed, graphs.given_up
            measures.unrecorded = graphs.unrecorded([layer.name.title for layer in self._spec.layers])

    @contextmanager
    def _prefixes(self, planned: BlockPlan, waiting: Waiting | None) -> Iterator[PrefixStore]:
        """The store of prefixes that rows of a block share. Where prefixes last, they are kept for the next block, unless this
        block fails or another workload comes between."""
        last = waiting is not None and waiting.keeps_prefixes
        store, self._lasting = self._lasting, None
        if store is not None and not (last and store.serves(planned)):
            store.close()
            store = None
        if store is None:
            asks = waiting is not None and waiting.asks_of_prompts
            store = PrefixStore(planned, self._memories, self._judges, self._prefix_files, asks)
        try:
            yield store
        except BaseException:
            store.abandon()
            raise
        if last:
            self._lasting = store
        else:
            store.close()

    def _forget_prefixes(self) -> None:
        if self._lasting is not None:
            self._lasting.close()
            self._lasting = None

    def _give_back(self) -> None:
        gc.collect()
        self._memories.host.trim()
        for own in self._memories.of_devices:
            own.device.give_back_freed()
        give_back_freed()

    def _rows_of(
        self, place: int, planned: BlockPlan, rows: Sequence[RowState] | Waiting, prefixes: PrefixStore, masks: MaskMaker
    ) -> BatchRows:
        block, device = planned.block, self._memories.of_devices[-1].device  # which picks the tokens
        batch, policies = block.batches[place], [level.policy for level in planned.levels]
        there = self._plan, policies, block.gen_len, device.torch_device, device.upload, device.read_back, masks
        spares = planned.schedule.traffic.spares_passes(place)
        room = self._room_of_pass(batch, planned.schedule.traffic.moves_hidden(place))
        drafts = Drafts(room - batch.size, self._plan.graphs != OFF, spares) if planned.guesses(place) else None
        if isinstance(rows, Waiting):
            return SeatedRows(place, batch, rows, prefixes, *there, drafts, spares, planned.tried_at_once)
        together = min(room // batch.size, planned.tried_at_once or room)
        most_ahead = 0 if drafts is None else max(0, together - 1)
        own = [rows[row] for row in batch.rows]
        return BatchRows(batch, own, *there, drafts, most_ahead, spares and drafts is not None)

    def _room_of_pass(self, batch: Batch, moves_hidden: bool) -> int:
        """The tokens of a batch for which a pass has room, and the head: as many as there is room for where prompts are read,
        and fewer where states of steps are wider than those of prompts. A turn of a conversation may be shorter than what there
        is room for."""
        longest = batch.prompt_len if batch.context is None or moves_hidden else batch.context
        read = min(batch.size * longest, self._plan.prefill_tokens)
        read = read * prompt_form(self._spec, batch).widest // self._spec.widest
        return min(read, positions_at_once(self._plan, self._spec.vocab))

    def _tasks(self, schedule: Schedule, state: _Progress) -> Iterator[Task]:
        """The tasks of the schedule, until no row is left."""
        stop_at = state.listening.stop_at
        for task in schedule.tasks():
            if state.is_done or (stop_at is not None and stop_at(task)):
                return
            yield task

    # -- actions -------------------------------------------------------------------------------------------------------

    def _actions(self, schedule: Schedule, state: _Progress) -> dict[Op, Action]:
        def for_the_living(action: Callable[[Task], int]) -> Callable[[Task], int]:
            return lambda task: 0 if state.rows[task.batch].is_done else action(task)

        def while_wanted(action: Action) -> Action:
            return lambda task: action(task) if state.is_wanted(task) else 0

        def for_its_users(action: Callable[[Task], int]) -> Callable[[Task], int]:
            """Skips the action if no row needs its data any more. Weights cut in slices serve all batches."""
            return lambda task: 0 if state.is_done or is_for_no_row(task) else action(task)

        def is_for_no_row(task: Task) -> bool:
            users = (rows for batch, rows in enumerate(state.rows) if schedule.weight_batch(batch) == task.batch)
            return not schedule.cuts_layers and all(rows.is_done for rows in users)

        lanes = schedule.traffic.lanes

        def on_own(action_of: Callable[[int], Callable[[Task], Moved]]) -> Callable[[Task], Moved]:
            """Wraps the actions of all devices: each task runs that of its own device."""
            return lambda task: action_of(lanes.device(task.layer))(task)

        def past_of(task: Task) -> Past | None:
            return None if state.graphs is None else state.graphs.past(task)

        def compute(task: Task) -> int | Past:
            past, visit = past_of(task), task.visit
            if past is not None or not state.rows[task.batch].is_done:
                state.measures.step = task.step
                if past is None:
                    if state.guard is not None:
                        state.guard.look()
                    self._compute(task, state)
                    past = past_of(task)
                state.heard.append(task)
                if lanes.of(task) == lanes.of_head:  # listeners are called in the caller's thread
                    state.tell_of_visits()
            self._weights_for(visit).wanted.computed(visit)
            return past or 0

        return {
            Op.READ_W: for_its_users(on_own(lambda at: self._weights[at].read)),
            Op.LOAD_W: for_its_users(on_own(lambda at: self._weights[at].load)),
            Op.CHOOSE: for_the_living(lambda task: self._choose(task, state)),
            Op.READ_KV: for_the_living(on_own(lambda at: state.stores[at].kv.read)),
            Op.LOAD_KV: for_the_living(on_own(lambda at: state.stores[at].kv.load)),
            Op.READ_S: for_the_living(on_own(lambda at: state.stores[at].states.read)),
            Op.LOAD_S: for_the_living(on_own(lambda at: state.stores[at].states.load)),
            Op.LOAD_H: for_the_living(state.hidden.load),
            Op.COMPUTE: compute,
            Op.ATTEND: for_the_living(lambda task: self._attend(task, state)),
            Op.PASS_H: for_the_living(state.hidden.pass_on),
            Op.STORE_H: for_the_living(state.hidden.store),
            Op.STORE_KV: while_wanted(on_own(lambda at: state.stores[at].kv.store)),
            Op.WRITE_KV: while_wanted(on_own(lambda at: state.stores[at].kv.write)),
            Op.STORE_S: while_wanted(on_own(lambda at: state.stores[at].states.store)),
            Op.WRITE_S: while_wanted(on_own(lambda at: state.stores[at].states.write)),
        }

    def _compute(self, task: Task, state: _Progress) -> None:
        """Computes one layer on one batch."""
        rows, visit = state.rows[task.batch], task.visit
        kv, weights = self._kv_for(visit, state), self._weights_for(visit)
        kv.take_back(task, rows)
        layer = weights.layer(visit)
        if layer.makes_logits:
            state.at_the_head(rows, task, self._of_head(visit))
            return
        hidden = None if layer.takes_tokens else state.hidden.take(task.batch)
        if hidden is not None and self._is_asking(Visit(task.step, task.layer - 1, task.batch), rows.parts[0], state):
            _, states = next(iter(rows.split(hidden)))
            state.asked.fill_in(task.batch, states)
        cache = kv.open(task, rows) if layer.has_kv else None
        if cache is not None:
            cache.share(state.prefixes.caches(task.layer, rows.prefixes))
        opened = self._states_for(visit, state).open(task, rows) if layer.states else NO_STATES
        tries = bool(self._spec.state_layers) and (rows.follows_trial or bool(rows.parts[0].ahead))  # no graph does it
        may_be_graph = state.graphs is not None and not kv.chooses(visit) and not tries and state.graphs.take(rows)
        if state.graphs is not None and may_be_graph and not self._reads_back(visit, hidden):
            stores = weights, kv, self._states_for(visit, state)
            place = GraphPlace(visit.layer, *(store.buffer(visit) for store in stores))
            state.hidden.put(task, state.graphs.compute(place, visit, rows, hidden, self._captured(visit, cache, opened)))
            return
        room, may_overwrite = partial(state.hidden.room, task, hidden), state.hidden.may_be_overwritten(task.batch)
        attend_of, states_of = partial(self._attend_of, visit, cache, state), partial(_states_of, visit, opened, state.prefixes)
        of_rows = KeptOfRows(attend_of, states_of, state.begun.again)
        state.hidden.put(task, self._layer(visit, rows, hidden, of_rows, may_overwrite, room))
        if rows.prompt_tokens >= PROMPTS_WORTH_IT and self._widens_behind(task.layer):
            give_back_freed()  # this layer's working memory: the next layer needs memory for wider states

    def _reads_back(self, visit: Visit, hidden: Tensor | None) -> bool:
        """Whether an accelerator has to tell the processor something while it computes this layer. It is asked once for each
        number of rows."""
        layer = self._spec.layers[visit.layer]
        if hidden is None or not self._memories.device.accelerator:
            return False
        key = visit.layer, hidden.shape, self._weights_for(visit).buffer(visit)
        if key not in self._known_to_read_back:
            views = self._weights_for(visit).views(visit)
            self._known_to_read_back[key] = base.reads_back(self._model, layer, hidden, views)
        return self._known_to_read_back[key]

    def _choose(self, task: Task, state: _Progress) -> int:
        """Computes a layer up to its attention, and notes which slots the decode step of a batch will attend."""
        rows, visit = state.rows[task.batch], task.visit
        takes_tokens = self._weights_for(visit).layer(visit).takes_tokens
        hidden = None if takes_tokens else state.hidden.take(task.batch)
        part, states = (rows.parts[0], None) if hidden is None else next(rows.split(hidden))
        cache = self._kv_for(visit, state).open(task, rows)
        if part.now.is_prefill:  # no row has a decode step
            return 0
        cache.share(state.prefixes.caches(task.layer, rows.prefixes))
        own = cache if len(rows.parts) == 1 else _cache_of(part, cache)
        with suppress(OnlyChosen):
            self._computed(visit, part, states, Kept(partial(own.choose, part.levels), begun=state.begun.first(part)))
        return 0

    def _of_head(self, visit: Visit) -> OfHead:
        layer, weights = self._spec.layers[visit.layer], self._weights_for(visit)
        return OfHead(
            lambda hidden: base.logits(self._model, layer, hidden, weights.for_logits(visit, hidden)),
            lambda hidden: self._model.last_states(hidden, weights.views(visit)),
        )

    def _rests(self, schedule: Schedule) -> Callable[[int, int], bool]:
        """Whether nothing moves for a layer and a batch. The head is apart: tokens are picked there."""
        head, traffic = len(self._spec.layers) - 1, schedule.traffic
        return cache(lambda layer, batch: layer < head and traffic.rests(layer, batch))

    def _widens_behind(self, layer: int) -> bool:
        """Whether the next layer makes wider hidden states on the host."""
        this, behind = self._spec.layers[layer : layer + 2]
        return behind.out_width > this.out_width and not (behind.makes_logits or self._memories.device.accelerator)

    def _weights_for(self, visit: Visit) -> WeightStore:
        return self._weights[self._device_of(visit.layer)]

    def _kv_for(self, visit: Visit, state: _Progress) -> KVLevels:
        return state.stores[self._device_of(visit.layer)].kv

    def _states_for(self, visit: Visit, state: _Progress) -> StateStore:
        return state.stores[self._device_of(visit.layer)].states

    def _captured(self, visit: Visit, cache: LayerCache | None, states: OpenStates) -> LayerWork:
        """Computes a layer in a way that may be captured: it does not depend on what was done before."""
        weights = self._weights_for(visit)

        def compute(part: RowsPart, hidden: Tensor | None, afterwards: list[Afterwards]) -> Tensor:
            def chosen(experts: Tensor) -> None:
                if weights.wanted.waits_for(visit.layer):
                    # of its own: it is a part of what the router hands on, which a graph would keep for it
                    lasting = experts.clone() if self._memories.device.accelerator else kept(experts)
                    afterwards.append(lambda now: weights.wanted.chose(now, lasting))

            enter(self._spec.layers[visit.layer].name.title)
            weights.forget_decoded()
            if cache is not None:
                cache.forget_replaced()
            attend = None if cache is None else _attends(cache, part)
            overwrites = self._spec.layers[visit.layer].overwrites  # the states lie where nothing else needs them
            given = Kept(attend, RowStates(states.by_name))
            made = self._computed(visit, part, hidden, given, may_overwrite=overwrites, chosen=chosen)
            if cache is not None:
                afterwards += cache.replacements(kept)
            return made

        return LayerWork(compute, partial(self._likeness, visit, cache, states))

    def _likeness(self, visit: Visit, cache: LayerCache | None, states: OpenStates) -> Likeness:
        """What a layer computes depends on its functions, on its weights, and on the keys and values that it attends, or the
        states of its rows. Where experts are fetched, their router also says what it chose; where they rest, it does not."""
        layer, weights = self._spec.layers[visit.layer], self._weights_for(visit)
        of_kv, kv = (None, ()) if cache is None else (cache.kind, cache.memory)
        of_weights, data = (weights.kind(visit), weights.wanted.waits_for(visit.layer)), weights.memory(visit)
        return Likeness((layer.functions, layer.window, of_weights, of_kv), (*data, *kv, *states.memory), layer.name.title)

    def _attend(self, task: Task, state: _Progress) -> int:
        """Attends on the host for a COMPUTE."""
        return state.asked.attend(task.batch, self._kv_for(task.visit, state).open_beside(task, state.rows[task.batch]))

    @staticmethod
    def _is_asking(visit: Visit, part: RowsPart, state: _Progress) -> bool:
        """Whether the host attends this part of a visit: the decode step, which comes first."""
        return state.stores[0].kv.is_attended_beside(visit) and not part.now.is_prefill

    def _attend_of(self, visit: Visit, cache: LayerCache | None, state: _Progress, part: RowsPart) -> Attend | None:
        """The attention function that the layer of a COMPUTE gets."""
        if cache is None:
            return None
        if self._is_asking(visit, part, state):
            return partial(state.asked.ask, visit.batch, cache, part.levels)
        is_all = len(state.rows[visit.batch].parts) == 1
        own = cache if is_all else _cache_of(part, cache)
        return _attends(own, part)

    def _layer(
        self,
        visit: Visit,
        rows: BatchRows,
        hidden: Tensor | None,
        kept_of: KeptOfRows,
        may_overwrite: bool,
        room: Callable[[int, int], Tensor | None],
    ) -> Tensor:
        """Computes all rows at once, or part by part and long prompts piece by piece, so that each reuses the working memory of
        the one before. A layer may write its outcome over its hidden states: for all tokens, or for none. `room`: where the
        outcome of parts goes, (tokens, width); None if it needs memory of its own."""
        layer = self._weights_for(visit).layer(visit)
        overwrites = may_overwrite and layer.overwrites  # the plan counts no memory for other cases
        if len(rows.parts) == len(rows.parts[0].pieces) == 1:
            only = self._there(visit, rows.parts[0])
            of_part = kept_of.part(only)
            computed = self._computed(visit, only, hidden, of_part, may_overwrite=may_overwrite)
            of_part.keep()
            assert computed is hidden or not overwrites
            return computed
        out: Tensor | None = None
        parts = ((part, None) for part in rows.parts) if hidden is None else rows.split(hidden)
        start = 0
        for one, states in parts:
            part = self._there(visit, one)
            of_part = kept_of.part(part)  # the same for all pieces
            for piece in part.pieces:
                own = None if states is None else states[:, piece]
                computed = self._computed(visit, part, own, of_part, piece, may_overwrite)
                assert computed is own or not overwrites
                if computed is own:
                    continue
                computed = computed.flatten(0, 1)
                if out is None:
                    there = room(rows.tokens, computed.shape[-1])
                    out = computed.new_empty(rows.tokens, computed.shape[-1]) if there is None else there
                out[start : start + len(computed)] = computed
                start += len(computed)
            of_part.keep()
        if out is None:
            assert hidden is not None
            return hidden
        assert start == rows.tokens, "some tokens stayed where they were, and others did not"
        return out if len(rows.parts) > 1 else out.view(*rows.parts[0].tokens.shape, -1)

    def _there(self, visit: Visit, part: RowsPart) -> RowsPart:
        """A part, on the device that computes the visit."""
        device = self._device_of(visit.layer)
        return part if device == self._plan.pipeline - 1 else self._parts_of_devices[device].of(visit.batch, part)

    def _computed(
        self,
        visit: Visit,
        part: RowsPart,
        hidden: Tensor | None,
        kept_of: Kept,
        piece: slice = WHOLE,
        may_overwrite: bool = False,
        chosen: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Computes a part, or a piece of it: `hidden` has the states of its tokens."""
        store = self._weights_for(visit)
        chosen = chosen or partial(store.wanted.chose, visit)
        positions = part.positions if piece == WHOLE else part.positions[:, piece]
        attend = kept_of.attend or base.nothing_to_attend
        given = base.Given(positions, attend, chosen, part.now.is_prefill, may_overwrite, kept_of.states)
        if hidden is None:
            x, weights = store.look_up(visit, part.tokens[:, piece])
        else:
            x, weights = hidden, store.views(visit)
        layer = store.layer(visit)
        if part.adapted is not None:
            weights = self._low_rank[self._device_of(visit.layer)].beside(layer, weights, part.adapted)
        return base.computed(self._model, layer, x, kept_of.begun(weights), given)


def _never(task: Task) -> bool:
    return False


def _states_of(visit: Visit, opened: OpenStates, prefixes: PrefixStore, part: RowsPart) -> tuple[RowStates, Callable[[], None]]:
    """The states that a part of a COMPUTE changes: those of its rows, or of the prefix that it computes. A text that begins in
    it has none, or those at the end of the prefix that it begins with."""
    if not opened.by_name:
        return base.NO_STATES, _nothing_to_keep
    at_the_end_of = partial(prefixes.states, visit.layer)
    if part.prefix is None:
        kept: States = {name: one[part.rows] for name, one in opened.by_name.items()}
        if not part.now.is_prefill:
            notes = {name: [one[part.rows] for one in each] for name, each in opened.notes.items()}
            replays = Replays.of(opened.replays[part.rows], part.tokens.device)
            return StatesOfSteps(kept, laid=part.laid, notes=notes, replays=replays), _nothing_to_keep
        assert not any(opened.replays[part.rows]), "nothing is on trial before a prompt"
        own = StatesInPassing.of(kept)
    else:
        own = StatesInPassing.of(at_the_end_of(part.prefix))
        for one in own.in_full.values():
            one.zero_()
    begin_behind(own.in_full, ((prefix.group, rows) for prefix, rows in part.now.groups), at_the_end_of)
    if part.now.echoes_within is not None:
        return EchoedStates(own.in_full, part.lengths, step=part.now), own.keep
    return RowStates(own.in_full, part.lengths), own.keep


def _attends(cache: LayerCache, part: RowsPart) -> Attend:
    return partial(cache.attend_in_turn, part.levels, part.ahead) if part.ahead else partial(cache.attend, part.levels)


def _cache_of(part: RowsPart, cache: LayerCache) -> LayerCache:
    if part.prefix is None:
        return cache.part(part.rows)
    own = cache.prefixes[part.prefix]
    own.share({source.group: cache.prefixes[source.group] for source, _ in part.now.groups})
    return own


def _summary(planned: BlockPlan, measures: _Measures, shortage: Shortage | None) -> BlockRun:
    steps = [measures.step_seconds[step] for step in sorted(measures.step_seconds)]
    return BlockRun(
        planned=planned,
        trace=measures.trace,
        prefill_seconds=sum(steps[:1]),
        step_seconds=tuple(steps[1:]),
        tokens=measures.tokens,
        moved_bytes=measures.moved_bytes,
        moved_by_op=measures.moved_by_op,
        skipped_bytes=measures.skipped_bytes,
        busy_seconds=measures.lane_seconds,
        replayed=measures.replayed,
        graphs_given_up=measures.graphs_given_up,
        unrecorded=measures.unrecorded,
        drafted=measures.drafted,
        shortage=shortage,
    )
