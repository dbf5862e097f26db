"""Copies of values between places with any strides and of any types, and zeros. In C, with the bits of torch."""

from __future__ import annotations

import ctypes

from torch import Tensor

from h2o_flexgen.kernels.native import KINDS, NO_KIND, run
from h2o_flexgen.kernels.raw_memory import address_of
from h2o_flexgen.kernels.team import threads_for

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
