"""The tokens of a row are counted as they come, and anew when the row starts again."""

from __future__ import annotations

from collections import Counter
from random import Random

from h2o_flexgen.sampling.logits import History


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
