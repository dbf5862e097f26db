"""Factor: the rows that one or more matrices are multiplied with, and what kernels make of them, once for all matrices. All
rows meet the same ones, or run by run some of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from h2o_flexgen.kernels.counted_rows import CountedRows

Made = TypeVar("Made")
# Rows that meet the same matrices: the first of them and how many there are, or where memory says it.
Runs = tuple[tuple[int, int], ...] | CountedRows


class Meeting(NamedTuple):
    """Rows of a factor (rows, inputs), one behind the other, and the matrix that they are multiplied with."""

    first: int
    rows: int  # one at least; 0 where memory says it
    data: Tensor
    bias: Tensor | None  # (outputs,)

    @classmethod
    def of_all(cls, x: Factor, data: Tensor, bias: Tensor | None) -> list[Meeting]:
        """The one of all rows with a matrix; none if there are no rows."""
        return [cls(0, x.rows, data, bias)] if x.rows else []


@dataclass(frozen=True, eq=False)
class Factor:
    values: Tensor  # (..., inputs)
    counted: CountedRows | None = None  # which rows meet which matrix, where meetings do not say it
    _made: dict[object, Any] = field(default_factory=dict)

    @cached_property
    def rows(self) -> int:
        return self.values.shape[:-1].numel()

    def made(self, function: Callable[[Tensor], Made]) -> Made:
        """The function's outcome for these rows. It is kept, so that the next matrix finds it."""
        return self._kept(function, lambda: function(self.values))

    def within(self, least: int, most: int) -> Factor:
        """The same for those matrices alone that meet so many rows."""
        assert self.counted is not None
        return replace(self, counted=self.counted.within(least, most))

    def runs(self, meetings: Sequence[Meeting]) -> Runs:
        return self.counted or tuple((meeting.first, meeting.rows) for meeting in meetings)

    def arranged(self, function: Callable[[Tensor, Any], Made], runs: Runs | None) -> Made:
        """The same of a function that also wants to know which rows there are, or which of them meet the same matrices."""
        return self._kept((function, runs), lambda: function(self.values, runs))

    def _kept(self, key: object, make: Callable[[], Made]) -> Made:
        if key not in self._made:
            self._made[key] = make()
        outcome: Made = self._made[key]
        return outcome

    def part(self, first: int, rows: int) -> Factor:
        """Some of the rows (rows, inputs), in memory of their own: products of libraries depend on where rows begin."""
        return Factor(self.values[first : first + rows].clone())
