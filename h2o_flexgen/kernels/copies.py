"""Values that are moved: copied between places with any strides and of any types, or filled with zeros; and rows that are taken
from a tensor, or put into it, by their numbers. In C, with the bits of torch."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import torch
from torch import Tensor

from h2o_flexgen.kernels.native import KINDS, NO_KIND, run, threads_for
from h2o_flexgen.kernels.raw_memory import address_of

MOST_AXES = 6  # as in C


def copy_values(source: Tensor, target: Tensor) -> None:
    """Copies values to places of the same shape. Another type is rounded to as torch does it."""
    shape = source.shape
    assert shape == target.shape and len(shape) <= MOST_AXES
    if source.dtype == target.dtype:
        kinds = NO_KIND, NO_KIND
    else:
        kinds = KINDS[source.dtype], KINDS[target.dtype]
    sizes, strides = _joined(shape, source.stride(), target.stride())
    filling = MOST_AXES - len(sizes)
    given = _Copying(
        address_of(source),
        address_of(target, writes=True),
        Axes(*[1] * filling, *sizes),
        Axes(*[0] * filling, *(stride * source.itemsize for stride, _ in strides)),
        Axes(*[0] * filling, *(stride * target.itemsize for _, stride in strides)),
        *kinds,
        source.itemsize,
    )
    run("copy_values", given, threads_for(source.numel()))


def _joined(shape: tuple[int, ...], *strides: tuple[int, ...]) -> tuple[list[int], list[tuple[int, ...]]]:
    """The shape and the strides with neighbouring axes joined where they lie one behind the other in all places."""
    sizes, steps = list[int](), list[tuple[int, ...]]()
    for size, *own in zip(shape, *strides):
        if size == 1:
            continue
        if sizes and all(before == size * step for before, step in zip(steps[-1], own)):
            sizes[-1] *= size
            steps[-1] = tuple(own)
        else:
            sizes.append(size)
            steps.append(tuple(own))
    return sizes, steps


def zero_bytes(target: Tensor) -> None:
    """Fills contiguous memory with zeros."""
    assert target.is_contiguous()
    run("zero_bytes", _Zeroing(address_of(target, writes=True), target.nbytes), 1)


Axes = ctypes.c_long * MOST_AXES


class _Copying(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("sizes", Axes),
        ("source_strides", Axes),
        ("target_strides", Axes),
        ("source_kind", ctypes.c_int),
        ("target_kind", ctypes.c_int),
        ("nbytes", ctypes.c_long),
    )


class _Zeroing(ctypes.Structure):
    _fields_ = (("target", ctypes.c_void_p), ("nbytes", ctypes.c_long))


def take_rows(source: Tensor, numbers: Tensor, axis: int, first: int) -> Tensor:
    out = torch.empty(*source.shape[:axis], *numbers.shape, *source.shape[axis + 1 :], dtype=source.dtype)
    _copy(_side_by_side(source, axis), numbers, axis, first, out, puts=False)
    return out


def take_rows_twin(source: Tensor, numbers: Tensor, axis: int, first: int) -> Tensor:
    wanted = numbers if first == 0 else numbers + first
    taken = source.index_select(axis, wanted.flatten())
    return taken.view(*source.shape[:axis], *wanted.shape, *source.shape[axis + 1 :])


def put_rows(target: Tensor, numbers: Tensor, axis: int, rows: Tensor) -> None:
    assert _lies_side_by_side(target, axis)
    _copy(target, numbers, axis, 0, rows.contiguous(), puts=True)


def put_rows_twin(target: Tensor, numbers: Tensor, axis: int, rows: Tensor) -> None:
    target.index_copy_(axis, numbers, rows)


def _copy(chosen: Tensor, numbers: Tensor, axis: int, first: int, others: Tensor, puts: bool) -> None:
    tables, numbers = chosen.shape[:axis].numel(), numbers.contiguous()
    values = chosen.shape[axis + 1 :].numel()
    assert numbers.dtype in (torch.int32, torch.int64) and chosen.dtype == others.dtype and others.is_contiguous()
    assert others.numel() == tables * numbers.numel() * values
    given = _Choosing(
        *(address_of(chosen, writes=puts), address_of(others, writes=True), address_of(numbers)),
        *(first, tables, chosen.shape[axis], numbers.numel()),
        *(stride * chosen.itemsize for stride in (_table_stride(chosen, axis), chosen.stride(axis))),
        *(numbers.numel() * values * chosen.itemsize, values * chosen.itemsize),
        *(puts, numbers.dtype == torch.int32),
    )
    run("take_rows", given, threads_for(others.numel()))


def _table_stride(x: Tensor, axis: int) -> int:
    """Values from what is before an axis to the next of it."""
    strides = [stride for size, stride in zip(x.shape[:axis], x.stride()) if size != 1]
    return strides[-1] if strides else 0


def _side_by_side(x: Tensor, axis: int) -> Tensor:
    return x if _lies_side_by_side(x, axis) else x.contiguous()


def _lies_side_by_side(x: Tensor, axis: int) -> bool:
    """Whether the values of each row lie side by side, and what is before the axis has one stride."""
    outer = [(size, stride) for size, stride in zip(x.shape[:axis], x.stride()) if size != 1]
    has_one_stride = all(before == size * stride for (_, before), (size, stride) in pairwise(outer))
    row = x[(0,) * (axis + 1)] if x.numel() else x.flatten()
    return has_one_stride and row.is_contiguous()


class _Choosing(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("chosen", "others", "numbers")),
        *((name, ctypes.c_long) for name in ("first", "tables", "rows", "count")),
        *((name, ctypes.c_long) for name in ("chosen_table", "chosen_row", "others_table", "nbytes")),
        *((name, ctypes.c_int) for name in ("puts", "are_short")),
    )
