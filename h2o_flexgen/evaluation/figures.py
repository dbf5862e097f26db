"""Figures: what is measured in one cell, each with its standard error and with what it was measured on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev

DIGITS = 9  # of values of single examples, as they are written down


@dataclass(frozen=True)
class Figure:
    """Of a whole cell, or (`by`) of those of its examples that have something in common: by depth, at 50 %."""

    name: str
    value: float
    error: float | None  # standard error; none of a single example
    count: int  # examples
    panel: str = ""  # what is not to be added up: questions that were visible, and hidden ones
    by: str = ""
    at: str = ""
    examples: tuple[float, ...] = ()  # their values, in their order, so that two cells can be compared pair by pair

    def as_json(self) -> dict[str, object]:
        return {key: value for key, value in asdict(self).items() if value not in ("", ())}

    @classmethod
    def of_json(cls, fields: Mapping[str, object]) -> Figure:
        return cls(**{**fields, "examples": tuple(fields.get("examples", ()))})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Relation:
    """Of a figure to the same one of the full cache, on the same examples."""

    ratio: float
    error: float | None


def mean(name: str, values: Sequence[float], panel: str = "", by: str = "", at: str = "") -> Figure:
    """Single values are kept of what is a whole."""
    rounded = tuple(round(value, DIGITS) for value in values)
    return Figure(name, fmean(values), standard_error(values), len(values), panel, by, at, () if by else rounded)


def standard_error(values: Sequence[float]) -> float | None:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def ratio_of_sums(parts: Sequence[float], wholes: Sequence[float]) -> tuple[float, float | None]:
    """And its standard error: that of what the ratio leaves over in each example."""
    ratio = math.fsum(parts) / math.fsum(wholes)
    left = standard_error([part - ratio * whole for part, whole in zip(parts, wholes)])
    return ratio, None if left is None else left / fmean(wholes)


def of_means(values: Sequence[float], of_full: Sequence[float]) -> Relation | None:
    if len(values) != len(of_full) or not any(of_full):
        return None
    return Relation(*ratio_of_sums(values, of_full))


def of_exponents(values: Sequence[float], of_full: Sequence[float]) -> Relation | None:
    """Of perplexities, whose examples are mean losses."""
    if len(values) != len(of_full):
        return None
    differences = [value - full for value, full in zip(values, of_full)]
    ratio, error = math.exp(fmean(differences)), standard_error(differences)
    return Relation(ratio, None if error is None else ratio * error)
