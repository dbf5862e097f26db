"""Search: what it finds fits, is in time and is not offloaded without need; where nothing is found, it says what is lacking."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.core.site import DEVICE, DISK, HOST, Site
from h2o_flexgen.core.units import parse_bytes
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.models import create_model, known_config
from h2o_flexgen.planning import search as search_module
from h2o_flexgen.planning.footprint import MemoryLimits
from h2o_flexgen.planning.machine import Curve, find_machine
from h2o_flexgen.planning.plan import Plan, Shares
from h2o_flexgen.planning.plan_requirements import PlanNeed, PlanRequirements, PlanSubject
from h2o_flexgen.planning.search import (
    BUFFERS,
    LARGER_PARTS,
    LATENCY,
    NEAR,
    WORTH_BUFFERS,
    NoPlan,
    SearchProblem,
    SearchResult,
    Trial,
    TriedPlans,
    nearest_miss,
    search,
    told_recall,
)
from h2o_flexgen.planning.working_space import DEVICE_LIBRARIES
from tests.helpers.samples import first_of, spread
from tests.helpers.tiny import tiny_config
from tests.planning.test_linear import SLOW
from tests.planning.test_pricing import on
from tests.planning.worlds import of_slices, tiny_spec, with_experts

SPEC = tiny_spec(blocks=4, width=64)
FORMATS = (("group4", "plain"), ("plain", "group4"), ("group4", "group4"))


def sized(spec: ModelSpec = SPEC) -> Callable[[Plan], ModelSpec]:
    return lambda plan: spec.written_as(plan.weight_codec, plan.kv_codec, plan.compute)


def stored_packed(plan: Plan) -> ModelSpec:
    """A model whose own weights are packed."""
    return SPEC.packed("group8").written_as(plan.weight_codec, plan.kv_codec, plan.compute)


def problem(accelerator: bool = False, limits: MemoryLimits | None = None, **changes: object) -> SearchProblem:
    asked = SearchProblem(
        sized(), None, 20, 10, Plan(), on(SLOW, accelerator), limits or MemoryLimits(), Site(accelerator), batches=(1, 4)
    )
    return replace(asked, **changes)  # type: ignore[arg-type]


def scarce(accelerator: bool, share: float, **changes: object) -> SearchProblem:
    """With so large a share of what 64 rows need on the fastest tier, beside what one row needs with all of it offloaded."""
    asked = problem(accelerator, workload=Workload.uniform(64, 20, 10), **changes)
    tier = DEVICE if accelerator else HOST
    whole = Plan(gpu_batch_size=16, num_gpu_batches=4)
    least = replace(whole, gpu_batch_size=1, num_gpu_batches=1).with_percent((0,) * 6)
    most, few = (asked.largest(plan.at(Site(accelerator))).footprint.total(tier) for plan in (whole, least))
    limit = int(few + share * (most - few))
    return replace(asked, limits=MemoryLimits(device=limit) if accelerator else MemoryLimits(host=limit))


@cache
def freely(accelerator: bool, **changes: object) -> SearchResult:
    """What is found without a limit, asked by several tests."""
    return search(scarce(accelerator, 0.3, **changes))


@pytest.mark.parametrize(("accelerator", "share"), first_of(spread([(False, 0.1), (True, 0.4), (True, 0.1), (False, 0.8)]), 2))
def test_what_is_found_fits_and_is_the_best_of_what_was_simulated(accelerator: bool, share: float) -> None:
    asked = scarce(accelerator, share)
    found = search(asked)
    for one in (*found.all, *found.front):
        assert asked.fits(one.plan) and all(float(percent).is_integer() for percent in one.plan.percent)
        for tier, nbytes in one.prediction.peak_bytes.items():
            limit = asked.limits.of(tier)
            assert limit is None or nbytes <= limit
    most = max(one.tokens_per_second for one in (*found.all, *found.front))
    assert found.best.tokens_per_second >= (1 - NEAR) * most
    equal, others = found.runners_up[: found.equals], found.runners_up[found.equals :]
    assert all(one.tokens_per_second >= (1 - NEAR) * most for one in equal)
    assert all(one.tokens_per_second <= (1 - NEAR) * most * (1 + 1e-9) for one in others)
    assert all(one.prediction.num_prompts == 64 for one in found.all)


@pytest.mark.parametrize("accelerator", [False, True])
def test_what_fits_is_not_offloaded(accelerator: bool) -> None:
    found = search(problem(accelerator, workload=Workload.uniform(64, 20, 10)))
    everything = Shares(1.0, 0.0) if accelerator else Shares(0.0, 1.0)
    for one in found.all:
        assert (one.plan.weights, one.plan.kv, one.plan.hidden) == (everything,) * 3


def test_kv_of_which_steps_choose_what_they_attend_may_go_to_disk() -> None:
    wide = sized(tiny_spec(blocks=4, width=256))  # so that buffers of weights take more than those of KV
    asked = problem(workload=Workload.uniform(8, 20, 10), model=wide, batch_sizes=(4,), batches=(2,))
    whole = asked.largest(Plan(gpu_batch_size=4, num_gpu_batches=2).at(Site())).footprint.total(HOST)
    asked = replace(asked, limits=MemoryLimits(host=whole - 300_000))
    assert any(one.plan.kv.disk for one in search(asked).all), "there is a reason to offload it"
    found = search(replace(asked, plan=Plan.create(kv_recall=0.5)))
    for one in (*found.all, *found.front):
        assert one.plan.policy.recall == 0.5 and asked.largest(one.plan).fits(asked.limits)
    offloaded = asked.largest(replace(found.best.plan, kv=Shares(0.0, 0.5)))
    assert offloaded.fits(MemoryLimits()) and offloaded.blocks.first.schedule.traffic.choosing


def test_a_share_is_attended_where_it_may_be_and_is_faster() -> None:
    reading = replace(on(SLOW, False), attention_bytes_per_s={HOST: 1e7})  # so that attention is the limit
    long = problem(workload=Workload.uniform(8, 4000, 10), machine=reading, batch_sizes=(4,), batches=(2,))
    whole, free = search(long), search(replace(long, recalls=(0.1,)))
    assert {one.plan.policy.recall for one in (whole.best, *whole.all)} == {1.0}
    assert free.best.plan.policy.recall == 0.1 and free.best.tokens_per_second > whole.best.tokens_per_second
    assert {one.plan.policy.recall for one in free.all} == {0.1, 1.0}


def of_latents(heads: int) -> ModelSpec:
    return replace(tiny_spec(blocks=8), heads=heads, kv_heads=1, head_dim=576, values_in_keys=512, dtype="bfloat16")


def with_rates(whole: float, choosing: float, chosen: float, heads: int) -> dict[str, Curve]:
    return {part: ((heads, rate),) for part, rate in (("whole", whole), ("choosing", choosing), ("chosen", chosen))}


# attention of latents as it was measured: 16 heads one by one, 32 in tiles of registers, which make all cheap and a choice not
ONE_BY_ONE, IN_TILES = with_rates(73e9, 186e9, 70e9, heads=16), with_rates(549e9, 185e9, 216e9, heads=32)
LATENT_RATES = {part: ONE_BY_ONE[part] + IN_TILES[part] for part in ONE_BY_ONE}


@pytest.mark.parametrize(("heads", "on_disk", "share"), [(16, False, 0.1), (32, False, 1.0), (16, True, 0.1), (32, True, 0.1)])
def test_a_share_of_latents_is_attended_where_choosing_it_takes_less_than_it_saves(
    heads: int, on_disk: bool, share: float
) -> None:
    machine = replace(
        on(SLOW, False),
        flops_per_s={"bfloat16": ((1, 1e12),)},
        attention_flops_per_s={"bfloat16": 73e9, "group4": 186e9},
        latents_flops_per_s=LATENT_RATES,
        attention_bytes_per_s={HOST: 13e9},
        prompt_flops_per_s={},
        disk_read_per_s=2e8,
        disk_write_per_s=2e9,
    )
    rows = Workload.uniform(4, 4000, 10)
    asked = problem(
        workload=rows, model=sized(of_latents(heads)), machine=machine, batch_sizes=(1,), batches=(4,), recalls=(0.1,)
    )
    if on_disk:
        kv = 4 * 8 * 4010 * of_latents(heads).kv_bytes_per_head
        whole = asked.largest(Plan(gpu_batch_size=1, num_gpu_batches=4).at(Site())).footprint.total(HOST)
        asked = replace(asked, limits=MemoryLimits(host=int(whole - 0.3 * kv)))
    found = search(asked).best.plan
    assert found.policy.recall == share and (found.kv.disk > 0) is on_disk


def test_a_share_is_not_attended_where_that_is_not_done() -> None:
    for asked in (
        problem(True, workload=Workload.uniform(8, 40, 10), plan=Plan.create(draft="ngram")),
        problem(workload=Workload.uniform(8, 40, 10), plan=Plan.create(draft="ngram")),
    ):
        found = search(replace(asked, recalls=(0.1,)))
        assert {one.plan.policy.recall for one in (found.best, *found.all)} == {1.0}
        told = told_recall(replace(asked, recalls=(0.1,)), found)
        assert told == "none is taken: kv_recall 0.1 cannot be had with draft='ngram'"


def test_what_was_read_stays_in_memory_where_a_share_comes_from_a_disk_and_that_is_faster() -> None:
    """Without being asked for: that changes no token. Where no KV is on disk, nothing is kept."""
    model, sizes = sized(tiny_spec(blocks=8, width=64)), {"batch_sizes": (1,), "batches": (16,)}
    asked = problem(workload=Workload.uniform(16, 2000, 10), model=model, recalls=(0.1,), **sizes)
    whole = asked.largest(Plan(gpu_batch_size=1, num_gpu_batches=16).recalling(0.1).at(Site())).footprint.total(HOST)
    scarce_memory, enough = (replace(asked, limits=MemoryLimits(host=int(room * whole))) for room in (0.7, 1.0))
    found = search(scarce_memory)
    assert found.best.plan.policy.reuses_read and found.best.plan.kv.disk > 0
    assert "stays in memory (--kv-recall-reuse); of those that attend all, the best has" in told_recall(scarce_memory, found)
    without = search(replace(scarce_memory, recalls=(), plan=Plan().recalling(0.1)))
    assert not without.best.plan.policy.reuses_read and told_recall(replace(asked, recalls=()), without) == ""
    assert found.best.tokens_per_second > without.best.tokens_per_second
    assert not any(one.plan.policy.reuses_read for one in search(enough).all)


@pytest.mark.parametrize(("gain", "share"), [(1 + 0.8 * NEAR, 1.0), (1 + 1.5 * NEAR, 0.1)])
def test_a_share_is_not_attended_for_as_good_as_nothing(gain: float, share: float) -> None:
    asked = problem(workload=Workload.uniform(8, 400, 10), batch_sizes=(4,), batches=(2,), recalls=(0.1,))
    whole = search(asked).best
    assert whole.plan.policy.recall == 1.0
    faster = SimpleNamespace(
        plan=whole.plan.recalling(0.1),
        tokens_per_second=gain * whole.tokens_per_second,
        block_seconds=whole.block_seconds / gain,
    )
    tried = TriedPlans(asked, {one.plan: Trial(None, one) for one in (faster, whole)})  # type: ignore[arg-type]
    assert tried.chosen.candidate.plan.policy.recall == share


def test_what_became_of_a_share_that_may_be_attended_is_said() -> None:
    asked = problem(workload=Workload.uniform(8, 400, 10), batch_sizes=(4,), batches=(2,), recalls=(0.1,))
    found = search(asked)
    one = replace(found.best, plan=found.best.plan.recalling(0.1))
    rate = f"has {found.best.tokens_per_second:.3f} tokens/s"
    told = {
        told_recall(asked, replace(found, unlike=one)): f"none is taken: the best plan with it {rate}",
        told_recall(asked, replace(found, unlike=None)): "none is taken: no plan with it promises as much, or none fits",
        told_recall(asked, replace(found, best=one, unlike=found.best)): (
            f"steps attend 0.1 of what is kept; of those that attend all, the best {rate}"
        ),
        told_recall(replace(asked, plan=Plan().recalling(0.2)), replace(found, best=one, unlike=None)): (
            "steps attend 0.1 of what is kept; of those that attend 0.2, no plan is near it"
        ),
        told_recall(replace(asked, plan=one.plan), replace(found, best=one)): "steps attend 0.1 of what is kept",
    }
    assert [*told] == [*told.values()]


@pytest.mark.parametrize("reuse", [False, True])
def test_a_plan_is_found_where_rings_of_buffers_leave_room_for_few(reuse: bool) -> None:
    """As soon as anything is on disk, buffers take more than it frees."""
    plan = Plan.create(kv_recall=0.1, kv_recall_reuse=reuse)
    asked = problem(
        workload=Workload.uniform(2, 1000, 40), model=sized(tiny_spec(blocks=8, width=64)), plan=plan, batches=(1, 2)
    )
    whole = asked.largest(replace(plan, gpu_batch_size=2).at(Site())).footprint.total(HOST)
    asked = replace(asked, limits=MemoryLimits(host=int(0.9 * whole)))
    assert asked.fits(search(asked).best.plan)


@pytest.mark.parametrize("attend_on", [DEVICE, HOST])
def test_beside_a_gpu_kv_lies_where_steps_choose_what_they_attend(attend_on: str) -> None:
    """Or from where they bring it: in host memory."""
    many: Any = {"batch_sizes": (4,), "batches": (4,)}
    asked = scarce(True, 0.2, plan=Plan.create(kv_recall=0.1), attend_on=(attend_on,), **many)
    found = search(asked)
    for one in (*found.all, *found.front):
        assert one.plan.policy.recall == 0.1 and one.plan.kv.disk < 1e-9
        assert asked.largest(one.plan).fits(asked.limits)
    assert found.best.plan.kv.host > 0


@pytest.mark.parametrize("reuse", [False, True])
def test_beside_a_gpu_kv_lies_on_a_disk_where_the_gpu_attends_what_is_read(reuse: bool) -> None:
    """And where it does not stay in memory."""
    many: Any = {"batch_sizes": (4,), "batches": (4,)}
    asked = scarce(True, 0.2, plan=Plan().recalling(0.1, reuse), attend_on=(DEVICE,), **many)
    on_disk = Plan(gpu_batch_size=4, num_gpu_batches=4).recalling(0.1).with_percent((0,) * 6).at(asked.site)
    limits = replace(asked.limits, host=asked.largest(on_disk).footprint.total(HOST))
    found = search(replace(asked, limits=limits))
    assert any(one.plan.kv.disk > 0 for one in found.all) is not reuse


def test_more_memory_is_never_slower() -> None:
    found = search(scarce(False, 0.05)), freely(False), search(scarce(False, 0.9))
    rates = [one.best.tokens_per_second for one in found]
    assert all(more >= 0.98 * less for less, more in pairwise(rates)), rates
    assert rates[-1] > rates[0]


def test_a_front_has_nothing_that_another_point_beats() -> None:
    front = freely(False).front
    assert len(front) > 1
    for one, other in pairwise(front):
        assert one.block_seconds < other.block_seconds and one.tokens_per_second < other.tokens_per_second


@pytest.mark.parametrize("accelerator", first_of([False, True], 1))
def test_a_full_disk_leaves_the_memory(accelerator: bool) -> None:
    found = search(problem(accelerator, MemoryLimits(host=1 << 30, disk=0), workload=Workload.uniform(8, 20, 10)))
    assert found.best.plan.kv.disk == found.best.plan.hidden.disk == 0


def test_few_prompts_are_not_divided_into_more_batches_than_there_are() -> None:
    found = search(problem(workload=Workload.uniform(5, 20, 10), batches=()))
    assert max(one.plan.num_gpu_batches for one in (*found.all, *found.front)) <= 6


def test_sizes_that_were_chosen_are_kept() -> None:
    found = search(problem(batch_sizes=(5,), batches=(2,)))
    assert {(one.plan.gpu_batch_size, one.plan.num_gpu_batches) for one in (*found.all, *found.front)} == {(5, 2)}


def test_the_host_attends_where_that_is_faster() -> None:
    """Over a link that is a thousandth as fast as the host's memory, where the KV does not fit the device."""
    slow = replace(on(SLOW, True), host_to_device_per_s=2e7, device_to_host_per_s=2e7)
    crowded = scarce(True, 0.7, machine=slow, batch_sizes=(16,), batches=(4,))
    fetched, best = (search(replace(crowded, attend_on=who)).best for who in ((DEVICE,), (DEVICE, HOST)))
    assert best.plan.attend_on == HOST and best.plan.kv.device < 1
    assert best.tokens_per_second > 2 * fetched.tokens_per_second


