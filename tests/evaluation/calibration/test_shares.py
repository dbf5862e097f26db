"""Which share each head has where all compete for one budget."""

from __future__ import annotations

import numpy as np
import pytest

from h2o_flexgen.calibration.calibration import shares_at


def test_the_tokens_of_highest_score_are_kept_whichever_head_has_them() -> None:
    scores = np.zeros((2, 2, 4), dtype=np.float32)
    scores[0, 1] = 0.9, 0.8, 0.7, 0.6
    scores[1, 0, 2] = 0.75
    np.testing.assert_array_equal(shares_at(4 / 16, scores), [[0, 0.75], [0.25, 0]])


def test_every_head_keeps_the_first_and_the_newest_tokens() -> None:
    """Of 100 tokens at 20 % these are 4 and 2; all else goes to the head with scores."""
    scores = np.zeros((3, 1, 100), dtype=np.float32)
    scores[1, 0, 4:98] = 1
    np.testing.assert_allclose(shares_at(0.2, scores)[:, 0], [0.06, 0.48, 0.06])


def test_of_equal_scores_the_earlier_one_is_kept() -> None:
    np.testing.assert_array_equal(shares_at(0.5, np.ones((2, 1, 2), dtype=np.float32)), [[1], [0]])


@pytest.mark.parametrize("budget", [0.02, 0.15, 0.7, 1.0])
@pytest.mark.parametrize("tokens", [16, 77])
def test_all_heads_together_keep_the_budget(budget: float, tokens: int) -> None:
    scores = np.random.default_rng(tokens).random((5, 3, tokens), dtype=np.float32)
    shares = shares_at(budget, scores)
    assert shares.mean() == pytest.approx(budget, abs=0.5 / scores.size + 1e-9) and 0 <= shares.min() <= shares.max() <= 1
