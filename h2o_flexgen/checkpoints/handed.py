"""HandedSource: the weights of a process, read by another process. Weights that stay on a device are handed over tensor by
tensor; those that every step reads from disk are read from their files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from h2o_flexgen.checkpoints.checkpoint import WeightSource
from h2o_flexgen.checkpoints.stored_tensors import Located, StoredAs, unchecked
from h2o_flexgen.core.model_spec import TensorSpec


class HandedSource:
    def __init__(self, source: WeightSource, take: Callable[[Tensor], None]) -> None:
        """`take` receives the next tensor's bytes, in the order in which the reading process sends them."""
        self._source = source
        self._take = take

    def stored_as(self, name: str) -> StoredAs:
        return self._source.stored_as(name)

    def locate(self, tensors: Iterable[TensorSpec]) -> Mapping[str, Located]:
        """The places of tensors, without checks: the process that reads has checked them."""
        return {name: unchecked(stored) for name, stored in self._source.locate(tensors).items()}

    def fill(self, tensor: TensorSpec, out: Tensor) -> bool:
        self._take(out.view(-1).view(torch.uint8))
        return True

    def close(self) -> None:
        self._source.close()
