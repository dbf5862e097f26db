"""Policies: the slot arithmetic that planner, stores and cache share, for every policy of the table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as draw

from h2o_flexgen.kv.full import Full
from h2o_flexgen.kv.policy import POLICIES
from h2o_flexgen.planning.workload import Batch

BATCHES = draw.lists(draw.integers(1, 40), min_size=1, max_size=6).map(
    lambda lengths: Batch(tuple(range(len(lengths))), tuple(lengths))
)


@pytest.mark.parametrize("name", POLICIES)
@given(batch=BATCHES, gen_len=draw.integers(1, 20))
def test_what_a_step_holds_and_changes_fits_into_the_capacity(name: str, batch: Batch, gen_len: int) -> None:
    policy = POLICIES[name]
    capacity = policy.capacity(batch, gen_len)
    for step in range(gen_len):
        first, last = policy.changed(batch, step)
        assert 0 <= first < last <= capacity
        assert step == 0 or policy.held(batch, step) <= capacity


@pytest.mark.parametrize("name", POLICIES)
@given(batch=BATCHES, gen_len=draw.integers(2, 20))
def test_all_that_a_step_holds_was_stored_by_those_before(name: str, batch: Batch, gen_len: int) -> None:
    """A store that moves only what changed loses nothing."""
    policy, stored = POLICIES[name], set[int]()
    for step in range(gen_len):
        if step:
            assert set(range(policy.held(batch, step))) <= stored
        stored |= set(range(*policy.changed(batch, step)))


def test_the_table_names_each_policy_by_its_own_name() -> None:
    assert all(policy.name == name for name, policy in POLICIES.items())


@given(batch=BATCHES, gen_len=draw.integers(2, 20))
def test_full_writes_the_slot_of_every_rows_newest_token(batch: Batch, gen_len: int) -> None:
    for step in range(1, gen_len):
        newest = [length + step - 1 for length in batch.lengths]
        assert Full().changed(batch, step) == (min(newest), max(newest) + 1)
    assert Full().capacity(batch, gen_len) == max(batch.lengths) + gen_len - 1, "the last token generated is never stored"
