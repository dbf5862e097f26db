"""The room for what requests that arrive share: what is tried, and that seats come first."""

from __future__ import annotations

import pytest

from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.planning.plan import JUDGED, Plan
from h2o_flexgen.planning.workload_plan import DoesNotFit, first_that_fits, prefix_rooms, rooms_to_search
from tests.helpers.refusals import one_line

H2O = {"kv_policy": "h2o", "kv_budget": 0.2}


def test_the_most_that_is_of_use_is_tried_first_and_nothing_last() -> None:
    assert prefix_rooms(Plan(gpu_batch_size=4), 1024) == [1024, 512, 256, 128, 64, 32, 0]
    assert prefix_rooms(Plan(gpu_batch_size=8, num_gpu_batches=3), 100)[:3] == [336, 160, 80]
    assert prefix_rooms(Plan(), 32) == prefix_rooms(Plan(shared_prefixes=False), 1024) == [0]
    assert prefix_rooms(Plan.create(**H2O), 1024) == prefix_rooms(Plan(kv_codec="group4"), 1024) == [0]
    assert prefix_rooms(Plan.create(prefix_policy=JUDGED, **H2O), 1024)[0] == 1024
    assert prefix_rooms(Plan(gpu_batch_size=16), 100, beside=64) == [352, 176, 0], "each has states beside its tokens"
    assert rooms_to_search(Plan(), 1000, beside=64) == [1072, 0]
    assert prefix_rooms(Plan.create(**H2O), 1024, 77) == [77] == rooms_to_search(Plan.create(**H2O), 1024, 77)


def test_why_there_is_no_room_is_told() -> None:
    reasons = (
        (Plan(shared_prefixes=False), "they are off, or the model's layers have windows"),
        (Plan(schedule="row_by_row"), "schedule='row_by_row' cannot"),
        (Plan(pipeline=2), "a pipeline of 2 devices cannot"),
    )
    for plan, why in reasons:
        said = one_line(lambda plan=plan: prefix_rooms(plan, 100, 64))  # type: ignore[misc]
        assert said == f"prefix_room is 64, but no prefixes are shared ({why}); leave prefix_room out"


def test_a_search_looks_for_a_plan_with_room_and_then_for_one_without() -> None:
    assert rooms_to_search(Plan(gpu_batch_size=64), 1000) == [1008, 0] and rooms_to_search(Plan.create(**H2O), 1000) == [0]
    tried = list[int]()

    def make(room: int) -> str:
        tried.append(room)
        if room > fits:
            raise DoesNotFit(f"{room} do not fit")
        return "a plan"

    fits = 0
    assert first_that_fits([1008, 0], make) == "a plan" and tried == [1008, 0]
    fits = -1
    with pytest.raises(DoesNotFit, match=r"^0 do not fit"):
        first_that_fits([1008, 0], make)


@pytest.mark.parametrize(("batches", "of_batch"), [(1, 4096), (2, 2048), (16, 1024)])
def test_batches_have_the_room_together(batches: int, of_batch: int) -> None:
    ((block, _),) = Workload.arriving(SeatNeed(1024, 9), 64, 4090).alike_blocks(4, batches)
    assert block.prefix_room == 4096 and len(block.batches) == batches
    for batch in block.batches:
        assert batch.seats is not None and batch.seats.prefixes == (1023, of_batch, 4096, of_batch)
