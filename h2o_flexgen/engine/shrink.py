"""Shrink: what is done when memory runs out in a block. The rest of the workload goes on in smaller ones: rows that are
finished stay so, the others of that block start anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from h2o_flexgen.core.workload import BlockSize
from h2o_flexgen.engine.engine import BlockRun
from h2o_flexgen.engine.executor import shortage_in
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.memory.shortage import Shortage
from h2o_flexgen.planning.block_plan import BlockPlan, BlockPlans
from h2o_flexgen.planning.footprint import WorkloadPlan


@dataclass(frozen=True)
class Shrink:
    """Memory ran out in a block."""

    shortage: Shortage
    tried: BlockSize
    size: BlockSize  # of the blocks that come now
    num_ended: int  # blocks before it that have ended
    rest: BlockPlans  # all that come now

    def __str__(self) -> str:
        return f"memory ran out on {self.shortage.tier} in a block of {self.tried} rows: going on with {self.size}"


OnShrink = Callable[[Shrink], None]
RunBlock = Callable[[BlockPlan, bool], BlockRun]  # whether memory may run out in it


def run_blocks(planned: WorkloadPlan, rows: Sequence[RowState], run: RunBlock, on_shrink: OnShrink) -> Iterator[BlockRun]:
    """One block after the other. Every run is told, those in which memory ran out too."""
    waiting, num_ended = iter(planned.blocks), 0
    while (block := next(waiting, None)) is not None:
        smaller = BlockSize.of(block.block).smaller
        ran = _smallest(block, run) if smaller is None else run(block, True)
        if ran.shortage is None or smaller is None:
            yield ran
            num_ended += 1
            continue
        left = [row for each in (block, *waiting) for row in each.block.rows if not rows[row].finished]
        yield ran if left else replace(ran, shortage=None)  # nobody is left to suffer from it
        for row in left:
            rows[row].start_anew()
        if left:
            rest = planned.blocks_of(left, smaller)
            waiting = iter(rest)
            on_shrink(Shrink(ran.shortage, BlockSize.of(block.block), smaller, num_ended, rest))


def _smallest(block: BlockPlan, run: RunBlock) -> BlockRun:
    try:
        return run(block, False)
    except Exception as error:
        shortage = shortage_in(error)
        if shortage is None:
            raise
        raise MemoryError(
            f"{shortage.reason}; a block of one row is the smallest: keep less KV (kv_policy, kv_codec), put more on disk "
            "(percent), shorten the prompts, or give more memory"
        ) from error