def opened(kind: str) -> Callable[[Plan], ModelSpec]:
    """A model as it is kept under a plan: cut where the host attends."""

    def under(plan: Plan) -> ModelSpec:
        spec = create_model(tiny_config(kind), "float32").spec
        spec = spec.cut_at_attention() if plan.attend_on == HOST else spec
        return spec.written_as(plan.weight_codec, plan.kv_codec, plan.compute)

    return under


def test_the_host_is_not_asked_where_it_cannot_attend() -> None:
    """Attention beside a scan cannot be cut."""
    need, both = PlanNeed(Workload.uniform(8, 20, 10)), PlanRequirements(Plan(), batch_sizes=(2,), batches=(1,))
    told = PlanRequirements(Plan(attend_on=HOST), attend_on=(HOST,))
    whole, cut = (PlanSubject(opened(kind), MemoryLimits(), Site(True)) for kind in ("falcon-h1", "llama-gqa"))
    asked = both.problem(on(SLOW, True), whole, need)
    assert asked.attend_on == (DEVICE,) and search(asked).best.plan.attend_on == DEVICE
    assert both.problem(on(SLOW, True), cut, need).attend_on == (DEVICE, HOST)
    assert told.problem(on(SLOW, True), cut, need).attend_on == (HOST,)
    with pytest.raises(ValueError, match="stands beside a scan"):
        told.problem(on(SLOW, True), whole, need)


