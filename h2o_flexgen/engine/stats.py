"""Stats: what a call has done, and what it took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from h2o_flexgen.core.workload import BlockSize
from h2o_flexgen.engine.drafts import Drafted
from h2o_flexgen.engine.engine import BlockRun
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.schedule.ops import Data, Op


class Peaks(NamedTuple):
    """The most bytes held on each tier, and by how much they exceeded the limit."""

    peak_bytes: Mapping[str, int]  # the host's is the process's resident memory
    over_budget_bytes: Mapping[str, int]


def _by_data(moved: Mapping[Op, int]) -> dict[str, dict[str, int]]:
    """Bytes of each kind of data that moved, by lane; of KV also what the host attended."""
    found: dict[str, dict[str, int]] = {}
    for op in Op:
        if moved.get(op) and op.data is not Data.NOTHING:
            of_data = found.setdefault(op.data.words, {})
            of_data[op.lane] = of_data.get(op.lane, 0) + moved[op]
    return found


@dataclass(frozen=True)
class Stats:
    """The figures of the last `generate` or `score`."""

    num_prompts: int
    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    total_seconds: float
    step_seconds: tuple[float, ...]  # seconds of every decode step of every block
    moved_bytes: dict[str, int]  # bytes per lane
    moved_by_data: dict[str, dict[str, int]]  # the same of weights, KV, states and activations
    skipped_bytes: dict[str, int]  # what was not moved: experts that no row chose, tokens that were there or chosen twice
    busy_seconds: dict[str, float]  # seconds per lane
    peaks: Peaks
    replayed: int  # visits that were replayed as graphs
    unrecorded: Mapping[str, str]  # layers that could not be, and why
    drafted: Drafted
    shrunk: tuple[BlockSize, ...]  # sizes of blocks that memory ran out in; their seconds and bytes count above
    blocks: tuple[BlockRun, ...] = field(repr=False)  # the blocks that ended; only the last has kept its trace

    @classmethod
    def of(cls, rows: Sequence[RowState], runs: Sequence[BlockRun], peaks: Peaks) -> Stats:
        num_prompts, prompt_tokens = len({row.index for row in rows}), sum(row.prompt_len for row in rows)
        generated = sum(row.num_generated for row in rows)  # counted once, even if a row started again
        return cls.counted(num_prompts, prompt_tokens, generated, runs, peaks)

    @classmethod
    def counted(cls, num_prompts: int, prompt_tokens: int, generated: int, runs: Sequence[BlockRun], peaks: Peaks) -> Stats:
        ended = tuple(run for run in runs if run.shortage is None)
        moved: Counter[str] = Counter()
        by_op: Counter[Op] = Counter()
        skipped: Counter[str] = Counter()
        busy: Counter[str] = Counter()
        for run in runs:
            moved.update(run.moved_bytes)
            by_op.update(run.moved_by_op)
            skipped.update(run.skipped_bytes)
            busy.update(run.busy_seconds)
        prefill, decode = sum(run.prefill_seconds for run in runs), sum(run.decode_seconds for run in runs)
        return cls(
            num_prompts=num_prompts,
            prompt_tokens=prompt_tokens,
            generated_tokens=generated,
            prefill_seconds=prefill,
            decode_seconds=decode,
            total_seconds=prefill + decode,
            step_seconds=tuple(seconds for run in ended for seconds in run.step_seconds),
            moved_bytes=dict(moved),
            moved_by_data=_by_data(by_op),
            skipped_bytes={lane: nbytes for lane, nbytes in skipped.items() if nbytes},
            busy_seconds=dict(busy),
            peaks=peaks,
            replayed=sum(run.replayed for run in runs),
            unrecorded={layer: why for run in runs for layer, why in run.unrecorded.items()},
            drafted=Drafted.total(run.drafted for run in runs),
            shrunk=tuple(BlockSize.of(run.block) for run in runs if run.shortage is not None),
            blocks=ended,
        )

    @property
    def peak_bytes(self) -> Mapping[str, int]:
        """Bytes per tier; the host's is the process's resident memory."""
        return self.peaks.peak_bytes

    @property
    def over_budget_bytes(self) -> Mapping[str, int]:
        """Bytes per tier by which the peak exceeded the limit; 0 where it did not."""
        return self.peaks.over_budget_bytes

    @property
    def last_block(self) -> BlockRun:
        return self.blocks[-1]
