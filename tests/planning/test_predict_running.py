"""Prediction of a running block: what a few passes say of all is near what a simulation of every pass finds."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.predict import ALL_PASSES, BlockPrediction, predict, simulated, step_seconds, stretches
from h2o_flexgen.planning.pricing import Pricing
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from tests.helpers.pairwise import most_of
from tests.planning.test_predict import SLOW_DISK
from tests.planning.test_pricing import on
from tests.planning.worlds import tiny_spec

MIXED, ON_DISK, IN_MEMORY = (30, 20, 30, 40, 50, 50), (0, 0, 0, 0, 0, 50), (0, 100, 0, 100, 0, 100)


def workload(rows: int, longest: int = 40) -> Workload:
    """Prompts of many lengths; most rows end early, and some very late."""
    random = Random(rows)
    return Workload.running(
        [SeatNeed(random.randint(1, 20), min(longest, int(3 * random.paretovariate(1.0)))) for _ in range(rows)]
    )


def planned(rows: int, percent: tuple[float, ...], accelerator: bool = False, **options: object) -> WorkloadPlan:
    shape = {"gpu_batch_size": 8, "num_gpu_batches": 2, "prefill_tokens": 64}
    plan = Plan.create(**{**shape, **options}).with_percent(percent).at(Site(accelerator))
    return WorkloadPlan(tiny_spec(), plan, workload(rows), Site(accelerator))


def every_pass(of: BlockPlan, accelerator: bool) -> list[float]:
    pricing = Pricing(of, on(SLOW_DISK, accelerator))
    passes = [*range(pricing.cost.passes)]
    return step_seconds(simulated(pricing, [*passes, passes[-1]]), of.schedule)[:-1]


PLANS = {
    "accelerator": [False, True],
    "schedule": ["zigzag", "flexgen_barrier"],
    "policy": [(), (("kv_policy", "h2o"), ("heavy", 2), ("recent", 8))],
    "percent": [MIXED, ON_DISK, IN_MEMORY],
}


@pytest.mark.parametrize("values", most_of(PLANS))
def test_a_few_passes_say_about_how_long_all_of_them_take(values: dict[str, Any]) -> None:
    accelerator = values["accelerator"]
    plan = {"schedule": values["schedule"], **dict(values["policy"])}
    of = planned(300, values["percent"], accelerator, **plan).blocks.first
    found, every = BlockPrediction.of(of, on(SLOW_DISK, accelerator)), every_pass(of, accelerator)
    reading = Pricing(of, on(SLOW_DISK, accelerator)).cost.seating.reading
    assert len(every) > 2 * ALL_PASSES
    assert found.prefill_seconds + found.decode_seconds == pytest.approx(sum(every), rel=0.08)
    assert found.prefill_seconds == pytest.approx(sum(every[number] for number in reading), rel=0.15)
    assert found.decode_steps == len(every) - len(reading)


def test_a_short_block_is_simulated_whole() -> None:
    of = planned(12, MIXED).blocks.first
    found, every = BlockPrediction.of(of, on(SLOW_DISK, False)), every_pass(of, False)
    assert len(every) <= ALL_PASSES
    assert found.prefill_seconds + found.decode_seconds == pytest.approx(sum(every))


def test_all_that_rows_may_grow_counts() -> None:
    of = planned(50, MIXED)
    found = predict(of, on(SLOW_DISK, False))
    assert (found.num_prompts, found.generated_tokens) == (50, sum(of.workload.gen_lens or ()))
    assert found.block_seconds == found.total_seconds and found.lane_seconds["read"] > 0


def test_more_seats_in_a_pass_that_waits_for_the_disk_make_more_tokens() -> None:
    machine = on(replace(SLOW_DISK, disk_read_per_s=1e6), False)
    few, many = (predict(planned(200, (0, 0, 0, 100, 0, 100), gpu_batch_size=size), machine) for size in (2, 16))
    assert many.tokens_per_second > 4 * few.tokens_per_second


def test_every_pass_is_in_one_stretch_and_some_of_each_are_simulated() -> None:
    for passes in (1, 2, ALL_PASSES, ALL_PASSES + 1, 40, 1000, 12345):
        found = stretches(passes)
        assert [number for one in found for number in one.passes] == list(range(passes))
        assert all(set(one.simulated) <= set(one.passes) and one.simulated for one in found)
