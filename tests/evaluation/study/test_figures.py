"""The figures of a study on what is made for them: laws whose exponent is known, sets that can be counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from h2o_flexgen.evaluation.study.readers import (
    Gone,
    even_scores,
    fit_power_law,
    heaviest_found,
    held_after,
    jaccard,
    share_of_heaviest,
    sorted_scores,
    still_held,
    survival,
)


@pytest.mark.parametrize("exponent", [0.3, 1.0, 2.2])
def test_a_power_law_has_its_exponent(exponent: float) -> None:
    law = fit_power_law(5.0 * np.arange(1, 400) ** -exponent)
    assert (law.exponent, law.scale, law.r_squared) == pytest.approx((exponent, 5.0, 1.0))


def test_around_a_power_law_its_exponent_is_found_and_the_rest_is_seen() -> None:
    ranks, noise = np.arange(1, 2000), np.random.default_rng(1).normal(0, 0.2, 1999)
    law = fit_power_law(ranks**-0.8 * np.exp(noise))
    assert law.exponent == pytest.approx(0.8, abs=0.02)
    assert 0.9 < law.r_squared < 0.97
    assert fit_power_law(np.exp(-0.1 * ranks[:200])).r_squared < 0.8  # another law than this


def test_tokens_that_got_nothing_are_left_out_of_a_fit() -> None:
    scores = np.concatenate((np.arange(1, 50) ** -1.5, np.zeros(20)))
    assert fit_power_law(scores).exponent == pytest.approx(1.5)
    with pytest.raises(ValueError, match="2 tokens got any attention, and a power law needs 3; give a longer text"):
        fit_power_law(np.array([2.0, 1.0, 0.0]))


def test_equal_scores_have_no_slope() -> None:
    assert fit_power_law(np.ones(9)).exponent == pytest.approx(0.0, abs=1e-12)


def test_scores_are_sorted_and_shared_out() -> None:
    scores = np.array([[1.0, 4.0, 3.0, 2.0], [0.0, 0.0, 8.0, 2.0]])
    assert sorted_scores(scores).tolist() == [[4, 3, 2, 1], [8, 2, 0, 0]]
    assert share_of_heaviest(sorted_scores(scores), 0.5).tolist() == [0.7, 1.0]
    assert share_of_heaviest(sorted_scores(scores), 0.01).tolist() == [0.4, 0.8], "one token at least"


def test_even_attention_gives_the_first_tokens_most() -> None:
    matrix = np.tril(np.ones((30, 30))) / np.arange(1, 31)[:, None]
    np.testing.assert_allclose(even_scores(30), matrix.sum(0))


def test_overlap_is_what_both_hold_of_what_either_holds() -> None:
    one, other = np.zeros((2, 2, 6), dtype=bool), np.zeros((2, 2, 6), dtype=bool)
    one[0, 0, [0, 1, 2]] = one[0, 1, [3, 4]] = one[1, :, 0] = True
    other[0, 0, [1, 2, 3]] = other[0, 1, [3, 4]] = other[1, :, 5] = True
    assert jaccard(one, other).tolist() == [(2 / 4 + 1) / 2, 0.0]
    assert jaccard(one, one).tolist() == [1.0, 1.0]


def test_heaviest_found_asks_only_for_the_heaviest() -> None:
    held = np.array([[[True, True, False, False, True]]])
    scores = np.array([[[5.0, 1.0, 4.0, 3.0, 2.0]]])
    assert heaviest_found(held, scores, 1).tolist() == [1.0]
    assert heaviest_found(held, scores, 4).tolist() == [0.5]


def random_gone(tokens: int, prompt_len: int) -> Gone:
    """No two heads alike; some tokens are never gone."""
    generator, place = np.random.default_rng(3), np.arange(tokens)
    stay = generator.geometric(0.15, (2, 3, tokens)) - 1
    return np.minimum(np.maximum(place + 1 + stay, prompt_len), tokens + 1).astype(np.int32)


def test_a_window_lets_all_go_at_one_age() -> None:
    tokens, window, prompt_len = 50, 8, 20
    gone = np.minimum(np.maximum(np.arange(tokens) + 1 + window, prompt_len), tokens + 1)[None, None].astype(np.int32)
    assert survival(gone, prompt_len).tolist() == [1.0] * window + [0.0] * (tokens - prompt_len - window)
    assert still_held(gone, prompt_len, window).tolist() == [0.0]
    assert still_held(gone, prompt_len, 2) == pytest.approx((window - 2) / window)


def test_survival_is_the_share_that_stays_from_age_to_age() -> None:
    tokens, prompt_len = 40, 12
    gone, alive, expected = random_gone(tokens, prompt_len), 1.0, []
    for age in range(tokens - prompt_len):
        held_before = stays = 0
        for layer, head in np.ndindex(gone.shape[:2]):
            for token in range(prompt_len, tokens - age):
                could_go = age == 0 or held_after(gone, token + age)[layer, head, token]
                held_before += int(could_go)
                stays += int(could_go and held_after(gone, token + age + 1)[layer, head, token])
        alive *= stays / held_before if held_before else 1.0
        expected.append(alive)
    np.testing.assert_allclose(survival(gone, prompt_len), expected)


def test_still_held_follows_what_is_held_at_every_time() -> None:
    tokens, prompt_len, later = 40, 12, 5
    gone = random_gone(tokens, prompt_len)
    now = np.stack([held_after(gone, read) for read in range(prompt_len, tokens - later + 1)])
    then = np.stack([held_after(gone, read + later) for read in range(prompt_len, tokens - later + 1)])
    np.testing.assert_allclose(still_held(gone, prompt_len, later), (now & then).sum((0, 2, 3)) / now.sum((0, 2, 3)))
