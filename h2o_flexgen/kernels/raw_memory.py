"""Access to values in host memory for all that is not torch: the disk, numpy, and kernels in C.

Each call says whether it writes. So a device that checks the order of all accesses also sees those that torch does not
report.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_

import numpy
import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def touched(tensor: Tensor, writes: bool) -> None:
    """Says that the calling thread is about to read or write a tensor past torch. Only tests listen."""


def address_of(tensor: Tensor, writes: bool = False) -> int:
    assert tensor.is_cpu
    touched(tensor, writes)
    return tensor.data_ptr()


def addresses_of(tensors: Iterable[Tensor]) -> list[int]:
    """The addresses of tensors that a GPU works on, for a kernel that is launched on them in the order of its stream."""
    return [*map(Tensor.data_ptr, tensors)]


def begins_behind(multiple: int, *tensors: Tensor) -> int:
    """The bytes between a multiple of so many, a power of two, and the beginning of a tensor. Nothing of it is read. Of several
    tensors: what is a multiple of just those powers of two that all their beginnings are."""
    return reduce(or_, map(Tensor.data_ptr, tensors)) % multiple


def bytes_of(tensor: Tensor, writes: bool = False) -> memoryview:
    touched(tensor, writes)
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def numpy_of(tensor: Tensor, writes: bool = False) -> numpy.ndarray:
    """The values as integers of the same size, which numpy copies without torch's threads; it knows no bfloat16."""
    touched(tensor, writes)
    return tensor.view(INTEGERS[tensor.dtype.itemsize]).numpy()
