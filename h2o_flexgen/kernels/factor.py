"""Factor: the rows that one or more matrices are multiplied with, and what kernels make of them, once for all matrices. All
rows meet the same ones, or run by run some of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

Made = TypeVar("Made")
Runs = tuple[tuple[int, int], ...]  # rows that meet the same matrices: the first of them, and how many there are


class Meeting(NamedTuple):
    """Rows of a factor (rows, inputs), one behind the other, and the matrix that they are multiplied with."""

    first: int
    rows: int  # one at least
    data: Tensor
    bias: Tensor | None  # (outputs,)

    @classmethod
    def of_all(cls, x: Factor, data: Tensor, bias: Tensor | None) -> list[Meeting]:
        """The one of all rows with a matrix; none if there are no rows."""
        return [cls(0, x.rows, data, bias)] if x.rows else []


@dataclass(frozen=True, eq=False)
class Factor:
    values: Tensor  # (..., inputs)
    _made: dict[object, Any] = field(default_factory=dict)

    @cached_property
    def rows(self) -> int:
        return self.values.shape[:-1].numel()

    def made(self, function: Callable[[Tensor], Made]) -> Made:
        """The function's outcome for these rows. It is kept, so that the next matrix finds it."""
        return self._kept(function, lambda: function(self.values))

    def arranged(self, function: Callable[[Tensor, Runs], Made], runs: Runs) -> Made:
        """The same of a function that does something else with rows when they meet another matrix than those beside them."""
        return self._kept((function, runs), lambda: function(self.values, runs))

    def _kept(self, key: object, make: Callable[[], Made]) -> Made:
        if key not in self._made:
            self._made[key] = make()
        outcome: Made = self._made[key]
        return outcome

    def part(self, first: int, rows: int) -> Factor:
        """Some of the rows (rows, inputs), in memory of their own: products of libraries depend on where rows begin."""
        return Factor(self.values[first : first + rows].clone())