def test_shares_of_states_are_searched_beside_though_blocks_have_none() -> None:
    """The program asks for the first block alone, which may be one with attention."""
    kinds = ["full_attention", "conv", "conv", "full_attention"]
    spec = create_model(tiny_config("lfm2", num_hidden_layers=4, layer_types=kinds), "float32").spec
    told = problem(model=sized(spec), workload=Workload.uniform(8, 20, 10), plan=Plan(state=Shares(0.0, 0.0)), batches=(1,))
    assert search(told).best.plan.state == Shares(0.0, 0.0)
    with pytest.raises(ValueError, match="have no state beside their KV"):
        search(replace(told, model=sized()))


def test_a_codec_is_taken_only_where_it_is_allowed() -> None:
    asked = scarce(False, 0.02)
    plain, free = search(asked), search(replace(asked, codecs=FORMATS))
    assert {one.plan.weight_codec for one in plain.all} == {"plain"} and {one.plan.kv_codec for one in plain.all} == {"plain"}
    assert free.best.tokens_per_second >= plain.best.tokens_per_second
    assert (free.best.plan.weight_codec, free.best.plan.kv_codec) in FORMATS, "nearly no memory: fewer bytes are faster"


@pytest.mark.parametrize(
    ("own", "changes", "expected"),
    [
        ("plain", {}, {("plain", "exact")}),
        ("plain", {"computes": ("int8",)}, {("plain", "exact")}),
        ("group4", {"computes": ("int8",)}, {("group4", "exact"), ("group4", "int8")}),
        ("plain", {"codecs": FORMATS, "computes": ("int8",)}, {("plain", "exact"), ("group4", "exact"), ("group4", "int8")}),
        ("plain", {"model": stored_packed, "computes": ("int8",)}, {("plain", "exact"), ("plain", "int8")}),
        ("plain", {"codecs": FORMATS, "plan": Plan(compute="int8")}, {("group4", "int8")}),
    ],
)
def test_products_that_are_not_exact_are_tried_where_they_are_allowed_and_weights_are_packed(
    own: str, changes: dict[str, Any], expected: set[tuple[str, str]]
) -> None:
    tried = search_module._bases(problem(**{"plan": Plan(weight_codec=own), **changes}))
    assert {(plan.weight_codec, plan.compute) for plan in tried} == expected


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [({"int8 tiles4": 1e12}, "int8"), ({"int8 tiles4": 1e6}, "exact"), ({}, "exact"), ({"tiles4": 1e6}, "exact")],
)
def test_rounded_products_are_taken_where_they_are_faster(rates: dict[str, float], chosen: str) -> None:
    machine = replace(on(SLOW, False), packed_flops_per_s={price: ((1, rate),) for price, rate in rates.items()})
    found = search(problem(plan=Plan(weight_codec="group4"), machine=machine, computes=("int8",), batch_sizes=(4,)))
    assert found.best.plan.compute == chosen


