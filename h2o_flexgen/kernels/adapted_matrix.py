"""AdaptedMatrix: a matrix that some of the rows meet with an adapter of their own, which adds B (A x) * factor to their
products. The other rows have the bits that they have without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from h2o_flexgen.kernels.factor import Factor
from h2o_flexgen.kernels.native import RECORDER
from h2o_flexgen.kernels.operations import steady_product

AT_ONCE = 256  # rows of an adapter: what they add is held beside what they are added to


@dataclass(frozen=True, eq=False)
class LowRankMatrices:
    """The thin matrices of an adapter for one matrix, in fp32."""

    a: Tensor  # (rank, inputs)
    b: Tensor  # (outputs, rank)
    factor: float


@dataclass(frozen=True, eq=False)
class AdaptedRows:
    """The adapter of each row, by its number; 0: none. A row may have several tokens."""

    numbers: tuple[int, ...]
    device: torch.device
    _known: dict[tuple[int, int], Sequence[Tensor]] = field(default_factory=dict)

    def make_ready(self) -> None:
        """Makes the places of rows of one token, which no recording can make."""
        for number in {*self.numbers} - {0}:
            self.places(number, 1)

    def places(self, number: int, tokens: int) -> Sequence[Tensor]:
        """The places of the tokens that have an adapter among those of all rows, some at a time. `tokens`: of each row."""
        key = number, tokens
        if key not in self._known:
            rows = torch.tensor([row for row, own in enumerate(self.numbers) if own == number])
            every = (rows[:, None] * tokens + torch.arange(tokens)).flatten().to(self.device)
            self._known[key] = every.split(AT_ONCE)
        return self._known[key]


@dataclass(frozen=True, eq=False)
class AdaptedMatrix:
    matrix: Any  # of the model
    rows: AdaptedRows
    by_number: Mapping[int, LowRankMatrices]  # of the adapters that rows have and that change it

    def added(self, x: Factor, out: Tensor) -> Tensor:
        """The products `out` of the matrix with rows x, and what the adapters of rows add to them."""
        given, made = x.values.reshape(x.rows, -1), out.flatten(0, -2)
        assert x.rows % len(self.rows.numbers) == 0, "each row has as many tokens"
        recorder = RECORDER.get()
        for number, own in self.by_number.items():
            for places in self.rows.places(number, x.rows // len(self.rows.numbers)):
                if recorder is None:
                    _add(own.factor, made, given, places, own.a, own.b)
                else:
                    recorder.by_torch(partial(_add, own.factor), (given, places, own.a, own.b), made)
        return made.view(out.shape)


def _add(factor: float, made: Tensor, given: Tensor, places: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds to the products of the rows that have an adapter what it adds."""
    made[places] = (made[places].float() + low_rank_product(given[places], a, b, factor)).to(made.dtype)


def low_rank_product(x: Tensor, a: Tensor, b: Tensor, factor: float) -> Tensor:
    """What an adapter adds to the products of rows (rows, inputs): (rows, outputs), in fp32. With kernels in C it does not
    depend on the rows beside a row."""
    between = steady_product(Factor(x.float()), a, None)
    return steady_product(Factor(between), b, None).mul_(factor)


def bare(matrix: Any) -> Any:
    """The matrix of the model itself."""
    return matrix.matrix if isinstance(matrix, AdaptedMatrix) else matrix
