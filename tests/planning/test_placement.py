"""Placement is exact to one item, reported as it is, and says what a schedule has to move."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.core.site import DEVICE, DISK, HOST, TIERS, Site
from h2o_flexgen.planning.placement import HeldKV, Placement, place, placed_shares, spread, traffic
from h2o_flexgen.planning.plan import Plan, Shares
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.schedule.check import check
from tests.planning.worlds import block_of, tiny_spec

SIZES = st.lists(st.one_of(st.integers(0, 10), st.integers(0, 1000), st.just(1000)), min_size=1, max_size=60)
PERCENTS = st.tuples(st.integers(0, 100), st.integers(0, 100)).filter(lambda percents: sum(percents) <= 100)
BLOCK = block_of([[5, 4], [4, 4], [3, 2], [2]])


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(SIZES, PERCENTS)
def test_behind_every_item_each_tier_is_within_one_item_of_its_share(sizes: list[int], percents: tuple[int, int]) -> None:
    shares = Shares(percents[0] / 100, percents[1] / 100)
    placed, total = dict.fromkeys(TIERS, 0), 0
    for at, (tier, size) in enumerate(zip(spread(sizes, shares), sizes, strict=True)):
        placed[tier] += size
        total += size
        for each in TIERS:
            assert abs(placed[each] - shares.of(each) * total) <= max(sizes[: at + 1]) + 1e-6


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(SIZES, PERCENTS)
def test_a_tier_that_is_to_have_nothing_gets_nothing(sizes: list[int], percents: tuple[int, int]) -> None:
    shares = Shares(percents[0] / 100, percents[1] / 100)
    empty = {tier for tier, percent in zip(TIERS, (*percents, 100 - sum(percents)), strict=True) if percent == 0}
    assert not empty & set(spread(sizes, shares))


@pytest.mark.parametrize(("shares", "tier"), [(Shares(1, 0), DEVICE), (Shares(0, 1), HOST), (Shares(0, 0), DISK)])
def test_a_tier_that_is_to_have_all_gets_all(shares: Shares, tier: str) -> None:
    assert spread([3, 0, 1, 4, 1, 5], shares) == (tier,) * 6


def test_equal_items_alternate() -> None:
    assert spread([1] * 6, Shares(0.5, 0.5)) == (DEVICE, HOST) * 3
    assert spread([1] * 4, Shares(0.25, 0.5)) == (HOST, DEVICE, DISK, HOST)


def test_nothing_is_spread_over_nothing() -> None:
    assert spread([], Shares(0.5, 0.5)) == ()


def test_every_tensor_is_placed_once_and_a_tied_head_with_the_embedding() -> None:
    spec = tiny_spec(tied=True)
    placement = place(spec, Plan(weights=Shares(0.3, 0.3)), BLOCK)
    assert placement.weights.keys() == spec.tensors.keys()
    assert "head" not in placement.weights


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(PERCENTS, st.booleans(), st.sampled_from([2, 300]))
def test_tables_larger_than_any_layer_rest_where_they_need_no_buffer(percents: tuple[int, int], tied: bool, vocab: int) -> None:
    spec, shares = tiny_spec(blocks=9, tied=tied, vocab=vocab), Shares(percents[0] / 100, percents[1] / 100)
    sizes, placed = spec.weight_sizes, place(spec, Plan(weights=shares), BLOCK).weights
    total, fastest = sum(sizes.values()), next(tier for tier in TIERS if shares.of(tier))
    assert spec.outsized == (tuple(name for name in ("embed", "head") if name in sizes) if vocab > 2 else ())
    if sum(sizes[name] for name in spec.outsized) <= shares.of(fastest) * total and fastest != DISK:
        assert {placed[name] for name in spec.outsized} <= {fastest}
    for name in spec.outsized:  # on disk, or wherever it came to lie among all others, only where no share had room for it
        others = sum(sizes[other] for other in spec.outsized if other != name)
        if max(shares.device, shares.host) * total >= sizes[name] + others:
            assert placed[name] != DISK
    largest = max(sizes.values())
    for tier in TIERS:
        on_tier = sum(size for name, size in sizes.items() if placed[name] == tier)
        assert abs(on_tier - shares.of(tier) * total) <= largest + 1e-6
        assert shares.of(tier) or not on_tier


def test_kv_is_placed_by_layer_and_batch_for_layers_that_have_any() -> None:
    placement = place(tiny_spec(blocks=2), Plan(kv=Shares(0.5, 0.5)), BLOCK)
    assert list(placement.kv) == [(layer, batch) for layer in (1, 3) for batch in range(4)]
    assert set(placement.kv.values()) == {DEVICE, HOST}


def test_hidden_states_are_placed_by_batch() -> None:
    assert place(tiny_spec(), Plan(hidden=Shares(0, 1)), BLOCK).hidden == (HOST,) * 4


@pytest.mark.parametrize("percent", [20, 26, 37, 50, 80])
def test_weights_are_within_one_tensor_of_the_share_in_the_model_and_layers_are_even(percent: int) -> None:
    spec = tiny_spec(blocks=12, width=16)
    plan = Plan(weights=Shares(0, percent / 100))
    placement = place(spec, plan, BLOCK)
    largest = max(tensor.nbytes for tensor in spec.tensors.values())
    on_host = sum(tensor.nbytes for name, tensor in spec.tensors.items() if placement.weights[name] == HOST)
    assert abs(on_host - spec.weight_bytes * percent / 100) <= largest
    for start in range(1, 1 + 2 * 8, 2):  # any four blocks in a row
        layers = spec.layers[start : start + 8]
        here = sum(each.nbytes for layer in layers for _, each in layer.tensors if placement.weights[each.name] == HOST)
        assert abs(here - sum(layer.nbytes for layer in layers) * percent / 100) <= 2 * largest


def test_placed_shares_are_counted_in_bytes() -> None:
    spec, block = tiny_spec(blocks=1, width=4, vocab=10, tied=False), block_of([[4, 4], [2]], gen_len=3)
    placement = Placement(
        weights=dict.fromkeys(spec.tensors, DISK) | {"embed": DEVICE, "head": HOST, "final.norm": HOST},
        kv={(1, 0): HOST, (1, 1): DEVICE},  # 2 rows x 6 slots, 1 row x 4 slots
        hidden=(DEVICE, DISK),  # 2 rows x 4 tokens, 1 row x 2 tokens
    )
    total = 40 + 4 * 16 + 4 + 2 * 64 + 40 + 4
    expected = (4000 / total, 4400 / total, 25.0, 75.0, 80.0, 0.0)
    assert placed_shares(HeldKV.of(spec, Plan(), block), placement) == tuple(round(value, 2) for value in expected)


@pytest.mark.parametrize("percent", [(100, 0, 100, 0, 100, 0), (0, 100, 0, 100, 0, 100), (0, 0, 0, 0, 0, 0)])
def test_whole_shares_are_placed_as_asked(percent: tuple[float, ...]) -> None:
    spec, plan = tiny_spec(), Plan().with_percent(percent)
    assert placed_shares(HeldKV.of(spec, plan, BLOCK), place(spec, plan, BLOCK)) == percent


def test_moves_name_the_layers_that_have_weights_on_disk_and_host() -> None:
    spec = tiny_spec(blocks=1, tied=True)
    placement = Placement(
        weights=dict.fromkeys(spec.tensors, DEVICE) | {"embed": DISK, "0.up": HOST, "0.down": DISK},
        kv={(1, batch): HOST for batch in range(4)},
        hidden=(DEVICE, HOST, DISK, DISK),
    )
    made = traffic(spec, Plan(buffers=3), BLOCK, placement, Site(accelerator=True))
    assert (made.steps, made.layers, made.batches, made.buffers) == (3, 4, 4, 3)
    assert made.weights_on_disk == {0, 2, 3}  # the tied head reads the embedding again
    assert made.weights_on_host == {2}
    assert [made.moves_hidden(batch) for batch in range(4)] == [False, True, True, True]
    assert made.moves_kv(1, 0) and not made.kv_on_disk(1, 0)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(PERCENTS, PERCENTS, PERCENTS, st.booleans(), st.integers(1, 3), st.sampled_from(sorted(SCHEDULES)))
def test_schedules_of_placed_plans_pass_the_check(
    weights: tuple[int, int], kv: tuple[int, int], hidden: tuple[int, int], accelerator: bool, buffers: int, schedule: str
) -> None:
    plan = Plan(buffers=buffers).with_percent((*weights, *kv, *hidden))
    plan = plan.at(Site(accelerator))
    spec = tiny_spec()
    check(SCHEDULES[schedule](traffic(spec, plan, BLOCK, place(spec, plan, BLOCK), Site(accelerator))), spec.layer_names)
