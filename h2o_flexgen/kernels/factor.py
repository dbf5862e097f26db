"""Factor: the rows that one or more matrices are multiplied with, and what kernels make of them, once for all matrices. All
rows meet the same ones, or run by run some of their own. CountedRows: runs of which memory alone knows how many rows they have.

A recorded call is told no numbers that change. So another call stands before it, which puts them into what it is told.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from h2o_flexgen.kernels.native import pointer, run

# -- rows that memory counts -----------------------------------------------------------------------------------------------

EVERY = (1 << 63) - 1  # no number of rows is higher


@dataclass(frozen=True)
class CountedRows:
    begins: Tensor  # (runs + 1, or more), int64: the first row of each, and behind the last one where it ends
    runs: int
    most: int  # rows of a run
    least: int = 1  # runs with fewer rows are left out

    def within(self, least: int, most: int) -> CountedRows:
        """Those runs that have so many rows."""
        return replace(self, least=least, most=most)

    def place_each(self, told: ctypes.Array[Any], rows_at: int, addresses: Mapping[int, tuple[int, int]]) -> None:
        """Says in each of some structs, one for each run, how many rows it has and where they begin. `addresses`: where that
        stands in a struct -> the address of the first row of all, and the bytes of a row."""
        assert len(told) == self.runs
        places = (_Address * len(addresses))(*(_Address(at, *place) for at, place in addresses.items()))
        given = _Placing(pointer(self.begins), ctypes.addressof(told), ctypes.addressof(places))
        given.structs, given.step, given.nbytes, given.count = self.runs, 1, ctypes.sizeof(told) // self.runs, len(places)
        given.rows_at, given.unit, given.least, given.most = rows_at, 1, self.least, self.most
        given.kept = told, places
        run("place_rows", given, 1)

    def place_all(self, told: ctypes.Structure, rows_at: int, unit: int = 1) -> None:
        """Says in a struct how many rows there are in all. A row counts as so many there."""
        given = _Placing(pointer(self.begins), ctypes.addressof(told), None)
        given.structs, given.step, given.rows_at, given.unit, given.most = 1, self.runs, rows_at, unit, EVERY
        given.kept = told
        run("place_rows", given, 1)


class _Address(ctypes.Structure):
    _fields_ = (("at", ctypes.c_long), ("base", ctypes.c_void_p), ("bytes", ctypes.c_long))


class _Placing(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("begins", "told", "addresses")),
        *((name, ctypes.c_long) for name in ("structs", "step", "nbytes", "count", "rows_at", "unit", "least", "most")),
    )
    kept: object  # what it points to


# -- factors ---------------------------------------------------------------------------------------------------------------

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
