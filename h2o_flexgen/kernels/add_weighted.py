"""Adds rows, each times its weight, to rows of sums, in their order: the outcome does not depend on how many come at once. C
and torch give the same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from h2o_flexgen.kernels.native import KINDS, native_library, pointer
from h2o_flexgen.kernels.raw_memory import address_of
from h2o_flexgen.kernels.thread_counts import threads_for


def add_weighted(sums: Tensor, rows: Tensor, weights: Tensor, to: Tensor, counts: Sequence[int]) -> None:
    """sums (sums, width), float32; rows (count, width); weights (count,), float32; to (count,), int64: the sum of each row. Of
    the `counts`, which follow each other, no two rows have the same sum."""
    assert sums.stride(1) == 1 and rows.shape == (sum(counts), sums.shape[1])
    places = (pointer(rows), pointer(weights), pointer(to), address_of(sums, writes=True))
    given = _Additions(*places, *rows.shape, sums.stride(0) * sums.itemsize, KINDS[rows.dtype])
    native_library().add_weighted(ctypes.byref(given), ctypes.c_int(threads_for(rows.numel())))


def add_weighted_twin(sums: Tensor, rows: Tensor, weights: Tensor, to: Tensor, counts: Sequence[int]) -> None:
    """Torch adds several rows to one sum in any order, so those of a count are added at once, which have sums of their own."""
    for own, its, places in zip(rows.split(list(counts)), weights.split(list(counts)), to.split(list(counts))):
        sums.index_add_(0, places, own.float() * its[:, None])


class _Additions(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "weights", "to", "sums")),
        *((name, ctypes.c_long) for name in ("count", "width", "sums_row")),
        ("kind", ctypes.c_int),
    )
