"""BatchRows: what is computed next for the rows of a batch, and which rows take the places of those that have ended."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw

from h2o_flexgen.core.workload import Batch
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.rows import BatchRows
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.sampling.sampler import Sampler
from h2o_flexgen.text.tokenizer import ByteTokenizer

VOCAB = 50


def batch_of(
    prompts: Sequence[Sequence[int]], limits: Sequence[int], plan: Plan | None = None
) -> tuple[BatchRows, list[RowState]]:
    """Rows stand in the input at ten times their place."""
    tokenizer = ByteTokenizer(VOCAB)
    states = [
        RowState(10 * place, prompt, SamplingParams(max_tokens=limit), tokenizer)
        for place, (prompt, limit) in enumerate(zip(prompts, limits))
    ]
    batch = Batch(tuple(state.index for state in states), tuple(map(len, prompts)))
    plan = plan or Plan()
    return BatchRows(batch, states, plan, [plan.policy], gen_len=20, device=torch.device("cpu")), states


def logits_for(tokens: Sequence[int]) -> torch.Tensor:
    return torch.eye(VOCAB)[list(tokens)]


def test_prompts_are_padded_on_the_right_and_positions_count_from_the_first_token() -> None:
    rows, _ = batch_of([[5, 6, 7], [8]], [3, 3])
    assert rows.parts[0].tokens.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert rows.parts[0].now.is_prefill and rows.parts[0].now.positions.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert rows.parts[0].now.counts.tolist() == [0, 0] and rows.parts[0].now.capacity == 3 + 20 - 1


def test_long_prompts_are_computed_part_by_part_with_the_pads_of_their_part_alone() -> None:
    rows, _ = batch_of([[5, 6, 7], [8, 9], [10], [11], [12]], [3] * 5, Plan(prefill_tokens=4))
    assert [part.tokens.tolist() for part in rows.parts] == [[[5, 6, 7]], [[8, 9], [10, 0]], [[11], [12]]]
    assert [part.rows for part in rows.parts] == [slice(0, 1), slice(1, 3), slice(3, 5)]
    assert {part.now.capacity for part in rows.parts} == {3 + 20 - 1}
    rows.advance(logits_for([1, 2, 3, 4, 5]), Sampler(0), step=0)
    assert len(rows.parts) == 1


def test_logits_are_made_for_each_rows_own_last_token() -> None:
    rows, _ = batch_of([[5, 6, 7], [8]], [3, 3])
    hidden = torch.arange(6.0).view(2, 3, 1)
    assert rows.last_hidden(hidden).tolist() == [[2], [3]]
    rows.advance(logits_for([1, 2]), Sampler(0), step=0)
    assert rows.last_hidden(torch.tensor([[[7.0]], [[8.0]]])).tolist() == [[7], [8]]


def test_a_decode_pass_has_one_token_per_row_at_its_own_position() -> None:
    rows, states = batch_of([[5, 6, 7], [8]], [4, 4])
    rows.advance(logits_for([11, 12]), Sampler(0), step=0)
    assert rows.parts[0].tokens.tolist() == [[11], [12]] and not rows.parts[0].now.is_prefill
    assert rows.parts[0].now.positions.tolist() == [[3], [1]] and rows.parts[0].now.counts.tolist() == [3, 1]
    rows.advance(logits_for([13, 14]), Sampler(0), step=1)
    assert rows.parts[0].now.positions.tolist() == [[4], [2]] and rows.places_before == [0, 1] and rows.generation == 0
    assert [state.token_ids for state in states] == [[11, 13], [12, 14]]


def test_living_rows_from_behind_take_the_places_of_those_that_have_ended() -> None:
    rows, states = batch_of([[1], [2, 2], [3, 3, 3], [4]], [1, 9, 1, 9])
    assert rows.advance(logits_for([21, 22, 23, 24]), Sampler(0), step=0) == 4
    assert rows.places_before == [3, 1] and rows.generation == 1
    assert [row.index for row in rows.alive] == [30, 10]
    assert rows.parts[0].tokens.tolist() == [[24], [22]] and rows.parts[0].now.counts.tolist() == [1, 2]
    assert [state.finished for state in states] == [True, False, True, False]
    assert rows.advance(logits_for([25, 26]), Sampler(0), step=1) == 2
    assert rows.places_before == [0, 1] and rows.generation == 1, "no row has ended, and none moves"
    assert states[3].token_ids == [24, 25] and states[1].token_ids == [22, 26]


def test_a_batch_is_done_when_all_its_rows_have_ended() -> None:
    rows, _ = batch_of([[1], [2]], [1, 2])
    rows.advance(logits_for([3, 4]), Sampler(0), step=0)
    assert not rows.is_done
    rows.advance(logits_for([5]), Sampler(0), step=1)
    assert rows.is_done


def test_callers_hear_of_each_token_with_the_rows_place_in_the_input() -> None:
    rows, _ = batch_of([[1], [2]], [1, 2])
    heard: list[tuple[int, int]] = []
    rows.advance(logits_for([3, 4]), Sampler(0), 0, lambda row, token, text: heard.append((row, token)))
    rows.advance(logits_for([5]), Sampler(0), 1, lambda row, token, text: heard.append((row, token)))
    assert heard == [(0, 3), (10, 4), (10, 5)]


@given(draw.lists(draw.integers(1, 6), min_size=1, max_size=8))
def test_as_few_rows_as_possible_move_and_none_is_lost(limits: list[int]) -> None:
    rows, states = batch_of([[place + 1] * (1 + place % 3) for place in range(len(limits))], limits)
    for step in range(max(limits)):
        before = [row.index for row in rows.alive]
        rows.advance(logits_for([7] * len(before)), Sampler(0), step)
        alive = {state.index for state in states if not state.finished}
        if not alive:
            break
        assert sorted(now := [row.index for row in rows.alive]) == sorted(alive)
        assert [before[place] for place in rows.places_before] == now
        stayed = [place for place, row in enumerate(before[: len(alive)]) if row in alive]
        assert all(rows.places_before[place] == place for place in stayed)
        assert rows.parts[0].now.counts.tolist() == [row.prompt_len + step for row in rows.alive]
    assert [state.num_generated for state in states] == limits and rows.is_done


@pytest.mark.cuda
def test_tokens_and_positions_lie_on_the_device() -> None:
    state = RowState(0, [1, 2], SamplingParams(), ByteTokenizer(VOCAB))
    rows = BatchRows(Batch((0,), (2,)), [state], Plan(), [Plan().policy], 8, torch.device("cuda"))
    rows.advance(logits_for([3]).cuda(), Sampler(0), 0)
    assert rows.parts[0].tokens.is_cuda and rows.parts[0].now.positions.is_cuda and rows.parts[0].now.mask.is_cuda
