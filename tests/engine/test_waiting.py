"""Waiting: which row takes a free seat, and when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from h2o_flexgen.core.prefix_groups import SharedPrefix
from h2o_flexgen.core.seats import SeatNeed
from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import BlockSize, Workload
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.seated_rows import WaitingJob
from h2o_flexgen.planning.block_plan import BlockPlan, BlockPlans
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.tokenizer import ByteTokenizer
from tests.planning.worlds import tiny_spec


def waiting_for(
    needs: Sequence[SeatNeed], batch_size: int, batches: int, prefixes: Sequence[SharedPrefix | None] = ()
) -> tuple[WaitingJob, BlockPlan, list[int]]:
    made: list[int] = []

    def row(place: int) -> RowState:
        made.append(place)
        need = needs[place]
        return RowState(place, [1] * need.prompt_len, SamplingParams(max_tokens=need.gen_len), ByteTokenizer(50))

    plan = Plan(gpu_batch_size=batch_size, num_gpu_batches=batches)
    planned = BlockPlans.of(tiny_spec(), plan, Workload.running(needs, prefixes), Site()).first
    waiting = WaitingJob(row)
    waiting.seat_in(planned)
    return waiting, planned, made


def places(rows: Sequence[RowState]) -> list[int]:
    return [row.index for row in rows]


def test_an_empty_batch_is_filled_and_rows_are_made_only_then() -> None:
    waiting, _, made = waiting_for([SeatNeed(3, 9), SeatNeed(5, 8), SeatNeed(4, 7), SeatNeed(2, 6)], 3, 1)
    assert made == [] and len(waiting) == 4
    assert places(waiting.take(0, seated=[])) == [1, 2, 0], "the longest prompts first: neighbours have few pads"
    assert sorted(made) == [0, 1, 2] and len(waiting) == 1


def test_newcomers_wait_until_some_seats_are_free_but_the_last_do_not() -> None:
    waiting, _, _ = waiting_for([SeatNeed(3, 20 - place) for place in range(20)], 16, 1)
    assert len(waiting.take(0, [])) == 16
    assert waiting.take(0, seated=[None] * 15) == [], "one seat in sixteen"
    assert places(waiting.take(0, seated=[None] * 14)) == [16, 17]
    assert waiting.take(0, seated=[None] * 15) == []
    assert places(waiting.take(0, seated=[None] * 14)) == [18, 19]
    waiting, _, _ = waiting_for([SeatNeed(3, 20 - place) for place in range(17)], 16, 1)
    waiting.take(0, [])
    assert places(waiting.take(0, seated=[None] * 15)) == [16], "nothing else will come"


def test_a_batch_with_an_empty_queue_takes_what_fits_from_others() -> None:
    needs = [
        SeatNeed(10, 30),
        SeatNeed(10, 20),
        SeatNeed(10, 10),
        SeatNeed(10, 10),
        SeatNeed(10, 10),
        SeatNeed(10, 10),
        SeatNeed(10, 10),
    ]
    waiting, planned, _ = waiting_for(needs, 1, 2)
    assert [batch.seats and batch.seats.queue for batch in planned.block.batches] == [(0, 1), (2, 3, 4, 5, 6)]
    assert places(waiting.take(0, [])) == [0] and places(waiting.take(1, [])) == [2]
    assert places(waiting.take(0, [])) == [1] and places(waiting.take(0, [])) == [3]
    assert places(waiting.take(1, [])) == [4]


def test_seats_of_a_small_class_never_take_rows_that_need_more() -> None:
    waiting, _, _ = waiting_for([SeatNeed(10, 30)] * 2 + [SeatNeed(10, 10)] * 6, 1, 2)
    assert [places(waiting.take(1, [])) for _ in range(6)] == [[2], [3], [4], [5], [6], [7]]
    assert len(waiting) == 2 and waiting.take(1, []) == []


def test_all_rows_that_have_not_ended_begin_anew_in_other_blocks() -> None:
    waiting, planned, made = waiting_for([SeatNeed(3, 2)] * 5, 3, 1)
    first, second, third = waiting.take(0, [])
    for row in (first, second, third):
        row.push(7)
    first.push(8)
    waiting.end(first)
    assert list(waiting.left([planned])) == [1, 2, 3, 4]
    assert second.num_generated == third.num_generated == 0 and second.known == (7, None)
    rest = BlockPlans.of(
        planned.spec, planned.plan, Workload.running([SeatNeed(3, 2)] * 5), Site(), BlockSize(3, 1), [1, 2, 3, 4]
    )
    waiting.seat_in(rest.first)
    again = waiting.take(0, [])
    assert again[0] is second and again[1] is third and made == [0, 1, 2, 3], "the same rows, with the tokens that they had"


@pytest.mark.parametrize("finished", [True, False])
def test_a_row_that_finished_while_memory_ran_out_does_not_come_again(finished: bool) -> None:
    waiting, planned, _ = waiting_for([SeatNeed(3, 1 if finished else 2)] * 2, 2, 1)
    row, _ = waiting.take(0, [])
    row.push(7)
    assert list(waiting.left([planned])) == ([1] if finished else [0, 1])


def test_whoever_shares_a_prefix_waits_until_there_is_room_for_that() -> None:
    first, second = SharedPrefix(0, 32), SharedPrefix(1, 16)
    waiting, planned, _ = waiting_for([SeatNeed(40, 9)] * 3, 3, 1, [first, first, None])
    (batch,) = planned.block.batches
    assert batch.seats is not None and batch.seats.prefixes == (32, 32, 32, 32)
    assert places(waiting.take(0, [second, None])) == [2], "neither of the others has room beside the second prefix"
    assert places(waiting.take(0, [first, None])) == [0], "this one is there"
    assert places(waiting.take(0, [])) == [1]


def test_no_row_is_lost_where_memory_runs_out_while_rows_are_made() -> None:
    waiting, planned, made = waiting_for([SeatNeed(3, 2)] * 5, 3, 1)
    make = waiting._make

    def make_two(place: int) -> RowState:
        if len(made) == 2:
            raise MemoryError
        return make(place)

    waiting._make = make_two
    with pytest.raises(MemoryError):
        waiting.take(0, [])
    assert made == [0, 1] and list(waiting.left([planned])) == [0, 1, 2, 3, 4]
