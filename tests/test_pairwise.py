"""Cases are few, and all pairs meet in them that a test needs: a pair that is lost is a test that is not run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from tests.helpers.pairwise import MOST, Name, covering, in_turn, most_of, on_devices

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


def cases_of(params: list[Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Those of a default run, and those that are slow."""
    marked = [one for one in params if not isinstance(one, dict)]
    return [one for one in params if isinstance(one, dict)], [case for one in marked for case in one.values]


def test_a_default_run_has_each_value_and_most_pairs_in_few_of_all_cases() -> None:
    default, slow = cases_of(most_of(CHOICES))
    assert [*default, *slow] == covering(CHOICES) and len(default) < 0.75 * len(default + slow)
    pairs = 0
    for one, other in itertools.combinations(CHOICES, 2):
        pairs += len({(of(case, one), of(case, other)) for case in default})
        assert {of(case, one) for case in default} == {*CHOICES[one]}
    every = sum(len(CHOICES[one]) * len(CHOICES[other]) for one, other in itertools.combinations(CHOICES, 2))
    assert MOST * every <= pairs < every


def test_what_hardly_any_pair_needs_is_in_a_default_run() -> None:
    """However many pairs have met before."""
    default, _ = cases_of(most_of(CHOICES, lambda pair: pair.get("large") != 6 or pair.get("small") is True, share=0.1))
    assert any(case["large"] == 6 for case in default)


def test_all_cases_run_on_a_gpu() -> None:
    params = on_devices({"small": (True, False), "large": range(5)})
    on_a_gpu = [one for one in params if not isinstance(one, dict) and [mark.name for mark in one.marks] == ["cuda"]]
    both = covering({"small": (True, False), "large": range(5), "device": ("cpu", "pretended")})
    assert [case for one in on_a_gpu for case in one.values] == [{**case, "device": "cuda"} for case in both]


@pytest.mark.parametrize("nth", [1, 3, 5])
def test_no_value_is_on_one_device_alone_where_devices_take_turns(nth: int) -> None:
    """The last choice alternates, as devices would."""
    tiers = {"weights": range(3), "kv": range(3), "hidden": range(3), "attend_on": ("device", "host")}
    default, slow = cases_of(in_turn(tiers, nth))
    for name, values in tiers.items():
        met = {(case[name], case["device"]) for case in default + slow if case["device"] != "cuda"}
        assert met == {*itertools.product(values, ("cpu", "pretended"))}
    assert len({(case["attend_on"], case["device"]) for case in default}) == 4


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_default_run_is_on_both_devices_where_they_take_turns(nth: int) -> None:
    default, _ = cases_of(in_turn({"plan": range(6)}, nth))
    assert [case["device"] for case in default][:2] == ["cpu", "pretended"]
