"""One more key for each query, which stands for all keys that were attended elsewhere."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from torch import Tensor

from h2o_flexgen.kernels.native import pointer


class More(NamedTuple):
    """What a query got elsewhere, and its weight beside other keys: the logarithm of the sum of exponentials there. Both are
    float32 and contiguous. A query that attended nothing elsewhere has the score -inf and any finite values."""

    scores: Tensor  # (rows, tokens, heads)
    values: Tensor  # (rows, tokens, heads, dim)


class MoreKeys(ctypes.Structure):
    _fields_ = (("scores", ctypes.c_void_p), ("values", ctypes.c_void_p))

    @classmethod
    def of(cls, more: More | None) -> MoreKeys:
        return cls(None, None) if more is None else cls(pointer(more.scores), pointer(more.values))
