"""A token is worth the length of its value: a token with a short one changes little of what attention gives, however much it is
attended to."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.kv.judges.judge import Judge, Written


class ValueNorms(Judge):
    def of_new(self, new: Written) -> Tensor:
        lengths: Tensor = torch.linalg.vector_norm(new.v, dim=-1, dtype=torch.float32)
        return lengths

    def of_heads(self, heads: Tensor) -> ValueNorms:
        return self