# -- latency -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accelerator", "part"), first_of(spread([(True, 0.4), (False, 0.1), (False, 0.8)]), 1))
def test_a_latency_limit_is_kept(accelerator: bool, part: float) -> None:
    free = freely(accelerator)
    soonest, best = free.front[0].block_seconds, free.best.block_seconds
    limit = soonest + part * (best - soonest) + 1e-9
    found = search(replace(scarce(accelerator, 0.3), latency_limit=limit))
    assert all(one.block_seconds <= limit for one in found.all)
    assert found.best.tokens_per_second <= free.best.tokens_per_second * 1.02


def test_a_preference_for_latency_gets_the_soonest_end() -> None:
    by_rate, by_latency = freely(False), freely(False, prefer=LATENCY)
    assert by_latency.best.block_seconds < by_rate.best.block_seconds
    assert by_latency.best.block_seconds <= 1.02 * by_rate.front[0].block_seconds


def test_a_limit_that_nothing_keeps_is_answered_with_the_fastest_there_is() -> None:
    soonest = freely(False, prefer=LATENCY).front[0].block_seconds
    with pytest.raises(NoPlan, match=r"no plan ends a block within .* s; the fastest needs .* s: give more time"):
        search(scarce(False, 0.3, latency_limit=0.6 * soonest))


