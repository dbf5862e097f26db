"""One more key for each query, which represents all keys that were attended elsewhere, or a sink.

A sink is a score that a model has learned for a query head: it takes part in every softmax of that head, and its share is
discarded. So it is a key with the value zero.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.kernels.native import pointer


class More(NamedTuple):
    """What a query got elsewhere, if anything, and its weight beside other keys: the logarithm of the exponentials' sum there.
    All is float32 and contiguous. A query that attended nothing elsewhere has the score -inf and any finite values."""

    scores: Tensor  # (rows, tokens, heads)
    values: Tensor | None  # (rows, tokens, heads, dim); None: all are zero

    @classmethod
    def of_sink_scores(cls, sink_scores: Tensor, rows: int, tokens: int) -> More:
        """The sinks of so many queries; `sink_scores` is (heads,)."""
        return cls(sink_scores.float().expand(rows, tokens, -1).contiguous(), None)

    def each(self, change: Callable[[Tensor], Tensor]) -> More:
        """What a function makes of both."""
        return More(change(self.scores), None if self.values is None else change(self.values))

    def with_sink_scores(self, sink_scores: Tensor) -> More:
        """The same key and a sink, as one."""
        scores = torch.logaddexp(self.scores, sink_scores.float())
        if self.values is None:
            return More(scores, None)
        return More(scores, self.values * (self.scores - scores).exp_().unsqueeze(-1))


class MoreKeys(ctypes.Structure):
    _fields_ = (("scores", ctypes.c_void_p), ("values", ctypes.c_void_p))

    @classmethod
    def of(cls, more: More | None) -> MoreKeys:
        return cls(None, None) if more is None else cls(*(None if one is None else pointer(one) for one in more))
