"""Figures: the values measured in one cell, each with its standard error and its number of examples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev

DIGITS = 9  # kept of the value of a single example


@dataclass(frozen=True)
class Figure:
    """A value for all examples of a cell, or only for those where `by` (such as depth) has the value `at` (such as 50 %)."""

    name: str
    value: float
    error: float | None  # standard error; a single example has none
    count: int  # examples
    panel: str = ""  # figures of different panels are never added up: questions that were visible, and hidden ones
    by: str = ""
    at: str = ""
    examples: tuple[float, ...] = ()  # their values in order, so that two cells can be compared pair by pair

    def as_json(self) -> dict[str, object]:
        return {key: value for key, value in asdict(self).items() if value not in ("", ())}

    @classmethod
    def of_json(cls, fields: Mapping[str, object]) -> Figure:
        return cls(**{**fields, "examples": tuple(fields.get("examples", ()))})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Relation:
    """A figure divided by the same figure of the full cache, on the same examples."""

    ratio: float
    error: float | None


def mean(name: str, values: Sequence[float], panel: str = "", by: str = "", at: str = "") -> Figure:
    """The values of single examples are kept only in the figure for the whole cell."""
    rounded = tuple(round(value, DIGITS) for value in values)
    return Figure(name, fmean(values), standard_error(values), len(values), panel, by, at, () if by else rounded)


def standard_error(values: Sequence[float]) -> float | None:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def ratio_of_sums(parts: Sequence[float], wholes: Sequence[float]) -> tuple[float, float | None]:
    """The ratio and its standard error, from the residual of each example against the ratio."""
    ratio = math.fsum(parts) / math.fsum(wholes)
    left = standard_error([part - ratio * whole for part, whole in zip(parts, wholes)])
    return ratio, None if left is None else left / fmean(wholes)


def of_means(values: Sequence[float], of_full: Sequence[float]) -> Relation | None:
    if len(values) != len(of_full) or not any(of_full):
        return None
    return Relation(*ratio_of_sums(values, of_full))


def of_exponents(values: Sequence[float], of_full: Sequence[float]) -> Relation | None:
    """The ratio of two perplexities; their examples are mean losses."""
    if len(values) != len(of_full):
        return None
    differences = [value - full for value, full in zip(values, of_full)]
    ratio, error = math.exp(fmean(differences)), standard_error(differences)
    return Relation(ratio, None if error is None else ratio * error)