# -- nothing fits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accelerator", [False, True])
def test_what_is_lacking_is_named_and_with_so_much_more_it_fits(accelerator: bool) -> None:
    limits = MemoryLimits(device=DEVICE_LIBRARIES + (16 << 20) if accelerator else None, host=30 << 20, disk=1 << 40)
    asked = problem(accelerator, limits)
    with pytest.raises(NoPlan) as refused:
        search(asked)
    line = str(refused.value)
    limit = "in CPU memory, and the limit is 31.46 MB"
    said = rf"no plan fits: even one row .* {limit}; give (.* MB) more in CPU memory \(cpu_mem='(\d+MB)', rounded up\)$"
    match = re.search(said, line)
    assert match and "\n" not in line, line
    assert parse_bytes(match[2]) == pytest.approx(limits.host + parse_bytes(match[1].replace(" ", "")), abs=5_001)  # type: ignore[operator]
    differing = 900_000  # what processes hold by themselves
    assert search(replace(asked, limits=replace(limits, host=parse_bytes(match[2]), host_base=differing))).best


def test_the_least_that_is_named_is_the_least_of_all_shares() -> None:
    """Large tensors stay in memory where their buffers would take more."""
    spec = sized(tiny_spec(blocks=2, width=64, vocab=20_000))
    asked = problem(limits=MemoryLimits(host=1 << 20), model=spec, batches=())
    one = Plan(gpu_batch_size=1)
    every = (replace(one, weights=Shares(0.0, of_weights / 20), hidden=Shares(0.0, 1.0)) for of_weights in range(21))
    kinds = (replace(plan, kv=Shares(0.0, of_kv)) for plan in every for of_kv in (0.0, 1.0))
    least = min(asked.largest(plan).footprint.total(HOST) for plan in kinds)
    told = re.search("needs (.*?) in CPU memory", nearest_miss(asked))
    assert told is not None and parse_bytes(told[1].replace(" ", "")) <= 1.001 * least
    on_disk = asked.largest(one.with_percent((0,) * 6)).footprint.total(HOST)
    assert least < 0.95 * on_disk


