"""Slots: the arithmetic that planner, stores and cache share, for every policy of the table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as draw

from h2o_flexgen.kv.policies import POLICIES
from h2o_flexgen.kv.slots import Slots
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.workload import Batch

LENGTHS = draw.lists(draw.integers(1, 40), min_size=1, max_size=6)
SLOTS = {"heavy": {"heavy": 5}, "local": {"recent": 5}, "streaming": {"recent": 5, "sinks": 1}, "full": {}}


def slots_of(name: str, lengths: list[int], gen_len: int, **options: object) -> Slots:
    plan = Plan.create(kv_policy=name, **{**SLOTS.get(name, {"heavy": 3, "recent": 3}), **options})
    return plan.policy.slots(Batch(tuple(range(len(lengths))), tuple(lengths)), gen_len)


@pytest.mark.parametrize("name", POLICIES)
@given(lengths=LENGTHS, gen_len=draw.integers(1, 20))
def test_what_a_step_holds_and_changes_fits_into_the_capacity(name: str, lengths: list[int], gen_len: int) -> None:
    slots = slots_of(name, lengths, gen_len)
    for step in range(gen_len):
        first, last = slots.changed(step)
        assert 0 <= first < last <= slots.capacity
        if step:
            newest = slots.held(step)  # stands behind all that are held, until one of them goes
            assert newest < slots.capacity


@pytest.mark.parametrize("name", POLICIES)
@given(lengths=LENGTHS, gen_len=draw.integers(2, 20))
def test_all_that_a_step_holds_was_stored_by_those_before(name: str, lengths: list[int], gen_len: int) -> None:
    """A store that moves only what changed loses nothing."""
    slots, stored = slots_of(name, lengths, gen_len), set[int]()
    for step in range(gen_len):
        if step:
            assert set(range(slots.held(step))) <= stored
        stored |= set(range(*slots.changed(step)))


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "full"])
@given(lengths=LENGTHS, gen_len=draw.integers(2, 20))
def test_rows_hold_their_budget_once_they_have_filled_it(name: str, lengths: list[int], gen_len: int) -> None:
    slots = slots_of(name, lengths, gen_len)
    for step in range(1, gen_len):
        for length, budget, count in zip(lengths, slots.budgets, slots.counts(step)):
            assert count == min(length + step - 1, budget.slots)


@given(lengths=LENGTHS, gen_len=draw.integers(2, 20))
def test_of_a_selected_prompt_all_that_is_generated_is_kept(lengths: list[int], gen_len: int) -> None:
    slots = slots_of("h2o", lengths, gen_len, hh_prompt_only=True)
    for step in range(1, gen_len):
        assert slots.counts(step) == tuple(min(length, 6) + step - 1 for length in lengths)
        assert not slots.evicts_at(step)


@given(lengths=LENGTHS, gen_len=draw.integers(2, 20))
def test_full_holds_all_and_writes_the_slot_of_every_rows_newest_token(lengths: list[int], gen_len: int) -> None:
    slots = slots_of("full", lengths, gen_len)
    for step in range(1, gen_len):
        newest = [length + step - 1 for length in lengths]
        assert slots.counts(step) == tuple(newest)
        assert slots.changed(step) == (min(newest), max(newest) + 1)
        assert not slots.evicts_at(step)
    assert slots.capacity == max(lengths) + gen_len - 1, "the last token generated is never stored"


def test_the_table_names_each_policy_by_its_own_name() -> None:
    assert all(policy.name == name for name, policy in POLICIES.items())
