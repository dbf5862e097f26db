"""Runs that go on after a failure: in smaller blocks where memory has run out, and without a request that broke."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from h2o_flexgen.core.site import TIER_NAMES
from h2o_flexgen.core.workload import BlockSize
from h2o_flexgen.engine.engine import BlockRun
from h2o_flexgen.engine.executor import TaskFailed, shortage_in
from h2o_flexgen.engine.job import BrokenRequest, DivisibleJob, Outcome
from h2o_flexgen.engine.reports import NO_TICK, OnTick, Tick
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.memory.host import Shortage
from h2o_flexgen.planning.block_plan import BlockPlan, BlockPlans
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.sampler import NoTokenLeft


@dataclass(frozen=True)
class Shrink:
    """Smaller blocks, because memory ran out in one."""

    shortage: Shortage
    tried: BlockSize
    size: BlockSize  # size of the blocks to come
    num_ended: int  # blocks that have ended
    rest: BlockPlans  # all blocks to come

    def __str__(self) -> str:
        return f"{TIER_NAMES[self.shortage.tier]} memory ran out in a block of {self.tried} rows: going on with {self.size}"


OnShrink = Callable[[Shrink], None]
RunBlock = Callable[[BlockPlan, bool], Generator[RowState, None, BlockRun]]  # the flag says whether memory may run out


class Unfinished(Protocol):
    """The rows of a workload that have not ended."""

    def left(self, blocks: Iterable[BlockPlan]) -> Sequence[int]:
        """The rows of these blocks that start again."""


@dataclass(frozen=True)
class RowsOfBlocks:
    """Rows that stay in their blocks."""

    rows: Sequence[RowState]

    def left(self, blocks: Iterable[BlockPlan]) -> Sequence[int]:
        left = [row for each in blocks for row in each.block.rows if not self.rows[row].finished]
        for row in left:
            self.rows[row].start_anew()
        return left


def run_blocks(
    planned: WorkloadPlan, rows: Unfinished, run: RunBlock, on_shrink: OnShrink, on_end: Callable[[BlockRun], None]
) -> Iterator[RowState]:
    """Runs one block after the other and hands out rows as they finish. `on_end` gets every run, those in which memory ran out
    too."""
    waiting, num_ended = iter(planned.blocks), 0
    while (block := next(waiting, None)) is not None:
        smaller = BlockSize.of(block.block).smaller
        ran = yield from (_smallest(block, run) if smaller is None else run(block, True))
        if ran.shortage is None or smaller is None:
            on_end(ran)
            num_ended += 1
            continue
        left = rows.left((block, *waiting))
        on_end(ran if left else replace(ran, shortage=None))  # if all rows are finished, the shortage has no effect
        if left:
            rest = planned.blocks_of(left, smaller)
            waiting = iter(rest)
            on_shrink(Shrink(ran.shortage, BlockSize.of(block.block), smaller, num_ended, rest))


def _smallest(block: BlockPlan, run: RunBlock) -> Generator[RowState, None, BlockRun]:
    try:
        return (yield from run(block, False))
    except Exception as error:
        shortage = shortage_in(error)
        if shortage is None:
            raise
        raise MemoryError(
            f"{shortage.reason}; a block of one row is the smallest: keep less KV (kv_policy, kv_codec), put more on disk "
            "(with percent), shorten the prompts, or give more memory"
        ) from error


Generate: TypeAlias = "Callable[..., Generator[Completion, None, None]]"  # takes a job, and on_tick


@dataclass
class RestartedRun:
    """Runs a job to its end, whatever becomes of single requests: one that breaks is written off, and those that have not
    ended are run again from their prompts."""

    generate: Generate
    left: DivisibleJob
    on_tick: OnTick | None = None  # gets counts from the beginning of the first run
    _ended: array[int] = field(default_factory=lambda: array("q"))  # numbers of requests
    _before: Tick = NO_TICK  # the last of the runs that broke
    _latest: Tick = NO_TICK

    def outcomes(self) -> Generator[Outcome, None, None]:
        """What becomes of each request, as they end."""
        while len(self.left.sizes):
            broken = yield from self._until_one_breaks()
            if broken is None:
                return
            self._ended.append(broken.index)
            yield broken
            self.left = self.left.without(set(self._ended))
            self._before = self._latest

    def _until_one_breaks(self) -> Generator[Completion, None, BrokenRequest | None]:
        try:
            with closing(self.generate(self.left, on_tick=self._count)) as completions:
                for done in completions:
                    self._ended.append(done.index)
                    yield done
        except TaskFailed as failed:
            if isinstance(failed.cause, NoTokenLeft):
                return BrokenRequest(failed.cause.number, str(failed.cause))
            raise
        return None

    def _count(self, tick: Tick) -> None:
        self._latest = tick.behind(self._before)
        if self.on_tick is not None:
            self.on_tick(self._latest)