def test_what_was_read_is_not_called_needed() -> None:
    plan = Plan.create(kv_recall=0.1, kv_recall_reuse=True)
    model = sized(tiny_spec(blocks=8, width=64))
    asked = problem(model=model, prompt_len=3000, plan=plan, limits=MemoryLimits(host=1 << 20))
    told = re.search(r", or leave kv_recall_reuse out: then (.*) are enough$", nearest_miss(asked))
    assert told is not None
    enough = MemoryLimits(host=parse_bytes(told[1].replace(" ", "")))
    with pytest.raises(NoPlan):
        search(replace(asked, limits=enough))
    assert nearest_miss(replace(asked, limits=enough)).endswith(", or leave kv_recall_reuse out, and it fits")
    assert search(replace(asked, limits=enough, plan=plan.without_reuse())).best


def test_sizes_that_do_not_fit_are_not_called_too_little_memory_for_one_row() -> None:
    asked = scarce(False, 0.05, batch_sizes=(64,), batches=(1,))
    with pytest.raises(NoPlan, match="let the batch sizes be searched, or give more memory"):
        search(asked)
    assert "sizes asked for" in nearest_miss(asked)


@pytest.mark.parametrize("accelerator", [False, True])
def test_a_limit_that_nothing_can_keep_is_refused_before_anything_is_searched(
    accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_module, "solve", lambda *_: pytest.fail("searched"))
    with pytest.raises(NoPlan, match=r"no plan ends a block within 1e-06 s: even one row, .* needs about 0\.\d+ s"):
        search(scarce(accelerator, 0.3, latency_limit=1e-6))


def test_the_soonest_block_is_a_bound_that_no_plan_that_is_found_passes() -> None:
    problem = scarce(False, 1.0, prefer=LATENCY)
    least = min(search_module._soonest_seconds(problem, base) for base in search_module._bases(problem))
    assert least <= 1.02 * search(problem).front[0].block_seconds


# -- where rows come and go ----------------------------------------------------------------------------------------------------


def job(rows: int) -> Workload:
    """Most rows end early, and a few late."""
    random = Random(rows)
    return Workload.running([SeatNeed(random.randint(2, 20), min(30, int(2 * random.paretovariate(1.0)))) for _ in range(rows)])


@pytest.mark.parametrize("accelerator", first_of([False, True], 1))
def test_a_plan_for_rows_that_come_and_go_is_near_the_best_of_all_sizes(accelerator: bool) -> None:
    asked = problem(accelerator, workload=job(96), batches=(1, 2))
    found = search(asked)
    assert asked.fits(found.best.plan) and found.best.prediction.generated_tokens == sum(asked.prompts(Plan()).gen_lens or ())
    sizes = [
        replace(found.best.plan, gpu_batch_size=size, num_gpu_batches=batches) for size in (4, 16, 48) for batches in (1, 2)
    ]
    assert found.best.tokens_per_second >= 0.85 * max(asked.predict(plan).tokens_per_second for plan in sizes)


def test_seats_of_classes_take_less_than_rows_that_all_may_need_most() -> None:
    running = problem(workload=job(96))
    staying = replace(running, workload=replace(job(96), gen_lens=None))
    plan = Plan(gpu_batch_size=12, num_gpu_batches=4)
    seats, rows = (asked.largest(plan).footprint.parts[HOST]["KV"] for asked in (running, staying))
    assert seats < 0.8 * rows


def test_a_long_job_is_measured_by_a_part_of_its_rows_that_is_like_the_whole() -> None:
    whole = job(1000)
    part = whole.thinned(100)
    assert part.num_prompts == 100 and whole.thinned(1000) is whole
    assert part.num_tokens / 100 == pytest.approx(whole.num_tokens / 1000, rel=0.1)
    assert max(map(sum, zip(part.prompt_lens, part.gen_lens or ()))) == max(
        map(sum, zip(whole.prompt_lens, whole.gen_lens or ()))
    )


# -- several processes -------------------------------------------------------------------------------------------------


