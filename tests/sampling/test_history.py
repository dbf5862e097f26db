"""The tokens of a row are counted as they come, and anew when the row starts again."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from h2o_flexgen.sampling.sampler import History


def counted(history: History) -> dict[int, float]:
    counts = history.counts
    assert [*counts.places] == counts.ids.tolist()
    return dict(zip(counts.ids.tolist(), counts.times.tolist()))


def test_counts_are_those_of_counting_anew() -> None:
    random, seen = Random(3), [5, 7, 5]
    history = History(seen, 3)
    for _ in range(300):
        seen.extend(random.choices(range(150), k=random.randrange(3)))
        assert counted(history) == {token: Counter(seen[3:])[token] for token in seen}


def test_a_row_that_starts_again_is_counted_anew() -> None:
    seen = [1, 2, 3, 3]
    history = History(seen, 2)
    assert counted(history) == {1: 0, 2: 0, 3: 2}
    del seen[2:]
    assert counted(history) == {1: 0, 2: 0}
    seen.append(2)
    assert counted(history) == {1: 0, 2: 1}


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_followers_are_the_tokens_that_transformers_forbids(length: int) -> None:
    """Also of a row that starts again on the way, and goes on otherwise."""
    random, seen = Random(length), [1, 2]
    history, forbid = History(seen, 2), NoRepeatNGramLogitsProcessor(length)
    found = []
    for step in range(120):
        if step == 60:
            del seen[2:]
        expected = forbid(torch.tensor([seen]), torch.zeros(1, 5))[0]
        assert {*history.followers(length - 1)} == {*torch.nonzero(expected < 0)[:, 0].tolist()}
        found.append(len(history.followers(length - 1)))
        seen.extend(random.choices(range(5), k=random.randrange(1, 3)))
    assert max(found) > 1 and len(seen) > 60
