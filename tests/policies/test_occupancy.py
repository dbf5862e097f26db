"""Slots: the arithmetic that planner, stores and cache share, for every policy of the table."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as draw

from h2o_flexgen.core.workload import Batch
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies import POLICIES
from h2o_flexgen.policies.occupancy import Occupancy
from tests.helpers.probes import OF_NO_MODEL

DRAWN = settings(max_examples=50)  # of each policy
LENGTHS = draw.lists(draw.integers(1, 40), min_size=1, max_size=6)
SLOTS: dict[str, dict[str, Any]] = {
    "heavy": {"heavy": 5},
    "local": {"recent": 5},
    "streaming": {"recent": 5, "sinks": 1},
    "full": {},
    "kvzap": {"heavy": 3, "recent": 3, "probe": OF_NO_MODEL},
}


def slots_of(name: str) -> dict[str, Any]:
    sinks = {"sinks": 1} if POLICIES[name].usual_sinks else {}
    return SLOTS.get(name, {"heavy": 3, "recent": 3, **sinks})


def occupancy_of(name: str, lengths: list[int], gen_len: int, **options: object) -> Occupancy:
    plan = Plan.create(kv_policy=name, **{**slots_of(name), **options})
    return plan.policy.occupancy(Batch(tuple(range(len(lengths))), tuple(lengths)), gen_len)


@pytest.mark.parametrize("name", POLICIES)
@DRAWN
@given(lengths=LENGTHS, gen_len=draw.integers(1, 20))
def test_what_a_step_holds_and_changes_fits_into_the_capacity(name: str, lengths: list[int], gen_len: int) -> None:
    occupancy = occupancy_of(name, lengths, gen_len)
    for step in range(gen_len):
        first, last = occupancy.changed(step)
        assert 0 <= first < last <= occupancy.capacity
        if step:
            newest = occupancy.held(step)  # stands behind all that are held, until one of them goes
            assert newest < occupancy.capacity


@pytest.mark.parametrize("name", POLICIES)
@DRAWN
@given(lengths=LENGTHS, gen_len=draw.integers(2, 20))
def test_all_that_a_step_holds_was_stored_by_those_before(name: str, lengths: list[int], gen_len: int) -> None:
    """A store that moves only what changed loses nothing."""
    occupancy, stored = occupancy_of(name, lengths, gen_len), set[int]()
    for step in range(gen_len):
        if step:
            assert set(range(occupancy.held(step))) <= stored
        stored |= set(range(*occupancy.changed(step)))


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "full"])
@DRAWN
@given(lengths=LENGTHS, gen_len=draw.integers(2, 20))
def test_rows_hold_their_budget_once_they_have_filled_it(name: str, lengths: list[int], gen_len: int) -> None:
    occupancy = occupancy_of(name, lengths, gen_len)
    for step in range(1, gen_len):
        for length, budget, count in zip(lengths, occupancy.budgets, occupancy.counts(step)):
            assert count == min(length + step - 1, budget.slots)


@given(lengths=LENGTHS, gen_len=draw.integers(2, 20))
def test_of_a_selected_prompt_all_that_is_generated_is_kept(lengths: list[int], gen_len: int) -> None:
    occupancy = occupancy_of("h2o", lengths, gen_len, hh_prompt_only=True)
    for step in range(1, gen_len):
        assert occupancy.counts(step) == tuple(min(length, 6) + step - 1 for length in lengths)
        assert not occupancy.evicts_at(step)


@given(lengths=LENGTHS, gen_len=draw.integers(2, 20))
def test_full_holds_all_and_writes_the_slot_of_every_rows_newest_token(lengths: list[int], gen_len: int) -> None:
    occupancy = occupancy_of("full", lengths, gen_len)
    for step in range(1, gen_len):
        newest = [length + step - 1 for length in lengths]
        assert occupancy.counts(step) == tuple(newest)
        assert occupancy.changed(step) == (min(newest), max(newest) + 1)
        assert not occupancy.evicts_at(step)
    assert occupancy.capacity == max(lengths) + gen_len - 1, "the last token generated is never stored"


# -- texts that live on --------------------------------------------------------------------------------------------------


def next_block(name: str, seen: int, length: int, gen_len: int, context: int = 200) -> Occupancy:
    plan = Plan.create(kv_policy=name, **slots_of(name))
    return plan.policy.occupancy(Batch((0,), (length,), (seen,) if seen else (), context), gen_len)


TURNS = draw.lists(draw.tuples(draw.integers(1, 12), draw.integers(1, 6)), min_size=1, max_size=6)


@pytest.mark.parametrize("name", POLICIES)
@DRAWN
@given(turns=TURNS)
def test_a_block_begins_with_what_the_one_before_has_left(name: str, turns: list[tuple[int, int]]) -> None:
    seen, held, rooms, stored = 0, (0,), set[tuple[int, int]](), set[int]()
    for length, gen_len in turns:
        occupancy = next_block(name, seen, length, gen_len)
        assert occupancy.counts(0) == held
        for step in range(gen_len):
            assert set(range(occupancy.held(step))) <= stored
            first, last = occupancy.changed(step)
            assert 0 <= first < last <= occupancy.capacity
            stored |= set(range(first, last))
        seen, held = seen + length + gen_len - 1, occupancy.counts(gen_len)
        assert held == (min(seen, occupancy.budgets[0].slots),)
        rooms.add((occupancy.capacity, occupancy.journal_capacity))
    assert len(rooms) == 1, "the room of a text that lives on is that of its first block"


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "full"])
@DRAWN
@given(turns=TURNS)
def test_turns_hold_what_one_long_text_holds(name: str, turns: list[tuple[int, int]]) -> None:
    seen = 0
    for length, gen_len in turns:
        occupancy, whole = next_block(name, seen, length, gen_len), occupancy_of(name, [seen + length], gen_len)
        assert [occupancy.counts(step) for step in range(1, gen_len)] == [whole.counts(step) for step in range(1, gen_len)]
        assert [occupancy.evicts_at(step) for step in range(gen_len)] == [whole.evicts_at(step) for step in range(gen_len)]
        seen += length + gen_len - 1


def test_a_share_of_a_text_that_lives_on_is_one_of_what_it_may_grow_to() -> None:
    policy = Plan.create(kv_policy="h2o", kv_budget=0.25).policy
    assert [policy.occupancy(Batch((0,), (n,), (9 * n,), 80), 5).budgets[0].slots for n in (1, 8)] == [20, 20]
    with pytest.raises(ValueError, match="for a text of 3 tokens"):
        policy.occupancy(Batch((0,), (1,), (), 3), 5)


# ------------------------------------------------------------------------------------------------------------------------


def test_the_table_names_each_policy_by_its_own_name() -> None:
    assert all(policy.name == name for name, policy in POLICIES.items())
