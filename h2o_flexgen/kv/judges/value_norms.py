"""A token is worth the length of its value: a token with a short value changes the outcome of attention little, however much
attention it gets."""

from __future__ import annotations

from torch import Tensor

from h2o_flexgen.kv.judges.judge import OneByOne, Written


class ValueNorms(OneByOne):
    def of_new(self, new: Written) -> Tensor:
        return new.v.float().square().sum(dim=-1).sqrt()

    def of_heads(self, heads: Tensor) -> ValueNorms:
        return self
