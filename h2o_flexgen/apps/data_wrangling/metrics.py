"""Precision, recall, F1 and accuracy from counts, and beside them what the original makes of the same answers.

An answer that is neither Yes nor No is not a false Yes: it is missed where Yes would be right, and wrong for the accuracy. The
original counts it as a false Yes where No would be right, and divides by at least 1, which makes its F1 too small where
precision and recall add up to less than 1. What has no value here, because it would be 0 / 0, is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from h2o_flexgen.apps.data_wrangling.answers import JudgedAnswer, Verdict


@dataclass(frozen=True)
class AnswerCounts:
    """Answers by what they say and what is right: a "true No" says No where No is right."""

    true_yes: int = 0
    false_yes: int = 0
    true_no: int = 0
    false_no: int = 0
    unclear_yes: int = 0  # no Yes and no No, or no answer, where Yes would be right
    unclear_no: int = 0

    @classmethod
    def of(cls, answers: Sequence[JudgedAnswer]) -> AnswerCounts:
        names = {
            Verdict.RIGHT: ("true_yes", "true_no"),
            Verdict.WRONG: ("false_no", "false_yes"),
            Verdict.UNCLEAR: ("unclear_yes", "unclear_no"),
            Verdict.NOT_THERE: ("unclear_yes", "unclear_no"),
        }
        return cls(**Counter(names[one.said][0 if one.is_yes else 1] for one in answers))

    @property
    def missed(self) -> int:
        """Rows where Yes would be right and was not said."""
        return self.false_no + self.unclear_yes

    @property
    def precision(self) -> float | None:
        return _share(self.true_yes, self.true_yes + self.false_yes)

    @property
    def recall(self) -> float | None:
        return _share(self.true_yes, self.true_yes + self.missed)

    @property
    def f1(self) -> float | None:
        return _share(2 * self.true_yes, 2 * self.true_yes + self.false_yes + self.missed)

    def as_published(self) -> dict[str, float]:
        """The figures as the original computes them."""
        precision = self.true_yes / max(1, self.true_yes + self.false_yes + self.unclear_no)
        recall = self.true_yes / max(1, self.true_yes + self.missed)
        return {"precision": precision, "recall": recall, "f1": 2 * precision * recall / max(1, precision + recall)}


def accuracy(answers: Sequence[JudgedAnswer]) -> float | None:
    return _share(sum(one.said is Verdict.RIGHT for one in answers), len(answers))


def number_of(answers: Sequence[JudgedAnswer], said: Verdict) -> int:
    return sum(one.said is said for one in answers)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
