"""Head budgets in plans: what is planned is the sum over levels, and what is predicted is what a run moves and holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from h2o_flexgen.cli.report import document_of, lines_of
from h2o_flexgen.cli.report.kept_by_policy import KeptByPolicy
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.core.site import DEVICE, HOST, Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine.generate import Stream, job_of
from h2o_flexgen.engine.job import Request
from h2o_flexgen.planning.batch_pass import tokens_of
from h2o_flexgen.planning.block_plan import BlockPlan
from h2o_flexgen.planning.cost import Cost
from h2o_flexgen.planning.footprint import footprint
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.positions import check_positions
from h2o_flexgen.planning.pricing import Pricing
from h2o_flexgen.planning.search import search
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from h2o_flexgen.policies.head_budgets import HeadBudgets
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.schedule.ops import Data, Key, Op
from tests.helpers.contract import Case, Checkpoints
from tests.helpers.samples import first_of, spread
from tests.helpers.tiny import BLOCKS
from tests.planning.allocations import peak_allocated
from tests.planning.test_cost import ALL_ON_DISK, MIXED, RAGGED, assert_moved_as_predicted
from tests.planning.test_footprint import arena_parts, held_by
from tests.planning.test_linear import case_of
from tests.planning.test_pricing import MACHINE, on
from tests.planning.test_search import scarce, sized
from tests.planning.worlds import block_of, tiny_spec

SHARES = (1.0, 0.3, 0.55, 0.3, 0.3, 0.3, 1.0, 1.0, 0.3, 0.55)  # head by head: layers differ, and some have one level alone


def uneven(layers: int, kv_heads: int, shares: tuple[float, ...] = SHARES) -> dict[str, object]:
    """Options of a plan in which heads keep these shares in turn."""
    each = [shares[head % len(shares)] for head in range(layers * kv_heads)]
    by_head = tuple(tuple(each[start : start + kv_heads]) for start in range(0, len(each), kv_heads))
    mean = sum(each) / len(each)
    return {"kv_policy": "h2o", "kv_budget": mean, "head_budgets": HeadBudgets("tiny", "made-up text", (mean,), (by_head,))}


def uneven_case(**changes: object) -> Case:
    return replace(Case("llama-gqa", lengths=RAGGED, policy=tuple(uneven(BLOCKS, 2).items())), **changes)  # type: ignore[arg-type]


def with_many_heads(blocks: int = 6, heads: int = 4) -> ModelSpec:
    return replace(tiny_spec(blocks=blocks, width=32), heads=2 * heads, kv_heads=heads, head_dim=4)


def planned(spec: ModelSpec, accelerator: bool = False, percent: tuple[float, ...] = MIXED, **options: object) -> BlockPlan:
    plan = Plan.create(**uneven(len(spec.kv_layers), spec.kv_heads), **options).with_percent(percent)
    site = Site(accelerator)
    return BlockPlan.of(spec, plan.at(site), block_of([[20, 14], [9]], 6), site)


# -- sums ------------------------------------------------------------------------------------------------------------------


def test_an_image_has_the_slots_of_each_of_its_heads() -> None:
    spec = with_many_heads()
    of = planned(spec)
    for place, layer in enumerate(spec.kv_layers):
        policies = [next(level.policy for level in of.levels if head in level.heads[place]) for head in range(spec.kv_heads)]
        for number, batch in enumerate(of.block.batches):
            slots = sum(policy.occupancy(batch, of.block.gen_len).capacity for policy in policies)
            assert of.kv.image_bytes(layer, number) == batch.size * slots * 2 * spec.head_dim * spec.itemsize
            assert sum(layout.heads for layout in of.kv.layouts(layer, number) if layout) == spec.kv_heads


def test_what_all_heads_keep_is_the_budget() -> None:
    spec = with_many_heads()
    kept = KeptByPolicy(WorkloadPlan(spec, planned(spec).plan, Workload((400,) * 2, 100), Site()))
    assert kept.share == pytest.approx(sum(SHARES[head % 10] for head in range(24)) / 24, abs=0.01)
    line = next(line for line in lines_of(kept.entries()) if line.startswith("heads"))
    assert line.startswith("heads     budgets by head: 7 of 24 KV heads keep 100 %, 5 55 %, 12 30 %; measured on made-up text")
    assert [one["heads"] for one in document_of(kept.entries())["kept"]["heads"]] == [7, 5, 12]  # type: ignore[index]
    assert 1.6 < kept.rows_in_same_memory < 1 / kept.share


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kv_budget": 0.3, "recent": 3}, "head budgets share out a --kv-budget that is given alone"),
        ({"heavy": 3, "recent": 3}, "head budgets share out a --kv-budget that is given alone"),
        ({"sinks": 4}, "h2o with these options needs some tokens in every head"),
    ],
)
def test_why_budgets_are_equal_is_said(options: dict[str, object], why: str) -> None:
    plan = Plan.create(kv_policy="h2o", **options)
    kept = KeptByPolicy(WorkloadPlan(tiny_spec(), plan, Workload((40,), 10), Site()), "a-model")
    assert f"heads     equal budgets: {why}" in lines_of(kept.entries())


def test_a_model_that_calibration_does_not_read_has_equal_budgets_with_the_reason() -> None:
    plan, workload = Plan.create(kv_policy="h2o", kv_budget=0.2), Workload((40,), 10)
    kept = KeptByPolicy(WorkloadPlan(replace(tiny_spec(), attention_cap=50.0), plan, workload, Site()), "a-model")
    assert "heads     equal budgets: calibrate does not read models with a cap on scores" in lines_of(kept.entries())
    planned = WorkloadPlan(tiny_spec(), plan, workload, Site())
    own = "heads     equal budgets: what each needs "
    command = "python -m h2o_flexgen.calibrate --model a-model"
    with_them = f"{command} --adapter a --adapter b=0.5 --output FILE; and --head-budgets FILE takes it"
    longer = replace(planned, spec=replace(tiny_spec(), max_positions=512))
    of_run = f"is measured by the first run, once; or, if that takes more than 2 minutes, by: {command}"
    assert f"{own}{of_run}" in lines_of(KeptByPolicy(longer, "a-model", measures_heads=True).entries())
    for how, said in (
        ({}, f"is measured once by: {command}"),
        ({"adapters": ("a", "b=0.5")}, f"with --adapter is measured by: {with_them}"),
        ({"measures_heads": True}, f"is measured once by: {command}"),  # texts of this model are too short for a run to do it
        ({"reads_texts": False}, "is measured with texts, and the tokenizer of a-model reads none"),
    ):
        assert f"{own}{said}" in lines_of(KeptByPolicy(planned, "a-model", **how).entries())  # type: ignore[arg-type]
    kept = KeptByPolicy(WorkloadPlan(tiny_spec(), Plan(), workload, Site()), "a-model")
    assert not [line for line in lines_of(kept.entries()) if line.startswith("heads")]


def test_each_level_of_a_layer_is_one_more_attention() -> None:
    spec = with_many_heads()
    pricing = Pricing(planned(spec), replace(on(MACHINE, False), visit_seconds={"eviction": 1.0}))
    parts = {layer: pricing.compute_parts(Key(Op.COMPUTE, 4, layer, 0)) for layer in spec.kv_layers}
    evicting = {layer: sum(heads > 0 for heads in pricing.planned.kv.heads(layer)[1:]) for layer in spec.kv_layers}
    assert {layer: int(one["overhead"]) for layer, one in parts.items()} == evicting
    assert {*evicting.values()} == {1, 2}
    most, least = max(spec.kv_layers, key=pricing.planned.kv.heads), min(spec.kv_layers, key=pricing.planned.kv.heads)
    assert parts[most]["attention"] > parts[least]["attention"]


@pytest.mark.parametrize("accelerator", [False, True])
def test_sections_of_a_pipeline_have_the_levels_of_their_layers(accelerator: bool) -> None:
    spec = with_many_heads()
    of = planned(spec, accelerator=True, pipeline=2, percent=(100, 0, 100, 0, 100, 0))
    there = [section.kv for section in of.sections]
    for layer in spec.kv_layers:
        assert [held.heads(layer) for held in there if held.heads(layer)] == [of.kv.heads(layer)]
    parts = footprint(of, Site(True)).devices
    alone = footprint(planned(spec, accelerator=True, percent=(100, 0, 100, 0, 100, 0)), Site(True)).parts[DEVICE]
    assert sum(one["KV"] for one in parts) == alone["KV"] and sum(one["KV notes"] for one in parts) == alone["KV notes"]


@pytest.mark.parametrize("accelerator", [False, True])
def test_bounds_of_few_blocks_tell_those_of_all(accelerator: bool) -> None:
    spec = with_many_heads(blocks=8)
    case = case_of(accelerator, lengths=[[30, 20]], spec=spec, **uneven(8, 4))
    plan = case.with_shares().with_percent((0,) * 6)
    found, whole = case._bounds(plan), case._bounds_of(plan)
    assert len(case._other_blocks) > 2
    for one, other in zip(found, whole, strict=True):
        assert one == pytest.approx(other)


@pytest.mark.parametrize("accelerator", [False, True])
def test_a_plan_that_is_found_fits(accelerator: bool) -> None:
    spec = with_many_heads(blocks=5)
    model, plan = sized(spec), Plan.create(**uneven(5, 4))
    asked = scarce(accelerator, 0.3, model=model, plan=plan, batch_sizes=(4, 8), batches=(1, 2))
    best = search(asked).best
    assert asked.fits(best.plan) and best.plan.head_budgets == plan.head_budgets
    assert best.prediction.peak_bytes[DEVICE if accelerator else HOST] <= (
        asked.limits.of(DEVICE if accelerator else HOST) or 0
    )


def test_a_text_ends_where_the_model_does_if_some_heads_keep_all_of_it() -> None:
    spec = with_many_heads()
    rolling = uneven(6, 4) | {"positions": "rolling"}
    check_positions(spec, Plan.create(**rolling), 0, 60, 5)
    with pytest.raises(ValueError, match="prompt 0 has 60 tokens and 6 are to be generated, but tiny has 64 positions"):
        check_positions(spec, Plan.create(**rolling), 0, 60, 6)
    check_positions(spec, Plan.create(**uneven(6, 4, (0.3, 0.55)), positions="rolling"), 0, 40, 60)


MOVED = (ALL_ON_DISK, "group4"), (MIXED, "plain"), (ALL_ON_DISK, "plain"), (MIXED, "group4")


# -- with a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("percent", "kv_codec"), first_of(spread(MOVED), 2))
def test_a_run_moves_the_bytes_that_are_predicted(
    percent: tuple[float, ...], kv_codec: str, any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    case = uneven_case(percent=percent, gen_len=7, num_gpu_batches=3, device=any_device, kv_codec=kv_codec)
    assert assert_moved_as_predicted(case, checkpoints, offload)["read"] > 0


def test_so_does_one_in_which_the_host_attends(checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    case = uneven_case(percent=MIXED, gen_len=7, device="pretended", attend_on="host")
    assert assert_moved_as_predicted(case, checkpoints, offload)["attend"] > 0


@pytest.mark.parametrize("header", first_of([40, 0], 1))
def test_so_does_one_in_which_rows_come_and_go(header: int, any_device: str, checkpoints: Checkpoints, offload: Path) -> None:
    case = uneven_case(percent=ALL_ON_DISK, gpu_batch_size=3, device=any_device, prefill_tokens=64)
    random = Random(header)
    prompts = [
        [7] * header * (random.random() < 0.7) + ids for ids in replace(case, lengths=(9, 4, 17, 6, 12, 8, 5, 11)).prompts
    ]
    job = [Request(ids, SamplingParams(max_tokens=random.choice([2, 5, 17]), ignore_eos=True)) for ids in prompts]
    with case.open(checkpoints, offload, trace=True) as llm:
        cost = Cost(llm.planned(Stream(job_of(job, llm.row_maker), llm.row_maker, streamed=False).workload).blocks.first)
        assert len(list(llm.generate_stream(job))) == len(job) and llm.stats is not None
        spans = llm.stats.last_block.trace.spans
    there = {
        (key.step, key.batch) for key, *_ in spans if key.step < cost.passes and tokens_of(cost.batch_pass(key.step, key.batch))
    }
    checked = 0
    for key, _, _, _, moved in spans:
        is_wanted = (key.step, key.batch) in there and ((key.step + 1, key.batch) in there or key.op.fetches)
        if key.op.data is Data.KV and is_wanted:
            assert moved == cost.nbytes(key), key
            checked += moved > 0
    assert checked > 20


@pytest.mark.parametrize("percent", [ALL_ON_DISK, MIXED, (100, 0, 100, 0, 100, 0)])
def test_no_more_is_held_than_is_predicted(
    percent: tuple[float, ...], any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    case = uneven_case(percent=percent, lengths=(60, 41, 17, 33), gen_len=5, device=any_device)
    accelerator = any_device == "pretended"
    with case.open(checkpoints, offload) as llm:
        needed = llm.check(Workload(case.lengths, case.gen_len)).footprint
        llm.loaded._load()
        passing = peak_allocated(lambda: llm.generate(case.prompts, SamplingParams(max_tokens=case.gen_len)), ())
        held = held_by(llm)
        regions = len(llm.spec.tensors) + 3 * len(llm.spec.layers) * (case.num_gpu_batches + 8)
    for tier, peak in held.items():
        predicted = sum(arena_parts(needed, tier, accelerator).values())
        assert peak <= predicted <= 1.3 * peak + 4096 * regions, (tier, needed.parts[tier])
    assert passing <= needed.total(DEVICE if accelerator else HOST) + needed.total(HOST)


def test_needs_of_all_levels_have_a_seat() -> None:
    spec = with_many_heads()
    plan = Plan.create(**uneven(6, 4), gpu_batch_size=2, num_gpu_batches=2).with_percent(ALL_ON_DISK)
    workload = Workload.running([SeatNeed(5 + 3 * row, 1 + row % 7) for row in range(9)])
    of = WorkloadPlan(spec, plan, workload, Site()).blocks.first
    seating = Cost(of).seating
    assert seating.rows == 9
    for batch, stay in enumerate(seating.stays):
        for level, slots in enumerate(stay.levels):
            assert max(one.capacity for one in slots.alone) <= of.kv.occupancies[level][batch].capacity
