"""The grid: which settings there are, what each asks of its policy, and what none of them can hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.workload import Batch
from h2o_flexgen.evaluation.grid import BudgetShare, BudgetSlots, Grid, Setting
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.policies import POLICIES
from h2o_flexgen.policies.head_budgets import HeadBudgets
from tests.helpers.probes import OF_NO_MODEL, probe_for
from tests.planning.worlds import tiny_spec

HEADS = HeadBudgets("tiny", "a text", (0.2,), (((0.6, 0.04), (0.12, 0.04)),))
EVICTING = sorted(name for name in POLICIES if name != "full")
PROBES = {"kvzap": OF_NO_MODEL}


def sized(weight_codec: str) -> ModelSpec:
    """A model with plain weights."""
    return tiny_spec().written_as(weight_codec, "plain", "exact")


def sized_packed(weight_codec: str) -> ModelSpec:
    """A model whose own weights are packed."""
    return tiny_spec().packed("group8" if weight_codec == "plain" else weight_codec)


def labels(grid: Grid) -> list[str]:
    return [f"{setting.label} {setting.amount.label}" for setting in grid.settings(sized)]


def test_where_all_is_kept_the_full_cache_is_run_once_for_all_policies() -> None:
    grid = Grid(("h2o", "full", "local"), (BudgetShare(20), BudgetShare(100), BudgetShare(50)))
    assert labels(grid) == ["full 100 %", "h2o 20 %", "h2o 50 %", "local 20 %", "local 50 %"]
    assert labels(Grid(("h2o",), (BudgetSlots(8), BudgetSlots(None)))) == ["full full", "h2o 8"]


def test_the_full_cache_is_not_run_where_it_is_not_asked_for() -> None:
    assert labels(Grid(("h2o",), (BudgetShare(20),))) == ["h2o 20 %"]
    assert labels(Grid(("full", "h2o"), (BudgetShare(20),))) == ["full 100 %", "h2o 20 %"]


def test_a_recall_keeps_everything_and_attends_the_budgets_of_it() -> None:
    grid = Grid(("full", "h2o"), (BudgetShare(100), BudgetShare(20), BudgetShare(10)), recalls=True)
    assert labels(grid) == ["full 100 %", "full, recall 20 %", "full, recall 10 %", "h2o 20 %", "h2o 10 %"]
    full, a_fifth, *_ = grid.settings(sized)
    assert a_fifth.plan(Plan()).policy.recall == 0.2 and a_fifth.full == full and full.plan(Plan()).policy.recall == 1
    assert (full.is_reference, a_fifth.is_reference) == (True, False) and full.identity() != a_fifth.identity()
    with pytest.raises(ValueError, match="8 slots are no share of what is kept"):
        Grid(("full",), (BudgetSlots(8),), recalls=True).settings(sized)[1].plan(Plan())


def test_every_number_of_bits_has_settings_of_its_own() -> None:
    grid = Grid(("full", "h2o"), (BudgetShare(20),), kv_codecs=("plain", "group4"), weight_codecs=("plain", "group8"))
    assert labels(grid) == [
        "full 100 %",
        "h2o 20 %",
        "full, KV 4 bits 100 %",
        "h2o, KV 4 bits 20 %",
        "full, weights 8 bits 100 %",
        "h2o, weights 8 bits 20 %",
        "full, KV 4 bits, weights 8 bits 100 %",
        "h2o, KV 4 bits, weights 8 bits 20 %",
    ]
    plan = grid.settings(sized)[-1].plan(Plan(gpu_batch_size=7))
    assert (plan.kv_codec, plan.weight_codec, plan.kv_policy, plan.gpu_batch_size) == ("group4", "group8", "h2o", 7)


def test_packed_weights_are_multiplied_in_every_way_and_others_exactly() -> None:
    grid = Grid(("full",), (BudgetShare(100),), weight_codecs=("plain", "group4"), computes=("exact", "int8"))
    assert labels(grid) == ["full 100 %", "full, weights 4 bits 100 %", "full, weights 4 bits, products int8 100 %"]
    exact, rounded = grid.settings(sized)[1:]
    assert rounded.plan(Plan()) == replace(exact.plan(Plan()), compute="int8")
    assert rounded.identity() != exact.identity() and rounded.as_json()["compute"] == "int8"
    assert labels(replace(grid, computes=("int8",))) == [labels(grid)[0], labels(grid)[2]]


def test_weights_that_are_stored_packed_are_multiplied_in_every_way_as_they_are() -> None:
    """Others are compared with exact products of what is stored."""
    settings = Grid(("full",), (BudgetShare(100),), computes=("exact", "int8")).settings(sized_packed)
    assert [(one.compute, one.is_reference) for one in settings] == [("exact", True), ("int8", False)]


def test_products_that_none_of_the_weights_allow_are_refused() -> None:
    with pytest.raises(
        ValueError, match="compute='int8' is for weights that are packed into whole numbers, and those of tiny "
    ):
        Grid(("full",), (BudgetShare(100),), computes=("exact", "int8")).settings(sized)


@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.parametrize("slots", [8, 13])
def test_a_size_is_what_the_policy_then_holds(policy: str, slots: int) -> None:
    made = Setting(policy, BudgetSlots(slots), probe=PROBES.get(policy)).plan(Plan()).policy
    assert made.occupancy(Batch((0,), (100,)), 50).counts(1) == (slots,)


@pytest.mark.parametrize("policy", EVICTING)
def test_a_share_is_one_of_prompt_and_generation(policy: str) -> None:
    made = Setting(policy, BudgetShare(20), probe=PROBES.get(policy)).plan(Plan()).policy
    place_of_the_newest = policy == "h2o-flexgen"
    assert made.occupancy(Batch((0,), (100,)), 50).counts(1) == (30 - place_of_the_newest,)


def test_half_of_a_size_is_heavy_and_half_recent() -> None:
    options = Setting("h2o", BudgetSlots(64)).options
    assert (options.heavy, options.recent) == (32, 32)


def test_an_option_goes_to_the_policies_that_take_it_and_shows_in_their_rows() -> None:
    grid = Grid(("full", "h2o", "local", "streaming"), (BudgetSlots(12),), beside=(("sinks", 2), ("hh_prompt_only", True)))
    settings = grid.settings(sized)
    assert [setting.label for setting in settings] == [
        "full",
        "h2o, sinks 2, hh-prompt-only",
        "local, hh-prompt-only",
        "streaming, sinks 2, hh-prompt-only",
    ]
    for setting in settings[1:]:
        assert setting.plan(Plan()).policy.occupancy(Batch((0,), (100,)), 50).counts(1) == (12,)


def test_head_budgets_are_settings_of_their_own_beside_equal_ones() -> None:
    grid = Grid(("full", "h2o"), (BudgetShare(20),), beside=(("sinks", 2),), heads=(None, HEADS))
    assert labels(grid) == ["full 100 %", "h2o, sinks 2 20 %", "h2o, head budgets, sinks 2 20 %"]
    full, equal, differing = grid.settings(sized)
    assert (full.plan(Plan()).head_budgets, equal.plan(Plan()).head_budgets) == (None, None)
    assert differing.plan(Plan()).head_budgets == HEADS and differing.full == equal.full == full
    assert differing.identity() == {**equal.identity(), "head_budgets": HEADS.checksum}
    assert differing.as_json()["head_budgets"] == HEADS.as_json()


def test_every_level_of_heads_must_hold_what_is_protected() -> None:
    Setting("h2o", BudgetShare(20), beside=(("sinks", 2),)).check(Plan(), tiny_spec(), [(40, 10)])
    with pytest.raises(ValueError, match=r"protects .* \(this is h2o, head budgets, sinks 2 at 20 %"):
        Setting("h2o", BudgetShare(20), beside=(("sinks", 2),), heads=HEADS).check(Plan(), tiny_spec(), [(40, 10)])


def test_a_probe_of_another_model_is_refused_before_anything_is_measured() -> None:
    Setting("kvzap", BudgetShare(20), probe=probe_for(tiny_spec())).check(Plan(), tiny_spec(), [(40, 10)])
    with pytest.raises(ValueError, match="the probe is of a made-up model, 1 layers of 1 KV heads over 1 values, but tiny"):
        Setting("kvzap", BudgetShare(20), probe=OF_NO_MODEL).check(Plan(), tiny_spec(), [(40, 10)])


@pytest.mark.parametrize(
    ("policy", "amount"), [("streaming", BudgetSlots(4)), ("snapkv", BudgetSlots(1)), ("h2o", BudgetShare(1))]
)
def test_what_a_policy_cannot_hold_is_refused_with_its_place_in_the_grid(
    policy: str, amount: BudgetShare | BudgetSlots
) -> None:
    with pytest.raises(ValueError, match=f"this is {policy} at {amount.label}; leave one of them out"):
        Setting(policy, amount).check(Plan(), tiny_spec(), [(40, 10)])


@pytest.mark.parametrize("percent", [0, -5, 100.5, float("nan")])
def test_a_share_is_above_nothing_and_at_most_all(percent: float) -> None:
    with pytest.raises(ValueError, match="give above 0 and at most 100"):
        BudgetShare(percent)


def test_a_size_is_one_slot_or_more() -> None:
    with pytest.raises(ValueError, match="a KV size of 0 slots is not possible"):
        BudgetSlots(0)
