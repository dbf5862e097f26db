"""FlexGen's own block loop: a whole layer's weights come with the first batch of the layer before, and a barrier after every
visit makes the next one wait for all that was under way. Hidden states are copied in the stream of the computation, before it.
So a compute that runs while weights are loaded begins only after them: their copy occupies the link.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from h2o_flexgen.schedule.ops import Data, Task
from h2o_flexgen.schedule.schedule import BlockOrder, Issuer


@dataclass(frozen=True)
class FlexGenBarrier(BlockOrder):
    name = "flexgen_barrier"

    @property
    def buffers(self) -> int:
        return 3  # one being fetched, one computed with, one stored: the original has a buffer for each

    @property
    def weight_buffers(self) -> int:
        return 2

    def tasks(self) -> Iterator[Task]:
        issue = Issuer(self)
        before = [*issue.fetched(Data.WEIGHTS, 0), *issue.of_rows(*range(self.rows_ahead()))]
        yield from before
        for number in range(self.traffic.visits):
            barrier = tuple(task.key for task in before)
            before = list(self._iteration(issue, number))
            for task in before:
                yield task._replace(needs=tuple(dict.fromkeys(task.needs + barrier)))
        yield from issue.stored(self.traffic.visits - 1)

    def _iteration(self, issue: Issuer, number: int) -> Iterator[Task]:
        beside = list(self._beside(issue, number))
        yield from beside
        copied_before = tuple(task.key for task in beside if task.op.data is Data.HIDDEN)
        for task in issue.computed(number):
            yield task._replace(needs=task.needs + copied_before)

    def _beside(self, issue: Issuer, number: int) -> Iterator[Task]:
        batches = self.traffic.batches
        if number > 0:
            yield from issue.stored(number - 1)
        if number % batches == 0:
            yield from issue.fetched(Data.WEIGHTS, number + batches)
        yield from issue.of_rows(number + self.rows_ahead())
        yield from issue.fetched(Data.HIDDEN, number + min(1, batches - 1))

    def rows_ahead(self, device: int = 0) -> int:
        return min(1, self.traffic.layers * self.traffic.batches - 1)
