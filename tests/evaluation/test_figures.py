"""Figures: means, their standard errors, and how they stand to those of the full cache."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest

from h2o_flexgen.evaluation.cells import Figure, mean, of_exponents, of_means, ratio_of_sums

FULL, OWN = [1.0, 0.5, 0.75, 1.0, 0.25], [0.5, 0.5, 0.75, 0.75, 0.0]


def test_a_mean_has_the_standard_error_of_its_examples() -> None:
    figure = mean("rouge1", OWN)
    assert (figure.value, figure.count, figure.examples) == (fmean(OWN), 5, tuple(OWN))
    assert figure.error == pytest.approx(stdev(OWN) / math.sqrt(5))
    assert mean("rouge1", [0.3]).error is None


def test_a_figure_is_read_as_it_was_written() -> None:
    for figure in (mean("kl", OWN, "a panel"), mean("kl", OWN, "", "depth", "5 %"), Figure("kl", 0.0, None, 1)):
        assert Figure.of_json(figure.as_json()) == figure


def test_what_varies_in_both_alike_is_no_error_of_their_relation() -> None:
    relation = of_means([value / 2 for value in FULL], FULL)
    assert relation is not None
    assert (relation.ratio, relation.error) == (pytest.approx(0.5), pytest.approx(0.0, abs=1e-12))
    relation = of_exponents([value + 0.1 for value in FULL], FULL)
    assert relation is not None
    assert (relation.ratio, relation.error) == (pytest.approx(math.exp(0.1)), pytest.approx(0.0, abs=1e-12))


def test_nothing_stands_to_nothing_or_to_other_examples() -> None:
    assert of_means(OWN, [0.0] * 5) is None
    assert of_means(OWN, FULL[:-1]) is None
    assert of_exponents(OWN, FULL[:-1]) is None


def test_a_ratio_of_sums_weighs_examples_by_their_size() -> None:
    ratio, error = ratio_of_sums([1.0, 6.0], [1.0, 3.0])
    assert ratio == 7 / 4
    assert error == pytest.approx(stdev([1 - 7 / 4, 6 - 3 * 7 / 4]) / math.sqrt(2) / 2)
