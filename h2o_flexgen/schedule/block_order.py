"""The order in which all batches of a block use a layer's weights before the next layer comes: step, then layer, then batch."""

from __future__ import annotations

from h2o_flexgen.schedule.schedule import Schedule
from h2o_flexgen.schedule.task import Visit


class BlockOrder(Schedule):
    def visit(self, number: int) -> Visit:
        rest, batch = divmod(number, self.traffic.batches)
        return Visit(*divmod(rest, self.traffic.layers), batch)

    def number(self, step: int, layer: int, batch: int) -> int:
        return (step * self.traffic.layers + layer) * self.traffic.batches + batch

    def weight_number(self, step: int, layer: int, batch: int) -> int:
        return step * self.traffic.layers + layer

    def weight_batch(self, batch: int) -> int:
        return 0
