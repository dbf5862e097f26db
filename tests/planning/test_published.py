"""The cost model meets what was published of FlexGen and H2O on a T4 within 20 %, or a row says how far off it is, and why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.core.site import DEVICE, HOST, Site
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.planning.footprint import MemoryLimits, left_to_system
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.pricing import Pricing
from h2o_flexgen.planning.workload_plan import DoesNotFit, WorkloadPlan
from h2o_flexgen.schedule.ops import COMPUTE_LANE
from tests.scripts.loading import PROJECT, load_script

published = load_script("published.py", "benchmarks")
T4 = Machine.load(published.MACHINE)
RESULTS = json.loads((PROJECT / "benchmarks" / "results" / "published-t4.json").read_text(encoding="utf-8"))
T4_MEMORY = MemoryLimits(device=T4.device_bytes, host=T4.host_bytes, disk=T4.disk_bytes)
LENGTHS = (512, 32)


def row_id(row: Any) -> str:
    return f"{row.name} {row.model} {row.batches[0]}x{row.batches[1]} {row.lengths[0]}+{row.lengths[1]} {row.tokens_per_second}"


@pytest.mark.parametrize("row", published.ROWS, ids=row_id)
def test_a_published_figure_is_met_or_it_is_said_how_far_off_and_why(row: Any) -> None:
    low, high = row.band
    assert low <= published.as_published(row, T4)["ratio"] <= high


def test_few_rows_are_outside() -> None:
    required = [row for row in published.ROWS if row.source in (published.FLEXGEN, published.H2O)]
    outside = [(row.model, row.source) for row in required if row.outside]
    assert outside == [("opt-175b", published.FLEXGEN), ("opt-6.7b", published.H2O)] and len(required) == 21
    assert [row for row in published.ROWS if row.outside and (row.band[0] < 0.5 or row.band[1] > 2 or not row.outside[1])] == []


def test_the_table_that_is_kept_is_of_these_rows_and_of_this_model() -> None:
    kept = [(row["source"], row["tokens_per_second"], row["ratio"]) for row in RESULTS["rows"]]
    assert [one[:2] for one in kept] == [(row.source, row.tokens_per_second) for row in published.ROWS]
    assert all(row.band[0] <= ratio <= row.band[1] for row, (_, _, ratio) in zip(published.ROWS, kept))
    assert published.as_published(published.ROWS[0], T4)["ratio"] == pytest.approx(kept[0][2], rel=0.05)


def test_the_zigzag_schedule_is_never_slower_than_their_loop_under_the_same_plan() -> None:
    found: dict[tuple[object, ...], dict[str, float]] = {}
    for one in RESULTS["schedules"]:
        place = (one["name"], one["model"], *one["batches"], *one["lengths"], one["attend_on"])
        found.setdefault(place, {})[one["schedule"]] = one["tokens_per_second"]
    assert len(found) == 14
    gains = {place: both["zigzag"] / both["flexgen_barrier"] for place, both in found.items()}
    assert min(gains.values()) > 0.99 and max(gains.values()) > 1.3


# -- what their own model chose, and what fits -----------------------------------------------------------------------------


def planned(model: str, size: int, count: int, percent: tuple[int, ...], **options: object) -> WorkloadPlan:
    plan = Plan.create(gpu_batch_size=size, num_gpu_batches=count, attend_on=HOST, **options).with_percent(percent)
    return WorkloadPlan(published.spec_of(model, plan), plan, Workload.uniform(size * count, *LENGTHS), Site(accelerator=True))


THEIR_30B = ("opt-30b", 48, 3, published.MOSTLY_HOST)


def test_their_plan_for_30b_does_not_fit_the_card_as_they_compute_prompts() -> None:
    """All prompts of a batch at once. (Their model has it at 18.8 GB, and lets it pass; it ran because their rule for whole
    tensors places 8 % of the weights on the card where 20 % were asked for.)"""
    asked = planned(*THEIR_30B, prefill_tokens=published.WHOLE_BATCH, schedule=published.THEIRS)
    assert asked.footprint.total(DEVICE) == pytest.approx(27.16e9, rel=0.01)
    with pytest.raises(DoesNotFit, match=r"plan needs 27\.\d+ GB in GPU memory \(weights 11\.96 GB.*the limit is 16\.00 GB"):
        asked.refuse_what_does_not_fit(T4_MEMORY)


def test_computed_in_parts_of_prompts_it_fits_with_all_the_weights_that_were_asked_for() -> None:
    """Through small places the prompts go home part by part, and what is made of a part takes its place."""
    asked = planned(*THEIR_30B)
    asked.refuse_what_does_not_fit(T4_MEMORY)
    held = asked.footprint
    assert held.total(DEVICE) == pytest.approx(15.40e9, rel=0.01)
    assert held.parts[DEVICE]["KV buffers"] < 0.2e9 and held.parts[DEVICE]["working space"] < 0.45e9


@pytest.mark.parametrize("row", published.ROWS, ids=row_id)
def test_every_published_plan_fits_the_machine_that_it_ran_on(row: Any) -> None:
    """With its weights where they lay, and with its system's share of the card left out. (They leave the host nothing.)"""
    limits = replace(T4_MEMORY, device=T4.device_bytes - left_to_system(T4)[DEVICE])
    row.planned(row.plan(published.THEIRS, prefill_tokens=Plan.prefill_tokens)).refuse_what_does_not_fit(limits)


