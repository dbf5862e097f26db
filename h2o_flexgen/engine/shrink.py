"""Shrink: what happens when memory runs out in a block. The rest of the workload goes on in smaller blocks. Finished rows of
this block stay finished, and its other rows start again."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from h2o_flexgen.core.workload import BlockSize
from h2o_flexgen.engine.engine import BlockRun
from h2o_flexgen.engine.executor import shortage_in
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.memory.shortage import Shortage
from h2o_flexgen.planning.block_plan import BlockPlan, BlockPlans
from h2o_flexgen.planning.workload_plan import WorkloadPlan


@dataclass(frozen=True)
class Shrink:
    """Smaller blocks, because memory ran out in one."""

    shortage: Shortage
    tried: BlockSize
    size: BlockSize  # size of the blocks to come
    num_ended: int  # blocks that have ended
    rest: BlockPlans  # all blocks to come

    def __str__(self) -> str:
        return f"memory ran out on {self.shortage.tier} in a block of {self.tried} rows: going on with {self.size}"


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
            "(percent), shorten the prompts, or give more memory"
        ) from error
