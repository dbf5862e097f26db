"""Workloads: how rows become batches, batches blocks, and the prompts of a batch parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as draw

from h2o_flexgen.core.site import Site
from h2o_flexgen.core.workload import MOST_PROMPTS, Batch, Block, BlockSize, Workload
from h2o_flexgen.planning.block_plan import BlockPlan, BlockPlans
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.workload_plan import WorkloadPlan
from tests.planning.worlds import tiny_spec

LENGTHS = draw.lists(draw.integers(1, 40), min_size=1, max_size=12)


@given(lengths=LENGTHS, size=draw.integers(1, 5), batches=draw.integers(1, 4))
def test_every_row_is_in_one_batch_and_the_longest_come_first(lengths: list[int], size: int, batches: int) -> None:
    blocks = Workload(tuple(lengths), 3).blocks(size, batches)
    rows = [row for block in blocks for batch in block.batches for row in batch.rows]
    assert sorted(rows) == list(range(len(lengths)))
    assert [lengths[row] for row in rows] == sorted(lengths, reverse=True)
    assert all(batch.size <= size for block in blocks for batch in block.batches)
    assert all(len(block.batches) <= batches for block in blocks)


@given(lengths=LENGTHS, size=draw.integers(1, 5), batches=draw.integers(1, 4), data=draw.data())
def test_of_the_rows_that_are_left_blocks_are_made_in_the_same_way(
    lengths: list[int], size: int, batches: int, data: draw.DataObject
) -> None:
    workload = Workload(tuple(lengths), 3)
    left = data.draw(draw.lists(draw.sampled_from(range(len(lengths))), unique=True))
    blocks = workload.blocks(size, batches, left)
    of_left = [row for block in blocks for batch in block.batches for row in batch.rows]
    every = [row for block in workload.blocks(1, 1) for batch in block.batches for row in batch.rows]
    assert of_left == [row for row in every if row in left]
    assert all(batch.lengths == tuple(lengths[row] for row in batch.rows) for block in blocks for batch in block.batches)
    assert all(block.gen_len == 3 and BlockSize.of(block) <= (size, batches) for block in blocks)


@given(lengths=LENGTHS, size=draw.integers(1, 5), batches=draw.integers(1, 4))
def test_blocks_of_one_shape_are_planned_once_and_are_all_there(lengths: list[int], size: int, batches: int) -> None:
    workload = Workload(tuple(lengths), 3)
    plan = Plan(gpu_batch_size=size, num_gpu_batches=batches)
    blocks, every = BlockPlans.of(tiny_spec(), plan, workload, Site()), workload.blocks(size, batches)
    assert len(blocks) == len(every) and [one.block for one in blocks] == [*every]
    assert [blocks[place].block for place in range(len(blocks))] == [*every]
    assert [(first.shape, count) for first, count in blocks.alike] == [*Counter(one.shape for one in blocks).items()]
    assert all(one == BlockPlan.of(one.spec, one.plan, one.block, Site()) for one in blocks)
    for place in range(len(blocks) + 1):
        assert [*blocks.followed_by(blocks, place)] == [*[*blocks][:place], *blocks]
    assert workload.first_of_length == {length: lengths.index(length) for length in dict.fromkeys(lengths)}


def test_blocks_of_many_lengths_share_what_takes_memory() -> None:
    plan = Plan(gpu_batch_size=2).with_percent((100, 0, 50, 0, 100, 0))
    blocks = BlockPlans.of(tiny_spec(), plan, Workload(tuple(range(2, 40)), 3), Site(accelerator=True))
    assert len(blocks.groups) == 19 and len({id(first.schedule) for first, _ in blocks.groups}) == 1
    assert all(one == BlockPlan.of(one.spec, one.plan, one.block, Site(accelerator=True)) for one in blocks)


def test_what_many_prompts_of_one_length_hold_is_known_from_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = Counter[int](), Workload._block

    def counted(self: Workload, rows: Sequence[int], batch_size: int) -> Block:
        made[len(rows)] += 1
        return make(self, rows, batch_size)

    monkeypatch.setattr(Workload, "_block", counted)
    workloads = (Workload.uniform(count, 2, 2) for count in (MOST_PROMPTS - 3, 5))
    many, few = (WorkloadPlan(tiny_spec(), Plan(), workload, Site()).footprint for workload in workloads)
    assert many.parts and many == few and made == {4: 2, 1: 2}
    with pytest.raises(ValueError, match=r"1000001 prompts are more than one run takes; give 1000000 at most, or run them in"):
        Workload.uniform(MOST_PROMPTS + 1, 2, 2)


def test_a_smaller_block_has_half_the_rows_and_then_half_the_batches() -> None:
    sizes, size = [], BlockSize(5, 3)
    while (smaller := size.smaller) is not None:
        sizes.append(str(smaller))
        size = smaller
    assert sizes == ["2 x 3", "1 x 3", "1 x 1"]


@given(lengths=LENGTHS, tokens=draw.integers(1, 100))
def test_parts_are_neighbours_of_no_more_tokens_than_allowed_or_one_row(lengths: list[int], tokens: int) -> None:
    batch = Batch(tuple(range(len(lengths))), tuple(lengths), tuple(range(len(lengths))), 99)
    parts = batch.parts(tokens)
    assert [pair for part in parts for pair in zip(part.rows, part.lengths, part.seen)] == list(
        zip(batch.rows, batch.lengths, batch.seen)
    )
    assert all(part.size == 1 or part.size * part.prompt_len <= tokens for part in parts)
    for part, after in pairwise(parts):  # one row more would have been too much
        assert (part.size + 1) * max(part.prompt_len, after.lengths[0]) > tokens


def test_a_text_that_lives_on_is_planned_for_as_its_last_block() -> None:
    [block] = Workload((8,), 1, context=50).blocks(4, 1)
    assert block.batches == (Batch((0,), (8,), (42,), 50),) and block.batches[0].lives_on
    assert not Workload((8,), 1).blocks(4, 1)[0].batches[0].lives_on
