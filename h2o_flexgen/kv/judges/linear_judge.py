"""A token's worth is a linear map of the layer's input; the map was fitted to what tokens turned out to be worth."""

from __future__ import annotations

from torch import Tensor

from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.operations import steady_product
from h2o_flexgen.kv.judges.judge import OneByOne, Written


class Linear(OneByOne):
    reads_input = True

    def __init__(self, weight: Tensor, bias: Tensor, heads: Tensor | None = None) -> None:
        """weight (kv_heads, width) and bias (kv_heads,) in fp32; `heads`: the numbers of the heads to judge; None: all."""
        self._weight, self._bias, self._heads = weight, bias, heads

    def of_new(self, new: Written) -> Tensor:
        assert new.x is not None, "a layer hands over the input of its keys"
        worth = steady_product(Factor(new.x.float()), self._weight, self._bias)
        return worth if self._heads is None else worth.index_select(-1, self._heads)

    def of_heads(self, heads: Tensor) -> Linear:
        return Linear(self._weight, self._bias, heads)
