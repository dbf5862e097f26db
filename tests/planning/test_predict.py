"""Prediction: what is sampled is near what a simulation of every step finds, and equal where all of them are simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.predict import (
    SAMPLED_BLOCKS,
    BlockPrediction,
    predict,
    sampled_blocks,
    sampled_steps,
    step_seconds,
    sum_of_steps,
    with_fewer_blocks,
)
from h2o_flexgen.planning.pricing import Pricing
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.schedule.ops import Op
from tests.planning.test_pricing import MACHINE, on
from tests.planning.worlds import block_of, of_unlike_blocks, tiny_spec

SLOW_DISK = replace(MACHINE, disk_read_per_s=2e6, disk_write_per_s=1e6, task_seconds=1e-5)


def planned(gen_len: int, accelerator: bool = False, **options: object) -> BlockPlan:
    plan = Plan.create(**{"num_gpu_batches": 3, **options}).with_percent((30, 20, 30, 40, 50, 50))
    block = block_of([[8, 7], [6, 6], [5]], gen_len)
    return BlockPlan.of(tiny_spec(), plan.at(Site(accelerator)), block, Site(accelerator))


def workload_plan(plan: Plan, lengths: Sequence[int]) -> WorkloadPlan:
    return WorkloadPlan(tiny_spec(), plan, Workload(tuple(lengths), 4), Site())


def alone(of: WorkloadPlan) -> list[WorkloadPlan]:
    """Each of its blocks as a workload of its own."""
    return [workload_plan(of.plan, [length for batch in one.block.batches for length in batch.lengths]) for one in of.blocks]


def whole(of: BlockPlan, accelerator: bool) -> list[float]:
    pricing = Pricing(of, on(SLOW_DISK, accelerator))
    return step_seconds(pricing.simulated(), of.schedule)


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("policy", [{}, {"kv_policy": "h2o", "heavy": 2, "recent": 20}, {"kv_policy": "local", "recent": 4}])
def test_sampled_steps_add_up_to_about_what_all_of_them_take(
    schedule: str, accelerator: bool, policy: dict[str, object]
) -> None:
    of = planned(60, accelerator, schedule=schedule, **policy)
    found = BlockPrediction.of(of, on(replace(SLOW_DISK, disk_both=2.0), accelerator))
    every = whole(of, accelerator)
    assert len(sampled_steps(of)) <= 7
    assert found.prefill_seconds == pytest.approx(every[0], rel=0.15)
    assert found.decode_seconds == pytest.approx(sum(every[1:]), rel=0.04)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_short_generation_is_simulated_whole(schedule: str) -> None:
    of = planned(5, schedule=schedule)
    found, every = BlockPrediction.of(of, on(SLOW_DISK, False)), whole(of, False)
    assert (found.prefill_seconds, found.decode_seconds) == pytest.approx((every[0], sum(every[1:])))


def test_lanes_are_as_busy_as_their_tasks_take() -> None:
    of = planned(5)
    pricing = Pricing(of, on(SLOW_DISK, False))
    found, trace = BlockPrediction.of(of, on(SLOW_DISK, False)), pricing.simulated()
    for lane, seconds in found.lane_seconds.items():
        own = [span.end - span.start - pricing.latency(span.key.op) for span in trace.spans if span.lane == lane]
        assert seconds == pytest.approx(sum(own))


def test_blocks_add_up_and_alike_ones_count_as_often_as_they_are_there() -> None:
    plan = Plan(gpu_batch_size=2, num_gpu_batches=2).with_percent((0, 50, 0, 100, 0, 100)).folded()
    machine = on(SLOW_DISK, False)
    of = workload_plan(plan, [5] * 11)
    all_of_them, each = predict(of, machine), [predict(one, machine) for one in alone(of)]
    assert (all_of_them.num_prompts, all_of_them.generated_tokens) == (11, 44)
    assert all_of_them.total_seconds == pytest.approx(sum(one.total_seconds for one in each))
    assert all_of_them.peak_bytes["host"] == max(one.peak_bytes["host"] for one in each)
    assert all_of_them.tokens_per_second == pytest.approx(44 / all_of_them.total_seconds)


def test_of_many_blocks_that_differ_a_few_stand_for_all() -> None:
    """Also where one prompt is far longer than all others."""
    plan = Plan(gpu_batch_size=2).with_percent((0, 50, 0, 0, 0, 100)).folded()
    machine = on(SLOW_DISK, False)
    of = workload_plan(plan, [*range(3, 101, 2), 400] * 2 + [17, 17, 19, 19])  # some blocks come twice
    sampled = list(sampled_blocks([(block, 1) for block, _ in of.blocks.alike]))
    assert len(of.blocks) == 52 and len(sampled) == SAMPLED_BLOCKS and sum(times for _, times in sampled) == pytest.approx(50)
    found, each = predict(of, machine), [predict(one, machine) for one in alone(of)]
    assert (found.num_prompts, found.generated_tokens) == (104, 416)
    assert found.prefill_seconds == pytest.approx(sum(one.prefill_seconds for one in each), rel=0.01)
    assert found.decode_seconds == pytest.approx(sum(one.decode_seconds for one in each), rel=0.01)
    for lane, seconds in found.lane_seconds.items():
        assert seconds == pytest.approx(sum(one.lane_seconds[lane] for one in each), rel=0.02)
    assert found.block_seconds == each[0].total_seconds
    assert found.peak_bytes["host"] == max(one.peak_bytes["host"] for one in each)


def test_a_last_block_of_few_rows_does_not_make_the_others_sooner_over() -> None:
    plan = Plan(gpu_batch_size=2, num_gpu_batches=2).with_percent((0, 0, 0, 100, 0, 100)).folded()
    of, machine = workload_plan(plan, [5] * 5), on(SLOW_DISK, False)
    found = predict(of, machine)
    assert found.block_seconds == predict(alone(of)[0], machine).total_seconds < 0.8 * found.total_seconds


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("lengths", [[[8, 7]], [[6, 6]] * 3])
def test_of_very_many_layers_some_stand_for_all(
    accelerator: bool, lengths: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each kind of block its share; what lanes do is that of all."""
    spec, plan = (
        of_unlike_blocks(40, single=4, slices=6),
        Plan(num_gpu_batches=len(lengths)).with_percent((30, 20, 30, 40, 50, 50)),
    )
    of = BlockPlan.of(spec, plan.at(Site(accelerator)), block_of(lengths, 12), Site(accelerator))
    assert with_fewer_blocks(of) is None, "a few hundred layers are simulated as they are"
    for most in ("MOST_VISITS", "SIMULATED_VISITS"):
        monkeypatch.setattr(f"h2o_flexgen.planning.predict.{most}", 60 * len(lengths))
    some, machine = with_fewer_blocks(of), on(SLOW_DISK, accelerator)
    assert some is not None and some.spec.num_blocks <= 10 and len(some.spec.layers) < len(spec.layers) // 3
    found, exact = BlockPrediction.of(of, machine, some), BlockPrediction.of(of, machine)
    assert found.prefill_seconds == pytest.approx(exact.prefill_seconds, rel=0.05)
    assert found.decode_seconds == pytest.approx(exact.decode_seconds, rel=0.05)
    assert found.lane_seconds == pytest.approx(exact.lane_seconds)
    assert len(found.trace.spans) < len(exact.trace.spans) // 3


