"""Factor: the rows that one or more matrices are multiplied with, and what kernels make of them, once for all matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from torch import Tensor

Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class Factor:
    values: Tensor  # (..., inputs)
    _made: dict[Callable[[Tensor], Any], Any] = field(default_factory=dict)

    @cached_property
    def rows(self) -> int:
        return self.values.shape[:-1].numel()

    def made(self, function: Callable[[Tensor], Made]) -> Made:
        """The function's outcome for these rows. It is kept, so that the next matrix finds it."""
        if function not in self._made:
            self._made[function] = function(self.values)
        outcome: Made = self._made[function]
        return outcome
