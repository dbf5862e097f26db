"""Answers are judged, and counted, against figures that were computed by hand."""

from __future__ import annotations

import pytest

from h2o_flexgen.apps.data_wrangling.answers import (
    AnswerCounts,
    AnswerRecord,
    JudgedAnswer,
    Verdict,
    accuracy,
    answers_of,
    judged,
    number_of,
)
from h2o_flexgen.apps.data_wrangling.data_sets import BEGINS, EXACT
from h2o_flexgen.apps.data_wrangling.questions import PromptedQuestion, Question


def answers(pairs: list[tuple[str, str | None]], match: str = EXACT, is_yes_or_no: bool = True) -> list[JudgedAnswer]:
    rows = [PromptedQuestion(str(place), Question(place, "", expected), "") for place, (expected, _) in enumerate(pairs)]
    records = {str(place): AnswerRecord(text) for place, (_, text) in enumerate(pairs)}
    return answers_of(rows, records, match, is_yes_or_no)


def test_figures_are_those_that_were_computed_by_hand() -> None:
    """Of ten rows Yes is right for five: said for two, No for two, nothing of use for one. Of the others one is said to be Yes,
    three are No, and one has no answer."""
    right_for_five = [("Yes", " Yes"), ("Yes", "yes \n"), ("Yes", " No"), ("Yes", "No"), ("Yes", " Maybe")]
    found = answers([*right_for_five, ("No", " yes"), ("No", "no"), ("No", " NO "), ("No", "No"), ("No", None)])
    counts = AnswerCounts.of(found)
    assert counts == AnswerCounts(true_yes=2, false_yes=1, true_no=3, false_no=2, unclear_yes=1, unclear_no=1)
    assert counts.precision == pytest.approx(2 / 3) and counts.recall == pytest.approx(2 / 5)
    assert counts.f1 == pytest.approx(0.5) and accuracy(found) == pytest.approx(0.5)
    assert (number_of(found, Verdict.UNCLEAR), number_of(found, Verdict.NOT_THERE)) == (1, 1)
    assert counts.as_published() == {"precision": 0.5, "recall": 0.4, "f1": pytest.approx(2 * 0.5 * 0.4)}


def test_f1_is_the_harmonic_mean_where_the_original_divides_by_one() -> None:
    counts = AnswerCounts(true_yes=1, false_yes=4, false_no=3)  # precision 0.2 and recall 0.25
    assert counts.f1 == pytest.approx(2 * 0.2 * 0.25 / 0.45)
    assert counts.as_published()["f1"] == pytest.approx(0.1)


def test_what_has_no_value_is_none() -> None:
    silent = AnswerCounts(true_no=3, false_no=2)
    assert (silent.precision, silent.recall, silent.f1) == (None, 0.0, 0.0)
    nothing_to_find = AnswerCounts(true_no=3)
    assert (nothing_to_find.precision, nothing_to_find.recall, nothing_to_find.f1) == (None, None, None)
    assert accuracy([]) is None


@pytest.mark.parametrize(
    ("text", "expected", "exact", "begins"),
    [
        (" Yes", "Yes", Verdict.RIGHT, Verdict.RIGHT),
        ("YES\t", "Yes", Verdict.RIGHT, Verdict.RIGHT),
        ("No, because", "No", Verdict.UNCLEAR, Verdict.RIGHT),
        ("Nothing", "No", Verdict.UNCLEAR, Verdict.UNCLEAR),
        ("no", "Yes", Verdict.WRONG, Verdict.WRONG),
        ("", "No", Verdict.UNCLEAR, Verdict.UNCLEAR),
    ],
)
def test_yes_and_no_are_taken_as_the_rule_says(text: str, expected: str, exact: Verdict, begins: Verdict) -> None:
    assert judged(text, expected, EXACT, True) is exact and judged(text, expected, BEGINS, True) is begins


@pytest.mark.parametrize(
    ("text", "exact", "begins"),
    [
        (" New York", Verdict.RIGHT, Verdict.RIGHT),
        ("new york city", Verdict.WRONG, Verdict.RIGHT),
        ("new yorkshire", Verdict.WRONG, Verdict.WRONG),
        ("boston", Verdict.WRONG, Verdict.WRONG),
        ("  ", Verdict.UNCLEAR, Verdict.UNCLEAR),
    ],
)
def test_other_answers_are_right_wrong_or_empty(text: str, exact: Verdict, begins: Verdict) -> None:
    assert judged(text, "new york", EXACT, False) is exact and judged(text, "new york", BEGINS, False) is begins