def test_their_largest_block_for_30b_has_most_of_the_card_left() -> None:
    """160 rows of 256 tokens in each of two batches. With three buffers of all rows and slots, and with the outcome of
    attention beside every state of a prompt, it needed 17.24 GB."""
    (row,) = (row for row in published.ROWS if row.batches == (160, 2))
    asked = row.planned(row.plan(published.THEIRS, prefill_tokens=Plan.prefill_tokens).with_percent(row.percent))
    assert asked.footprint.total(DEVICE) == pytest.approx(10.36e9, rel=0.01)


ASKED_AND_PLACED = (
    ((0, 8, 12), (0, 0.1)),
    ((13, 20, 25), (8.1, 8.3)),
    ((26, 37), (40.6, 40.8)),
    ((38, 49), (48.7, 48.9)),
    ((50, 62), (50, 51.3)),
    ((63, 75), (59.2, 59.4)),
    ((76, 87), (91.8, 92)),
    ((88, 100), (99.9, 100)),
)


@pytest.mark.parametrize(("asked", "placed"), ASKED_AND_PLACED)
def test_their_rule_for_whole_tensors_places_what_it_is_known_to_place(
    asked: tuple[int, ...], placed: tuple[float, float]
) -> None:
    spec = published.spec_of("opt-30b", Plan())
    found = [published.placed_by_their_rule(spec, (share, 100 - share)) for share in asked]
    assert all(placed[0] <= on_device <= placed[1] for on_device, _ in found)
    assert all(sum(both) == pytest.approx(100, abs=0.02) for both in found), "nothing is on the disk"


def test_their_rule_puts_the_first_half_of_every_layer_on_the_disk_where_half_was_asked_for() -> None:
    spec = published.spec_of("opt-175b", Plan())
    assert published.placed_by_their_rule(spec, (0, 50)) == pytest.approx((0, 50), abs=0.1)


def test_all_in_memory_but_the_weights_of_175b_is_refused_for_the_host() -> None:
    with pytest.raises(DoesNotFit, match=r"in CPU memory .*the limit is 208\.00 GB"):
        planned("opt-175b", 27, 16, (0, 50, 0, 50, 0, 100)).refuse_what_does_not_fit(T4_MEMORY)


def test_rows_one_by_one_which_their_search_returns_for_175b_fit_but_are_bound_by_products() -> None:
    """Their rates do not depend on the rows of a batch; here every one of 432 products reads the weights from the card."""
    busy: dict[int, dict[str, float]] = {}
    for size, count in ((1, 432), (32, 8)):
        one = planned("opt-175b", size, count, published.HALF_ON_DISK, pin_weight=False)
        one.refuse_what_does_not_fit(T4_MEMORY)
        (block,) = one.blocks
        busy[size] = Pricing(block, T4).lane_seconds(1) | {"rows": float(size * count)}
    assert max(busy[1], key=lambda lane: busy[1][lane]) == COMPUTE_LANE
    per_row = {
        size: max(seconds for lane, seconds in one.items() if lane != "rows") / one["rows"] for size, one in busy.items()
    }
    assert per_row[1] > 1.15 * per_row[32]


