"""CountedRows: rows of which memory alone knows how many there are. Runs of them meet a matrix each, one behind the other.

A recorded call is told no numbers that change. So another call stands before it, which puts them into what it is told.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from h2o_flexgen.kernels.native import pointer, run

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
