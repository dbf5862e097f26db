"""HeadBudgets: which share of a text each KV head keeps, so that all heads together keep what was asked for.

Few heads of a model look far back, and what they keep decides what the model can recall; the others live on the newest tokens.
A file says what each needs at several budgets of the whole model; it is measured once for a model (docs/policies.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from statistics import fmean
from typing import TypeAlias

from h2o_flexgen.core.model_spec import ModelSpec

ByHead: TypeAlias = "tuple[tuple[float, ...], ...]"  # (layers with KV, KV heads)
TOLERANCE = 0.01  # between a budget and the mean of its shares


@dataclass(frozen=True)
class HeadBudgets:
    model: str = field(compare=False)  # the model's name, for people
    source: str = field(compare=False)  # what they were measured on, for people
    budgets: tuple[float, ...]  # of the whole model, ascending
    shares: tuple[ByHead, ...]  # at each of them
    file: str = field(default="", compare=False)  # that they were read from, for people

    def __post_init__(self) -> None:
        if not self.budgets or len(self.budgets) != len(self.shares):
            raise ValueError(f"head budgets have {len(self.budgets)} budgets and shares for {len(self.shares)}; give as many")
        if list(self.budgets) != sorted(set(self.budgets)) or not 0 < self.budgets[0] <= self.budgets[-1] <= 1:
            raise ValueError(f"the budgets of head budgets are {list(self.budgets)}; give them ascending, above 0 and up to 1")
        for budget, by_head in zip(self.budgets, self.shares):
            _check(budget, by_head, self.shape)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers with KV, and KV heads of each."""
        return shape_of(self.shares)

    @cached_property
    def checksum(self) -> str:
        """Identifies the budgets, by whatever names they go."""
        return blake2b(repr((self.budgets, self.shares)).encode(), digest_size=8).hexdigest()

    def as_json(self) -> dict[str, str]:
        """What a report says instead of all shares."""
        return {"model": self.model, "source": self.source, "checksum": self.checksum}

    def refuse_other(self, spec: ModelSpec) -> None:
        """Refuses a model of another shape."""
        wanted = len(spec.kv_layers), spec.kv_heads
        if self.shape != wanted:
            these = f"head budgets {self.file}" if self.file else "the head budgets"
            raise ValueError(
                f"{these} are of {self.model}, {self.shape[0]} layers of {self.shape[1]} KV heads, but {spec.name} "
                f"has {wanted[0]} layers of {wanted[1]}; measure them for this model"
            )

    def at(self, budget: float) -> ByHead:
        """The shares at a budget of the whole model, between those that were measured in proportion."""
        known = {0.0: _filled(self.shape, 0.0), **dict(zip(self.budgets, self.shares))}
        known.setdefault(1.0, _filled(self.shape, 1.0))
        return _between(known, budget)


def shape_of(shares: Sequence[ByHead]) -> tuple[int, int]:
    """Layers and heads of the shares at the first budget."""
    return len(shares[0]), len(shares[0][0]) if shares[0] else 0


def _check(budget: float, by_head: ByHead, shape: tuple[int, int]) -> None:
    layers, heads = shape
    if len(by_head) != layers or any(len(of_layer) != heads for of_layer in by_head) or not heads:
        raise ValueError(f"head budgets at {budget:g} are not {layers} layers of {heads} heads; measure them anew")
    shares = [*chain.from_iterable(by_head)]
    if not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"head budgets at {budget:g} have a share outside 0 to 1; measure them anew")
    if abs(fmean(shares) - budget) > TOLERANCE:
        raise ValueError(f"head budgets at {budget:g} have shares that are {fmean(shares):.3f} on average; measure them anew")


def _filled(shape: tuple[int, int], share: float) -> ByHead:
    return ((share,) * shape[1],) * shape[0]


def _between(known: Mapping[float, ByHead], budget: float) -> ByHead:
    steps: Sequence[float] = sorted(known)
    place = bisect_left(steps, budget)
    if steps[place] == budget:
        return known[budget]
    low, high = steps[place - 1], steps[place]
    part = (budget - low) / (high - low)
    pairs = zip(known[low], known[high], strict=True)
    return tuple(tuple((1 - part) * one + part * other for one, other in zip(*layer, strict=True)) for layer in pairs)
