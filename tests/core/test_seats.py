"""Seats: which row waits for which, and how much room each has."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as draw

from h2o_flexgen.core.prefix_groups import SharedPrefix
from h2o_flexgen.core.seats import PrefixRoom, SeatNeed, Seats, seats_of
from h2o_flexgen.core.workload import Batch, Workload
from h2o_flexgen.policies.by_position import Full

NEEDS = draw.lists(
    draw.builds(SeatNeed, draw.integers(1, 40), draw.integers(0, 30), draw.none(), draw.just(False)), min_size=1, max_size=60
)


@given(NEEDS, draw.integers(1, 6))
def test_every_row_waits_in_one_queue_whose_seats_have_room_for_it(needs: list[SeatNeed], batches: int) -> None:
    found = seats_of(needs, range(len(needs)), batches)
    assert 1 <= len(found) <= batches
    assert sorted(row for seats in found for row in seats.queue) == list(range(len(needs)))
    for seats in found:
        for row in seats.queue:
            need = needs[row]
            assert any(need.prompt_len <= one.prompt_len and need.gen_len <= one.gen_len for one in seats.largest)
        assert set(seats.largest) <= {needs[row] for row in seats.queue}
        assert seats.longest_prompt == max(needs[row].prompt_len for row in seats.queue)


@given(NEEDS, draw.integers(1, 6))
def test_rows_that_need_more_are_together_and_the_longest_begin(needs: list[SeatNeed], batches: int) -> None:
    found = seats_of(needs, range(len(needs)), batches)
    for larger, smaller in pairwise(found):
        assert min(needs[row].tokens for row in larger.queue) >= max(needs[row].tokens for row in smaller.queue)
    for seats in found:
        grown = [needs[row].gen_len for row in seats.queue]
        assert grown == sorted(grown, reverse=True)


def test_queues_are_of_equal_work_although_not_of_equal_length() -> None:
    needs = [SeatNeed(10, 100)] * 10 + [SeatNeed(10, 10)] * 100
    long_ones, short_ones = seats_of(needs, range(len(needs)), 2)
    assert (len(long_ones.queue), len(short_ones.queue)) == (10, 100)
    assert Full().occupancy(batch_of(long_ones), 1).capacity == 109 and Full().occupancy(batch_of(short_ones), 1).capacity == 19


def batch_of(seats: Seats) -> Batch:
    return Batch(seats.queue[:2], (seats.longest_prompt,) * 2, seats=seats)


def test_a_block_has_no_more_seats_and_batches_than_rows() -> None:
    ((block, rows),) = Workload.running([SeatNeed(5, 7)] * 5).alike_blocks(3, 4)
    assert [batch.size for batch in block.batches] == [3, 2] and len(rows) == 5 and block.is_running
    ((block, _),) = Workload.running([SeatNeed(5, 7)] * 50).alike_blocks(3, 4)
    assert [batch.size for batch in block.batches] == [3, 3, 3, 3]


@given(NEEDS)
def test_passes_never_outlast_a_block(needs: list[SeatNeed]) -> None:
    """Even if one row follows the other in a single seat."""
    ((block, _),) = Workload.running(needs).alike_blocks(1, 1)
    assert block.gen_len >= sum(max(1, need.gen_len) for need in needs)


SHARING = draw.lists(
    draw.tuples(draw.integers(1, 20), draw.integers(0, 30), draw.integers(0, 4)), min_size=1, max_size=60
)  # own tokens, growth, group


def sharing(rows: list[tuple[int, int, int]], copies: bool = False) -> list[SeatNeed]:
    """Rows of four groups, each with a prefix of another length, and of none."""
    shared = [None, *(SharedPrefix(group, 10 * group) for group in range(1, 5))]
    return [
        SeatNeed.behind(prefix := shared[group], own + (0 if prefix is None else prefix.tokens), grown, copies)
        for own, grown, group in rows
    ]


@given(SHARING, draw.integers(1, 4), draw.integers(1, 6))
def test_rows_of_a_group_follow_each_other_in_the_same_order_in_all_queues(
    rows: list[tuple[int, int, int]], batches: int, size: int
) -> None:
    needs, orders = sharing(rows), []
    for seats in (one.for_batches_of(size) for one in seats_of(needs, range(len(needs)), batches)):
        groups = [needs[row].group for row in seats.queue if needs[row].prefix is not None]
        order = list(dict.fromkeys(groups))
        assert groups == [group for each in order for group in groups if group == each]
        orders.append(order)
        longest = max((prefix.room for row in seats.queue if (prefix := needs[row].prefix) is not None), default=0)
        assert longest <= seats.prefixes.of_batch <= seats.prefixes.of_all, "a row that waits can have a seat some time"
    everywhere = [group for group in range(1, 5) if all(group in order for order in orders)]
    assert len({tuple(group for group in order if group in everywhere) for order in orders}) <= 1


@given(SHARING, draw.booleans())
def test_a_prefix_takes_no_slots_unless_it_is_copied_and_is_read_by_no_row(
    rows: list[tuple[int, int, int]], copies: bool
) -> None:
    for need, (own, grown, _) in zip(sharing(rows, copies), rows):
        shared = 0 if need.prefix is None else need.prefix.tokens
        assert (need.read, need.gen_len) == (own, grown)
        assert need.prompt_len == own + (shared if copies else 0) and need.spared == (shared if copies else 0)


def test_room_is_for_the_prefixes_of_neighbours() -> None:
    shared = [SharedPrefix(group, 16 * (group + 1)) for group in range(3)]
    needs = [SeatNeed(20, 5, prefix) for prefix in shared for _ in range(4)]
    (each,) = seats_of(needs, range(12), 1)
    alone, two, all_of_them = (each.for_batches_of(size) for size in (1, 4, 12))
    assert alone.prefixes == (48, 48, 96, 48) and two.prefixes == (48, 80, 96, 80)
    assert all_of_them.prefixes == (48, 96, 96, 96)


def test_states_at_the_ends_of_prefixes_take_room_but_no_computing() -> None:
    shared = [SharedPrefix(group, 16 * (group + 1), beside=160) for group in range(3)]
    needs = [SeatNeed(20, 5, prefix) for prefix in shared for _ in range(4)]
    (queue,) = seats_of(needs, range(12), 1)
    assert shared[2].room == 208 and queue.for_batches_of(1).prefixes == (48, 208, 576, 48)
    assert queue.for_batches_of(5).prefixes == (48, 400, 576, 80)
    assert PrefixRoom.planned(1200, 100, 2, beside=160) == (100, 688, 1200, 528)
    assert PrefixRoom.planned(176, 100, 2, beside=160) == (16, 176, 176, 16)