def test_processes_hold_weights_of_host_memory_once_and_all_else_each() -> None:
    asked = problem(accelerator=True, workload=Workload.uniform(8, 20, 10))
    planned = asked.largest(replace(Plan(gpu_batch_size=4, num_gpu_batches=2), weights=Shares(0.3, 0.4), kv=Shares(0.0, 0.5)))
    parts = planned.footprint.parts
    one, three = MemoryLimits(host_base=1000), MemoryLimits(host_base=1000, processes=3)
    weights, others = parts[HOST]["weights"], planned.footprint.total(HOST) - parts[HOST]["weights"]
    assert one.needs(planned.footprint, HOST) == weights + others + 1000
    assert three.needs(planned.footprint, HOST) == weights + 3 * others + 4 * 1000, "one more looks after them"
    assert three.needs(planned.footprint, DEVICE) == planned.footprint.total(DEVICE)
    assert three.needs(planned.footprint, DISK) == 3 * planned.footprint.total(DISK) > 0


def test_a_search_for_processes_fills_memory_that_they_share() -> None:
    """The program knows what is held once: with weights counted for each process it would find a quarter of them room."""
    asked = problem(workload=Workload.uniform(16, 20, 10), batch_sizes=(4,), batches=(2,))
    half = replace(Plan(gpu_batch_size=4, num_gpu_batches=2), weights=Shares(0.0, 0.6), kv=Shares(0.0, 1.0)).at(Site())
    parts = asked.largest(half).footprint.parts[HOST]
    limits = MemoryLimits(host=parts["weights"] + 4 * (sum(parts.values()) - parts["weights"]), processes=4)
    best = search(replace(asked, limits=limits)).best.plan
    assert limits.first_exceeded(asked.largest(best).footprint) is None
    assert best.weights.host >= 0.5


def of_experts(plan: Plan) -> ModelSpec:
    return with_experts(1 / 8, blocks=4, width=64).written_as(plan.weight_codec, plan.kv_codec, plan.compute)


