"""The linear program: its numbers are those of pricing, its answers fit, and no plan of a coarse grid is better."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.site import DEVICE, DISK, HOST, Site
from h2o_flexgen.core.workload import Block
from h2o_flexgen.planning import linear_program
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.footprint import MemoryLimits
from h2o_flexgen.planning.linear_program import PLACED_FIELDS, PLACES, Case, seconds_at, solve, solve_thoroughly
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan, Shares
from h2o_flexgen.planning.predict import sum_of_steps
from h2o_flexgen.planning.pricing import Pricing
from tests.helpers.pairwise import most_of
from tests.planning.test_pricing import MACHINE, on
from tests.planning.worlds import block_of, of_unlike_blocks, tiny_spec

UNIFORM, RAGGED = [[8, 8]] * 4, [[8, 7], [6, 6], [5]]
SLOW = replace(
    MACHINE,
    disk_read_per_s=2e7,
    disk_write_per_s=1e7,
    host_to_device_per_s=1e8,
    device_to_host_per_s=1e8,
    task_seconds=1e-6,
    visit_seconds={},
    disk_both=1.0,
)
SOME = (0.0, 0.25, 0.5, 0.75, 1.0)


def case_of(
    accelerator: bool = False,
    lengths: list[list[int]] | None = None,
    spec: ModelSpec | None = None,
    limits: MemoryLimits | None = None,
    machine: Machine = SLOW,
    gen_len: int = 9,
    **options: object,
) -> Case:
    block: Block = block_of(lengths or UNIFORM, gen_len)
    plan = Plan.create(**{"gpu_batch_size": 2, "num_gpu_batches": len(block.batches), **options})
    spec = spec or tiny_spec(blocks=5, width=32)
    return Case(
        replace(spec, kv_codec=plan.kv_codec),
        plan,
        block,
        on(machine, accelerator),
        limits or MemoryLimits(),
        Site(accelerator),
    )


def limited(case: Case, share: float, host_share: float | None = None) -> Case:
    """The fastest tier has room for so large a share of the data beside what is held whatever the plan; a slower one too."""
    data, whole = sum(case.bytes_of.values()), case.whole
    room = {tier: whole.total(tier) for tier in case.tiers}
    room[case.tiers[0]] += int(share * data) - data
    host = room[HOST] if case.tiers[0] == HOST else None if host_share is None else room[HOST] + int(host_share * data)
    return replace(case, limits=MemoryLimits(device=room.get(DEVICE), host=host))


def test_without_a_solver_all_is_there_but_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may have torch and what it brings, and nothing else."""
    assert "pulp" not in vars(linear_program)
    monkeypatch.setattr(linear_program, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pulp, .* is not installed; .*--percent"):
        solve([case_of()])


# -- what it is made of --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("lengths", [UNIFORM, RAGGED], ids=["uniform", "ragged"])
@pytest.mark.parametrize("options", [{}, {"schedule": "flexgen_barrier"}, {"kv_policy": "h2o", "heavy": 2, "recent": 3}])
@pytest.mark.parametrize("spec", [None, of_unlike_blocks(6, single=3, slices=4)], ids=["alike", "unlike"])
def test_its_coefficients_are_what_pricing_says_at_every_corner(
    accelerator: bool, lengths: list[list[int]], options: dict[str, object], spec: ModelSpec | None
) -> None:
    """What is found from one and two blocks of the model is so for all, also where the first are of another kind."""
    case = case_of(accelerator, lengths, spec, **options)
    for kind, tier in case.corners:
        plan = case.with_shares(**{kind: PLACES[tier]})
        pricing = Pricing(BlockPlan.of(case.spec, plan, case.block, Site(accelerator)), case.machine, averaged=True)
        for number, step in enumerate(case.steps):
            base, more = case.base[number], case.more[kind, tier][number]
            found = {name: base.get(name, 0.0) + more.get(name, 0.0) for name in {*base, *more}}
            exact = pricing.bounds(step)
            for name in {*found, *exact}:
                assert found.get(name, 0.0) == pytest.approx(exact.get(name, 0.0), rel=1e-9, abs=1e-12), (
                    kind,
                    tier,
                    step,
                    name,
                )


def test_the_weights_of_its_steps_count_every_step_once() -> None:
    case = case_of(gen_len=40)
    assert case.weights_of_steps[0] == 1 and sum(case.weights_of_steps) == pytest.approx(40)
    seconds = [3.0 + 2 * step for step in case.steps[1:]]
    mean = sum(weight * one for weight, one in zip(case.weights_of_steps[1:], seconds))
    assert (
        mean
        == pytest.approx(sum_of_steps(case.steps[1:], seconds))
        == pytest.approx(sum(3.0 + 2 * step for step in range(1, 40)))
    )


@pytest.mark.parametrize("accelerator", [False, True])
def test_its_seconds_are_near_those_of_pricing_for_what_is_really_placed(accelerator: bool) -> None:
    """Whole tensors and whole batches are placed: so they are near, and not the same."""
    case = case_of(accelerator, [[8, 8]] * 8, tiny_spec(blocks=12, width=32))
    for percent in ((0, 50, 0, 50, 0, 50), (25, 25, 50, 0, 100, 0), (50, 25, 0, 75, 50, 50)):
        plan = case.plan.with_percent(percent)
        plan = plan.at(Site(accelerator))
        pricing = Pricing(case.planned(plan), case.machine)
        exact = sum(weight * max(pricing.bounds(step).values()) for weight, step in zip(case.weights_of_steps, case.steps))
        assert seconds_at(case, plan) == pytest.approx(exact, rel=0.1)


# -- what it answers -----------------------------------------------------------------------------------------------------


def shares_of(tiers: tuple[str, ...]) -> list[Shares]:
    """In quarters; in halves where there are three tiers."""
    if DEVICE not in tiers:
        return [Shares(0.0, host / 4) for host in range(5)]
    return [Shares(device / 2, host / 2) for device, host in product(range(3), range(3)) if device + host <= 2]


GRID = {
    "accelerator": (False, True),
    "share": (0.55, 0.7, 0.85, 0.95),
    "buffers": (2, 1),
    "lengths": (((8, 8),) * 8, ((20, 20),) * 2),
}


@pytest.mark.parametrize("values", most_of(GRID))
def test_no_plan_of_a_grid_that_fits_is_better(values: dict[str, Any]) -> None:
    lengths, spec = [list(batch) for batch in values["lengths"]], tiny_spec(blocks=8, width=32)
    case = limited(case_of(values["accelerator"], lengths, spec, buffers=values["buffers"]), values["share"], 0.6)
    every = (dict(zip(PLACED_FIELDS, shares)) for shares in product(shares_of(case.tiers), repeat=3))
    fitting = [plan for kinds in every if case.fits(plan := replace(case.plan, **kinds))]
    (answer,) = solve_thoroughly([case])
    assert case.fits(answer.plan) and answer.plan.percent != case.with_shares().percent, "something has to go"
    assert fitting and answer.seconds <= 1.02 * min(seconds_at(case, plan) for plan in fitting), "but for whole per cent"


def test_kv_on_disk_takes_memory_where_what_was_read_stays_there() -> None:
    """The more of it is there, the more: what else is held is the same then."""
    case = case_of(False, [[1000]] * 2, tiny_spec(blocks=10, width=64), kv_recall=0.1, kv_recall_reuse=True)
    assert case.read_before > 0 == replace(case, plan=case.plan.without_reuse()).read_before
    plans = [case.with_shares(kv=Shares(0.0, on_host)) for on_host in (0.2, 0.5, 0.8)]
    first, *others = (case.anchored(plan, case.footprint(plan))[HOST] for plan in plans)
    assert others == pytest.approx([first] * 2, abs=0.05 * case.read_before)


@pytest.mark.parametrize("share", [0.6, 0.75])
def test_rounds_go_on_until_an_answer_fits(share: float) -> None:
    """Also where the first ones end at plans that whole layers make too large, or that go in a circle."""
    lengths, spec = [[1000, 1000]] * 2, tiny_spec(blocks=8, width=64)
    case = limited(case_of(False, lengths, spec, kv_recall=0.1, kv_recall_reuse=True), share)
    every = product((0.0, 0.5, 1.0), (0.0, 0.1, 0.2), (0.0, 1.0))
    plans = (case.with_shares(**dict(zip(PLACED_FIELDS, (Shares(0.0, one) for one in hosts)))) for hosts in every)
    (answer,) = solve([case])
    assert case.fits(answer.plan) and answer.seconds <= 1.02 * min(seconds_at(case, plan) for plan in plans if case.fits(plan))


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("share", [0.35, 0.5, 0.7, 0.9, 1.0])
def test_its_answers_fit(accelerator: bool, share: float) -> None:
    case = limited(case_of(accelerator, RAGGED), share, share)
    for answer in solve([case]):
        assert case.fits(answer.plan)
        assert answer.seconds == pytest.approx(seconds_at(case, answer.plan))
        assert all(float(share).is_integer() for share in answer.plan.percent)


@pytest.mark.parametrize("accelerator", [False, True])
def test_what_fits_is_not_offloaded(accelerator: bool) -> None:
    for case in (case_of(accelerator), limited(case_of(accelerator), 1.0)):
        (answer,) = solve([case])
        fastest = Shares(1.0, 0.0) if accelerator else Shares(0.0, 1.0)
        assert (answer.plan.weights, answer.plan.kv, answer.plan.hidden) == (fastest,) * 3


def test_of_equal_promises_the_one_that_offloads_least_is_taken() -> None:
    """Where products are the limit whatever is read, reading less is promised nothing for, and waits less."""
    slow = replace(SLOW, flops_per_s={"float32": ((2, 1e5), (4, 1e5))}, disk_read_per_s=1e12, disk_write_per_s=1e12)
    case = limited(case_of(machine=slow), 0.8)
    (answer,) = solve([case])
    as_resident = replace(answer.plan, weights=replace(answer.plan.weights, host=answer.plan.weights.host + 0.05))
    everything_off = answer.plan.with_percent((0, 0, 0, 0, 0, 0))
    assert seconds_at(case, everything_off) == pytest.approx(answer.seconds), "nothing depends on what is read"
    assert answer.plan.weights.host >= 0.5 and not case.fits(as_resident)


def test_cases_that_are_solved_together_are_answered_as_if_alone() -> None:
    spec = tiny_spec(blocks=5, width=256)  # all is many pages: else a per cent of it may be none
    places = product((False, True), (UNIFORM, RAGGED))
    cases = [limited(case_of(accelerator, lengths, spec), 0.8) for accelerator, lengths in places]
    together = solve_thoroughly(cases)
    alone = [answer for case in cases for answer in solve_thoroughly([case])]
    assert [answer.seconds for answer in together] == pytest.approx([answer.seconds for answer in alone], rel=0.01)


@pytest.mark.parametrize("accelerator", [False, True])
def test_weights_of_a_checkpoint_may_be_read_from_a_disk_that_is_full(accelerator: bool) -> None:
    """They lie there already."""
    case = case_of(accelerator, spec=tiny_spec(blocks=8, width=32))
    read = case.footprint(case.with_shares(weights=PLACES[DISK]))
    (answer,) = solve(
        [replace(case, limits=MemoryLimits(read.total(DEVICE) if accelerator else None, read.total(HOST), disk=0))]
    )
    assert answer.plan.weights.disk == 1 and answer.plan.kv.disk + answer.plan.hidden.disk == pytest.approx(0, abs=1e-9)


def test_what_fits_nowhere_has_no_answer() -> None:
    assert solve([replace(case_of(), limits=MemoryLimits(host=1000, disk=1000))]) == []
