"""Layers that are computed twice for a step: up to their attention, for the slots that it chooses elsewhere, and once more when
these are there. The products that a layer begins with are made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from h2o_flexgen.engine.rows import RowsPart
from h2o_flexgen.kv.step import KVStep
from h2o_flexgen.models.base import BegunWeights, MadeProducts, Weights

Begun: TypeAlias = Callable[[Weights], Weights]


def as_they_are(weights: Weights) -> Weights:
    return weights


class BegunLayers:
    """A batch is in one layer at a time, so what is made for a step of it is for the layer that it computes next."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[KVStep, MadeProducts]] = {}  # by the identity of a step

    def first(self, part: RowsPart) -> Begun:
        _, made = self._made[id(part.now)] = part.now, MadeProducts()
        return lambda weights: BegunWeights(weights, made, is_again=False)

    def again(self, part: RowsPart) -> Begun:
        if (found := self._made.pop(id(part.now), None)) is None:
            return as_they_are
        return lambda weights: BegunWeights(weights, found[1], is_again=True)
