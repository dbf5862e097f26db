"""Cases are few, and all pairs meet in them that a test needs: a pair that is lost is a test that is not run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from tests.helpers.pairwise import Name, covering

CHOICES: Mapping[Name, Any] = {
    "large": range(7),
    "other": "abcde",
    ("two", "together"): ((1, "one"), (2, "two"), (3, "three")),
    "small": (True, False),
}


def of(case: Mapping[str, Any], name: Name) -> Any:
    return case[name] if isinstance(name, str) else tuple(case[each] for each in name)


@pytest.mark.parametrize("seed", range(5))
def test_all_pairs_that_are_needed_meet_in_few_cases(seed: int) -> None:
    def needs(pair: Mapping[Name, Any]) -> bool:
        return pair.keys() != {"large", "other"} or pair["large"] < 3

    cases = covering(CHOICES, seed, needs=needs)
    for one, other in itertools.combinations(CHOICES, 2):
        met = {(of(case, one), of(case, other)) for case in cases}
        pairs = itertools.product(CHOICES[one], CHOICES[other])
        assert [pair for pair in pairs if needs(dict(zip((one, other), pair))) and pair not in met] == []
    assert len(cases) <= 3 * 5 + 4 * 3 + 1, "those that all of the others need, and hardly one more"
    assert sum(case["other"] == "a" for case in cases) > len(cases) / 5, "what is free is the first"
