"""Labels: what a head for classification says of a text, and how its scores become probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp

from h2o_flexgen.core.hints import shown

KIND = "ForSequenceClassification"  # ends the name of the architecture of such a checkpoint
TOGETHER, APART, NUMBERS = "single_label_classification", "multi_label_classification", "regression"
PROBLEMS = (TOGETHER, APART, NUMBERS)  # as configs have them
MOST_LABELS = 1 << 16


@dataclass(frozen=True)
class Labels:
    names: tuple[str, ...]
    problem: str  # one of PROBLEMS
    pad: int | None = None  # the token that fills texts up: those at the end of a text do not count

    @classmethod
    def of(cls, names: object, problem: object, pad: object, where: str) -> Labels:
        """Reads what a config says: `names` by number, `problem`, if it is said, and the token of pads."""
        if not isinstance(names, Mapping) or not 0 < len(names) <= MOST_LABELS:
            raise ValueError(f"id2label of {where} is {shown(names)}; it names the labels by number, {MOST_LABELS} at most")
        by_number = {str(number): str(name) for number, name in names.items()}
        if by_number.keys() != {str(number) for number in range(len(names))}:
            raise ValueError(f"id2label of {where} has the numbers {shown([*by_number])}; they go from 0 without a gap")
        if problem not in (None, *PROBLEMS):
            raise ValueError(f"problem_type of {where} is {shown(problem)}; known are {', '.join(PROBLEMS)}")
        usual = APART if len(names) == 1 else TOGETHER
        told = usual if problem is None or (problem == TOGETHER and len(names) == 1) else str(problem)
        return cls(tuple(by_number[str(number)] for number in range(len(names))), told, pad if type(pad) is int else None)

    def shares(self, scores: Sequence[float]) -> tuple[float, ...]:
        """The probabilities of the labels: of one of them, or of each by itself. Those of a regression are its numbers."""
        if self.problem == NUMBERS:
            return tuple(scores)
        if self.problem == APART:
            return tuple(map(_sigmoid, scores))
        most = max(scores)
        weights = [exp(score - most) for score in scores]
        total = sum(weights)
        return tuple(weight / total for weight in weights)

    def last_place(self, ids: Sequence[int]) -> int:
        """The place of the token of a text that is classified: the last one that is no pad."""
        return next((place for place in reversed(range(len(ids))) if ids[place] != self.pad), 0)


def _sigmoid(score: float) -> float:
    return 1 / (1 + exp(-score)) if score >= 0 else exp(score) / (1 + exp(score))
