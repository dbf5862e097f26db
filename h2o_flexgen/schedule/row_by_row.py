"""batch, then step, then layer: every batch is generated to its end before the next one starts, and each reads all the weights
anew. With two buffers the next layer is fetched meanwhile (ZeRO-Inference), with one it is not (Accelerate).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from h2o_flexgen.schedule.ops import Data, Task, Visit
from h2o_flexgen.schedule.schedule import Issuer, Schedule


@dataclass(frozen=True)
class RowByRow(Schedule):
    name = "row_by_row"
    keeps_step = False

    def visit(self, number: int) -> Visit:
        rest, layer = divmod(number, self.traffic.layers)
        batch, step = divmod(rest, self.traffic.steps)
        return Visit(step, layer, batch)

    def number(self, step: int, layer: int, batch: int) -> int:
        return (batch * self.traffic.steps + step) * self.traffic.layers + layer

    def own_period(self, device: int) -> int:
        return self.traffic.layers

    def rows_ahead(self, device: int = 0) -> int:
        """Any further, a fetch of KV or of a state would overtake its own store."""
        return min(self.traffic.buffers, self.traffic.layers) - 1

    def weight_number(self, step: int, layer: int, batch: int) -> int:
        return self.number(step, layer, batch)

    def weight_batch(self, batch: int) -> int:
        return batch

    def tasks(self) -> Iterator[Task]:
        issue, ahead = Issuer(self), self.traffic.buffers - 1
        rows_ahead = self.rows_ahead()
        yield from issue.fetched(Data.WEIGHTS, *range(ahead))
        yield from issue.of_rows(*range(rows_ahead))
        for number in range(self.traffic.visits):
            yield from issue.fetched(Data.WEIGHTS, number + ahead)
            yield from issue.of_rows(number + rows_ahead)
            yield from issue.fetched(Data.HIDDEN, number)
            yield from issue.computed(number)
            yield from issue.stored(number)
