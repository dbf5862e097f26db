"""A visit and its tasks. A *visit* is one COMPUTE: one layer on one batch at one step; its other tasks move data for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from h2o_flexgen.core.model_spec import LayerName
from h2o_flexgen.schedule.ops import Op


class Visit(NamedTuple):
    step: int
    layer: int
    batch: int


class Key(NamedTuple):
    """The name of a task. `batch` of weights is the number of a slice, if the schedule cuts layers."""

    op: Op
    step: int
    layer: int
    batch: int

    def __str__(self) -> str:
        return f"{self.op} {self.step}.{self.layer}.{self.batch}"

    def said(self, names: Sequence[LayerName]) -> str:
        """The key, and what its layer is if that has a name."""
        return f"{self} ({names[self.layer].title})" if names else str(self)


class Task(NamedTuple):
    op: Op
    step: int
    layer: int
    batch: int
    needs: tuple[Key, ...] = ()

    @property
    def key(self) -> Key:
        return Key(*self[:4])

    @property
    def visit(self) -> Visit:
        """The visit that the task belongs to."""
        return Visit(self.step, self.layer, self.batch)

    @property
    def lane(self) -> str:
        return self.op.lane

    def is_compute_of(self, layer: int) -> bool:
        return self.op is Op.COMPUTE and self.layer == layer

    def __str__(self) -> str:
        return str(self.key)