def test_prompts_of_a_mixture_are_computed_in_parts_in_which_an_expert_meets_many() -> None:
    fast_for_many = replace(SLOW, device="cpu", flops_per_s={"float32": ((128, 1e9), (1024, 3e9))})
    of_many = {"workload": Workload.uniform(256, 64, 4), "machine": fast_for_many, "batch_sizes": (256,), "batches": (1,)}
    found = search(problem(**of_many, model=of_experts))  # type: ignore[arg-type]
    assert found.best.plan.prefill_tokens == 8 * Plan.prefill_tokens
    smaller = problem(**of_many, model=of_experts).predict(replace(found.best.plan, prefill_tokens=1024))  # type: ignore[arg-type]
    assert found.best.tokens_per_second > smaller.tokens_per_second
    assert search(problem(**of_many)).best.plan.prefill_tokens == Plan.prefill_tokens  # type: ignore[arg-type]
    chosen = problem(**of_many, model=of_experts, plan=Plan(prefill_tokens=512))  # type: ignore[arg-type]
    assert search(chosen).best.plan.prefill_tokens == 512
    needs = [chosen.largest(replace(found.best.plan, prefill_tokens=tokens)).footprint.total(HOST) for tokens in (1024, 8192)]
    little = problem(**of_many, model=of_experts, limits=MemoryLimits(host=sum(needs) // 2))  # type: ignore[arg-type]
    assert search(little).best.plan.prefill_tokens in (1024, 2048, 4096)


def test_an_accelerator_that_waits_for_launches_gets_larger_parts_of_prompts() -> None:
    of_many = {"workload": Workload.uniform(256, 64, 4), "batch_sizes": (256,), "batches": (1,)}
    launched = replace(SLOW, visit_seconds={"attention": 0.01, "mlp": 0.01}, part_seconds={"attention": 0.01, "mlp": 0.01})
    beside, alone = (
        search(problem(accelerator, **of_many, machine=on(launched, accelerator)))  # type: ignore[arg-type]
        for accelerator in (True, False)
    )
    assert beside.best.plan.prefill_tokens == LARGER_PARTS * Plan.prefill_tokens
    assert alone.best.plan.prefill_tokens == Plan.prefill_tokens


# -- buffers --------------------------------------------------------------------------------------------------------------

LARGE = tiny_spec(blocks=4, width=256)
WAITING = replace(SLOW, device="cpu", visit_seconds={"attention": 0.15})  # meanwhile several slices are read


def streamed(spec: ModelSpec, room_for: int = 8, **changes: Any) -> SearchProblem:
    """With room for so many buffers, and for a tenth of the weights beside them."""
    asked = problem(model=sized(spec), workload=Workload.uniform(8, 20, 10), machine=WAITING, batch_sizes=(8,), batches=(1,))
    room = asked.largest(Plan(gpu_batch_size=8, buffers=room_for).with_percent((0, 10, 0, 100, 0, 100))).footprint.total(HOST)
    return replace(asked, limits=MemoryLimits(host=room), buffers=BUFFERS, **changes)


def test_a_mixture_gets_more_slots_where_its_slices_are_read_while_an_attention_is_computed() -> None:
    asked = streamed(of_slices(LARGE, 8))
    two, found = search(replace(asked, buffers=())).best, search(asked)
    assert two.plan.buffers == 2 < found.best.plan.buffers < 8 and asked.fits(found.best.plan)
    assert found.best.tokens_per_second > 1.1 * two.tokens_per_second
    assert found.best.plan.weights.host < two.plan.weights.host, "buffers take memory that weights had"
    assert found.best in found.front
    one_more = next(buffers for buffers in BUFFERS if buffers > found.best.plan.buffers)
    more = search(replace(asked, buffers=(), plan=Plan(buffers=one_more))).best
    assert more.tokens_per_second < (1 + WORTH_BUFFERS) * found.best.tokens_per_second, "of about equal ones the fewest"


def test_a_dense_model_keeps_its_slots_for_its_disk_reads_a_whole_mlp_meanwhile() -> None:
    shorter = replace(WAITING, visit_seconds={"attention": 0.04})
    best = search(streamed(LARGE, 3, machine=shorter)).best.plan
    assert best.buffers == 2 and best.weights.disk > 0.5


def test_no_slots_are_tried_where_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "with_buffers", lambda *_: pytest.fail("more buffers are tried"))
    assert search(replace(streamed(LARGE), limits=MemoryLimits())).best.plan.buffers == 2


def test_slots_are_not_searched_where_they_are_chosen_or_cannot_be() -> None:
    chosen = streamed(of_slices(LARGE, 8), plan=Plan(buffers=3))
    assert {one.plan.buffers for one in search(replace(chosen, buffers=())).all} == {3}
    subject, need = PlanSubject(sized(), MemoryLimits(), Site()), PlanNeed(Workload.uniform(1, 20, 10), is_sample=True)
    for plan, tried in ((Plan(), BUFFERS), (Plan(buffers=1), ()), (Plan(schedule="flexgen_barrier"), ())):
        assert PlanRequirements(plan, buffers=BUFFERS).problem(on(SLOW, False), subject, need).buffers == tried


def test_more_slots_keep_a_latency_limit_that_two_do_not() -> None:
    asked = streamed(of_slices(LARGE, 8))
    two, more = search(replace(asked, buffers=())).best.block_seconds, search(asked).best.block_seconds
    limit = (two + more) / 2
    with pytest.raises(NoPlan):
        search(replace(asked, buffers=(), latency_limit=limit))
    assert search(replace(asked, latency_limit=limit)).best.block_seconds <= limit


def on_a_t4(**changes: Any) -> SearchProblem:
    """Blocks of OPT-6.7B: of two that are about equal with two buffers, one is a fifth faster with three."""
    config = known_config("facebook/opt-6.7b")
    assert config is not None
    whole = create_model(config, "float16").spec
    cut = whole.cut_at_attention()
    asked = problem(
        True,
        MemoryLimits(device=15_180_000_000),
        model=lambda plan: cut if plan.attend_on == HOST else whole,
        machine=find_machine("t4-gcp"),
        prompt_len=512,
        gen_len=32,
        attend_on=(DEVICE, HOST),
        batch_sizes=(8, 16),
        batches=(1,),
        buffers=BUFFERS,
        with_front=False,
    )
    return replace(asked, **changes)


def test_what_is_as_fast_only_with_fewer_buffers_does_not_count_as_equal() -> None:
    found = search(on_a_t4())
    assert found.best.plan.buffers == 3 and found.runners_up
    assert found.equals == 0, "another is about as fast with two buffers, and both with these are not"
    least = (1 - NEAR) * found.best.tokens_per_second
    assert all(one.tokens_per_second < least for one in found.runners_up)


def test_a_number_refused_beside_another_plan_is_tried_again_for_the_block_by_itself() -> None:
    asked = streamed(of_slices(LARGE, 8))
    tried, (answer,) = TriedPlans(asked), search_module._answers(asked)[0]
    trial = tried.simulated(answer)
    at_once = replace(trial.candidate.prediction, prefill_seconds=0.0, decode_seconds=1e-9)
    fast = replace(trial, candidate=replace(trial.candidate, prediction=at_once))
    assert tried.with_buffers(trial, 3, fast) is trial
    assert tried.refine(trial).answer.plan.buffers > 2


def test_what_is_found_with_a_number_of_buffers_is_found_where_that_number_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though few answers of the program are solved thoroughly before any is simulated."""
    monkeypatch.setattr(search_module, "REFINED", 1)
    free = search(on_a_t4()).best
    given = search(on_a_t4(plan=Plan(buffers=free.plan.buffers), buffers=())).best
    assert given.plan.buffers == free.plan.buffers
    assert given.tokens_per_second >= 0.99 * free.tokens_per_second
