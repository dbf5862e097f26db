"""Requests dealt to processes: each goes to one, loads are near each other, and those that share a prefix stay together."""

from __future__ import annotations

from random import Random

import pytest

from h2o_flexgen.core.prefix_groups import NO_GROUP
from h2o_flexgen.core.workload import CUTS, Workload, dealt, longest_part


@pytest.mark.parametrize("seed", range(30))
def test_everybody_is_dealt_once_and_no_part_gets_much_more_than_its_share(seed: int) -> None:
    random = Random(seed)
    work = [random.randint(1, 100) for _ in range(random.randint(1, 60))]
    groups = [random.choice([NO_GROUP, 0, 1, 2]) for _ in work] if random.random() < 0.5 else None
    parts = random.randint(1, 5)
    each = dealt(work, parts, groups)
    assert len(each) == parts and sorted(place for places in each for place in places) == list(range(len(work)))
    assert all(places == sorted(places) for places in each)
    share = sum(work) / parts
    most = max(sum(work[place] for place in places) for places in each)
    assert most <= share + max(max(work), share / CUTS)


def test_small_groups_stay_together_and_large_ones_do_not_go_to_one_part_alone() -> None:
    groups = [0] * 4 + [NO_GROUP] * 40 + [1] * 4
    each = dealt([1] * 48, 2, groups)
    assert [sum(group in {groups[place] for place in places} for places in each) for group in (0, 1)] == [1, 1]
    assert {len(places) for places in dealt([1] * 48, 2, [0] * 48)} == {24}


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_part_has_room_for_every_part(seed: int) -> None:
    random = Random(seed)
    whole = Workload(tuple(random.randint(1, 50) for _ in range(random.randint(3, 30))), 4)
    longest = longest_part(whole, 3).prompt_lens
    for places in dealt(whole.prompt_lens, 3):
        own = sorted((whole.prompt_lens[place] for place in places), reverse=True)
        assert len(own) <= len(longest) and all(one <= most for one, most in zip(own, longest))
    assert longest_part(whole, 1) == whole
