"""Watch: looks on while a run computes. It feeds the progress line, adds up the work that was really done, and notes the times
from which a run that was cut short can be projected."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from h2o_flexgen.cli.stages import show_stage
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.engine.stage import Stage
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.cost import Cost
from h2o_flexgen.schedule.task import Task


class Watch:
    """`blocks` are those that the run consists of, as planned; where memory runs out, those that took their place."""

    def __init__(self, blocks: Sequence[BlockPlan], progress: Progress) -> None:
        self.flops: Counter[int] = Counter()  # rows of a matrix product -> flops done with so many
        self.first_decode_ends: list[dict[int, float]] = [
            {} for _ in blocks
        ]  # of the first decode step: layer -> when it ended
        self.load_seconds = 0.0
        self.blocks = tuple(blocks)
        self._progress = progress
        self._index = -1  # of the block that is running
        self._visits_before = self._tokens_before = self._tokens = 0
        self._visits = self._visits_lost = 0  # of the block that is running, and of those that memory ran out in
        self._stage_began = time.perf_counter()
        self._generation_began = self._stage_began

    @property
    def total(self) -> int:
        """Visits of all blocks, with those that had to be made twice."""
        return self._visits_lost + total_visits(self.blocks)

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
        if self.blocks[max(self._index, 0)].schedule.number(*task.visit) == 0:
            self._next_block()
        self._tokens = tokens
        self._visits = self.blocks[self._index].schedule.number(*task.visit) + 1
        self._count_work(task)
        self._progress.update(self._text(), self._done, self._details(task))

    def shrink(self, num_ended: int, rest: Sequence[BlockPlan], note: str) -> None:
        """Memory ran out in the block behind those that have ended. The rest takes the place of all that were to come, and what
        was done of the broken one counts as done: nobody sees the run go backwards."""
        if self._index == num_ended:  # or memory ran out before its first visit
            self._visits_lost += self._visits
            self._tokens = 0
            self._index -= 1
        self.blocks = (*self.blocks[:num_ended], *rest)
        self.first_decode_ends[num_ended:] = [{} for _ in rest]
        self._progress.expect(self.total)
        self._progress.note(note)

    def _next_block(self) -> None:
        self._index += 1
        self._visits_before = total_visits(self.blocks[: self._index])
        self._tokens_before += self._tokens

    def _count_work(self, task: Task) -> None:
        cost = Cost(self.blocks[self._index])
        self.flops[cost.product_rows(task)] += cost.flops(task)  # type: ignore[assignment]
        if task.step == 1:
            self.first_decode_ends[self._index][task.layer] = time.perf_counter()

    @property
    def _done(self) -> int:
        return self._visits_lost + self._visits_before + self._visits

    def _details(self, task: Task) -> list[str]:
        traffic = self.blocks[self._index].schedule.traffic
        block = [f"block {self._index + 1}/{len(self.blocks)}"] if len(self.blocks) > 1 else []
        places = (
            ("step", task.step, traffic.steps),
            ("layer", task.layer, traffic.layers),
            ("batch", task.batch, traffic.batches),
        )
        return [*block, *(f"{name} {place + 1}/{total}" for name, place, total in places)]

    def _text(self) -> str:
        seconds, done = max(self.seconds, 1e-9), self._done
        rate = (self._tokens_before + self._tokens) / seconds
        return f"{rate:.2f} tokens/s, ETA {clock(seconds / done * (self.total - done))}"


def total_visits(blocks: Sequence[BlockPlan]) -> int:
    return sum(block.schedule.traffic.visits for block in blocks)


def clock(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
