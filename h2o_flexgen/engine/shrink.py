"""Shrink: what happens when memory runs out in a block. The rest of the workload goes on in smaller blocks; rows of this block
that are finished stay so, and the others start anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from h2o_flexgen.core.workload import Block, BlockSize, Workload
from h2o_flexgen.engine.engine import BlockRun
from h2o_flexgen.engine.executor import shortage_in
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.memory.shortage import Shortage


@dataclass(frozen=True)
class Shrink:
    """Memory ran out in a block."""

    shortage: Shortage
    tried: BlockSize
    size: BlockSize  # of the blocks to come
    num_ended: int  # blocks that have ended
    rest: tuple[Block, ...]  # all blocks to come

    def __str__(self) -> str:
        return f"memory ran out on {self.shortage.tier} in a block of {self.tried} rows: going on with {self.size}"


OnShrink = Callable[[Shrink], None]
RunBlock = Callable[[Block, bool], BlockRun]  # the flag says whether memory may run out


def run_blocks(
    workload: Workload, size: BlockSize, rows: Sequence[RowState], run: RunBlock, on_shrink: OnShrink
) -> Iterator[BlockRun]:
    """Runs one block after the other and yields every run, those in which memory ran out too."""
    waiting, num_ended = workload.blocks(*size), 0
    while waiting:
        block, *later = waiting
        smaller = BlockSize.of(block).smaller
        ran = _smallest(block, run) if smaller is None else run(block, True)
        if ran.shortage is None or smaller is None:
            yield ran
            waiting, num_ended = tuple(later), num_ended + 1
            continue
        left = [row for each in waiting for batch in each.batches for row in batch.rows if not rows[row].finished]
        yield ran if left else replace(ran, shortage=None)  # all rows are finished, so nobody suffers from it
        for row in left:
            rows[row].start_anew()
        waiting = workload.blocks(*smaller, left)
        if waiting:
            on_shrink(Shrink(ran.shortage, BlockSize.of(block), smaller, num_ended, waiting))


def _smallest(block: Block, run: RunBlock) -> BlockRun:
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