def test_results_name_no_folder_of_a_person() -> None:
    assert str(Path.home()) not in json.dumps(RESULTS)


# -- other machines, with this engine's kernels ----------------------------------------------------------------------------

SMALL, LARGE, _ = published.ROWS[:3]
GPU_RESULTS = json.loads((PROJECT / "benchmarks" / "results" / "published-gpus.json").read_text(encoding="utf-8"))


def priced(row: Any, gpu: str, way: str) -> dict[str, Any]:
    schedule, options, resident = published.WAYS[way]
    plan = row.plan(schedule, **{"prefill_tokens": Plan.prefill_tokens, **options})
    found: dict[str, Any] = published.priced_on(row, plan, gpu, published.GPUS[gpu], resident)
    return found


ZIGZAG, _, ALL_ON_GPU = list(published.WAYS)[1:]


def test_launches_in_front_of_the_work_lengthen_a_step_by_what_they_take() -> None:
    found = priced(SMALL, "h100", ZIGZAG)
    seconds = published.launches_of(SMALL.plan(published.OURS)).seconds(published.GPUS["h100"])
    in_front = found["step_seconds"] - found["step_seconds_hidden"]
    blocks, like_mlps = 32, 2  # the embedding and the head
    assert in_front == pytest.approx(blocks * seconds["attention"] + (blocks + like_mlps) * seconds["mlp"], rel=1e-3)
    assert found["tokens_per_second"] < found["tokens_per_second_hidden"]


def test_a_plan_that_does_not_fit_says_what_it_lacks_and_has_no_price() -> None:
    found = priced(LARGE, "rtx-4090-pcie4", ALL_ON_GPU)
    assert list(found) == ["does_not_fit"] and published.gpu_cell(found) == found["does_not_fit"]
    assert "GB on device, 23.02 GB is free" in found["does_not_fit"]


def test_as_much_of_the_weights_as_fits_stays_on_the_gpu() -> None:
    assert list(published.lowered((3, 90, 0, 100))) == [(3, 90, 0, 100), (1, 92, 0, 100)]
    plan = LARGE.plan(published.OURS, attend_on=HOST)
    chosen = published.placed(LARGE, plan, list(published.lowered(LARGE.percent)), T4)
    assert chosen.percent[0] < LARGE.percent[0] and sum(chosen.percent[:2]) == 100


def test_the_estimates_that_are_kept_are_of_these_plans_and_say_what_they_assume() -> None:
    rows = GPU_RESULTS["rows"]
    assert {row["machine"] for row in rows} == set(published.GPUS) == set(GPU_RESULTS["assumed"]["hosts"])
    assert GPU_RESULTS["columns"][3:] == list(published.GPUS) and published.gpu_cells(rows) == GPU_RESULTS["cells"]
    assert GPU_RESULTS["title"].startswith("ESTIMATED") and GPU_RESULTS["notes"] == published.gpu_notes()
    assert GPU_RESULTS["assumed"]["shares"] == published.stated_shares()
    kept = next(row for row in rows if (row["model"], row["way"], row["machine"]) == ("opt-6.7b", ZIGZAG, "h200"))
    assert priced(SMALL, "h200", ZIGZAG)["tokens_per_second"] == pytest.approx(kept["tokens_per_second"], rel=0.05)


def test_a_mixture_is_priced_on_the_machines_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer bits cross the link in less time, and more rows share what crosses it."""
    mixtures = load_script("published_mixtures.py", "benchmarks")
    machine, found = Machine.load(mixtures.MACHINES / "rtx-a5000.yaml"), {}
    for batches, way in (((1,), "16 bits"), ((2,), "16 bits"), ((1,), "4 bits, h2o 20 %")):
        monkeypatch.setattr(mixtures, "BATCHES", batches)
        found[batches, way] = mixtures.priced(machine, mixtures.WAYS[way]).step_rate
    few, more, packed = found.values()
    assert 1.5 * few < more < 2.1 * few and 2 * few < packed
    assert mixtures.priced(replace(machine, host_bytes=64e9), {}) is None