@pytest.mark.parametrize("comes_and_goes", [False, True])
def test_some_layers_stand_for_all_where_nothing_takes_time(comes_and_goes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    free = Machine("free", "cpu", 0, 0, 0, inf, inf, inf, inf, inf, {"float32": ((1, inf),)}, {}, task_seconds=0.0)
    ((running, _),) = Workload.running([SeatNeed(8, 12)] * 2).alike_blocks(2, 1)
    of = BlockPlan.of(
        of_unlike_blocks(40, single=4, slices=6), Plan(), running if comes_and_goes else block_of([[8, 7]], 12), Site()
    )
    for most in ("MOST_VISITS", "SIMULATED_VISITS"):
        monkeypatch.setattr(f"h2o_flexgen.planning.predict.{most}", 60)
    some = with_fewer_blocks(of)
    assert some is not None
    found = BlockPrediction.of(of, free, some)
    assert found.prefill_seconds == found.decode_seconds == 0.0


def test_what_evictions_cost_begins_where_they_do() -> None:
    machine = replace(on(MACHINE, False), visit_seconds={"eviction": 1.0})
    found = BlockPrediction.of(planned(60, kv_policy="h2o", heavy=2, recent=38), machine)
    assert sampled_steps(planned(60, kv_policy="h2o", heavy=2, recent=38)) == [1, 16, 32, 33, 35, 36, 59]
    steps = [60 - first for first in (33, 35, 36)]  # in which a batch evicts
    assert found.decode_seconds == pytest.approx(2 * sum(steps), rel=0.01), "in both blocks of the model"


def test_what_lies_between_samples_is_on_a_line() -> None:
    assert sum_of_steps([1, 4, 6], [2.0, 5.0, 5.0]) == pytest.approx(2 + 3 + 4 + 5 + 5 + 5)
    assert sum_of_steps([3], [7.0]) == 7.0 and sum_of_steps([], []) == 0.0


def test_reads_and_writes_share_the_disk() -> None:
    of = planned(5)
    alone, together = (
        BlockPrediction.of(of, replace(on(SLOW_DISK, False), disk_both=share)).decode_seconds for share in (2.0, 1.0)
    )
    assert alone < together <= 2 * alone


@pytest.mark.parametrize("disk", ["slow", "fast"])
def test_reads_and_computing_share_the_processor(disk: str) -> None:
    """With shares of 1 neither hinders the other, and with shares that add up to 1 they take turns, whichever is longer."""
    of, machine = planned(5), replace(on(SLOW_DISK, False), host_read_per_s=inf, task_seconds=0.0)
    machine = replace(machine, disk_read_per_s=machine.disk_read_per_s * (0.1 if disk == "slow" else 10.0))
    lanes = Pricing(of, machine).lane_seconds(2)
    reads, computing = lanes["read"], lanes["compute"]
    assert (reads > computing) == (disk == "slow")
    for of_reads, of_computing in ((1.0, 1.0), (0.5, 0.5), (0.75, 0.25)):
        shared = replace(machine, reads_beside_computing=of_reads, computing_beside_reads=of_computing)
        longer = Pricing(of, shared).stretches(2)
        busy = reads * longer[Op.READ_W], computing * longer[Op.COMPUTE]
        turns = reads + computing if of_reads < 1 else max(reads, computing)
        assert max(busy) == pytest.approx(turns)
        assert BlockPrediction.of(of, shared).decode_seconds >= BlockPrediction.of(of, machine).decode_seconds
    with_device = replace(on(SLOW_DISK, True), reads_beside_computing=0.5, computing_beside_reads=0.5)
    assert BlockPrediction.of(of, with_device) == BlockPrediction.of(of, on(SLOW_DISK, True))


def test_all_that_crosses_the_memory_of_the_host_shares_it() -> None:
    of = planned(5)
    free, scarce = (
        BlockPrediction.of(of, replace(on(MACHINE, False), host_read_per_s=rate)).decode_seconds for rate in (1e12, 1e6)
    )
    assert scarce > 5 * free
