"""Watch: looks on while a run computes. It feeds the progress line, adds up the work that was really done, and notes the times
from which a run that was cut short can be projected."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from h2o_flexgen.commands.stages import show_stage
from h2o_flexgen.planning.cost import Cost
from h2o_flexgen.planning.planned import PlannedBlock
from h2o_flexgen.planning.schedule import Task
from h2o_flexgen.runtime.progress import Progress
from h2o_flexgen.runtime.stage import Stage


class Watch:
    def __init__(self, blocks: Sequence[PlannedBlock], progress: Progress) -> None:
        self.flops: Counter[int] = Counter()  # rows of a matrix product -> flops done with so many
        self.first_decode_ends: list[dict[int, float]] = [
            {} for _ in blocks
        ]  # of the first decode step: layer -> when it ended
        self.load_seconds = 0.0
        self._blocks = blocks
        self._progress = progress
        self._index = -1  # of the block that is running
        self._visits_before = self._tokens_before = self._tokens = 0
        self._stage_began = time.perf_counter()
        self._generation_began = self._stage_began

    @property
    def total(self) -> int:
        return total_visits(self._blocks)

    @property
    def seconds(self) -> float:
        """Since the weights were there."""
        return time.perf_counter() - self._generation_began

    def stage(self, stage: Stage, done_bytes: int = 0, total_bytes: int = 0) -> None:
        now = time.perf_counter()
        if stage is Stage.GENERATING:
            self.load_seconds = now - self._stage_began
            self._generation_began = now
        show_stage(self._progress, stage, done_bytes, total_bytes)

    def visit(self, task: Task, tokens: int) -> None:
        """A COMPUTE is over; `tokens` were generated in its block so far."""
        if self._blocks[max(self._index, 0)].schedule.number(*task.visit) == 0:
            self._next_block()
        self._tokens = tokens
        self._count_work(task)
        self._progress.update(self._text(task), self._done(task))

    def _next_block(self) -> None:
        if self._index >= 0:
            self._visits_before += self._blocks[self._index].schedule.moves.visits
            self._tokens_before += self._tokens
        self._index += 1

    def _count_work(self, task: Task) -> None:
        cost = Cost(self._blocks[self._index])
        self.flops[cost.product_rows(task)] += cost.flops(task)  # type: ignore[assignment]
        if task.step == 1:
            self.first_decode_ends[self._index][task.layer] = time.perf_counter()

    def _done(self, task: Task) -> int:
        return self._visits_before + self._blocks[self._index].schedule.number(*task.visit) + 1

    def _text(self, task: Task) -> str:
        moves = self._blocks[self._index].schedule.moves
        seconds, done = max(self.seconds, 1e-9), self._done(task)
        block = f"block {self._index + 1}/{len(self._blocks)} " if len(self._blocks) > 1 else ""
        place = (
            f"step {task.step + 1}/{moves.steps} layer {task.layer + 1}/{moves.layers} batch {task.batch + 1}/{moves.batches}"
        )
        rate = (self._tokens_before + self._tokens) / seconds
        return f"{block}{place}, {rate:.2f} tokens/s, ETA {clock(seconds / done * (self.total - done))}"


def total_visits(blocks: Sequence[PlannedBlock]) -> int:
    return sum(block.schedule.moves.visits for block in blocks)


def clock(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
