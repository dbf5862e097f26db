"""Rows: why they end, what they have seen, and what they hand back."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.sampling.completion import StepLogprobs, TokenLogprob
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.tokenizer import ByteTokenizer


class Ending(ByteTokenizer):
    """Bytes with two ends of sequence."""

    def __init__(self) -> None:
        super().__init__(500)
        self.eos_ids = frozenset((2, 300))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("params", "ids", "reason", "text"),
    [
        (SamplingParams(max_tokens=9), [100, 101, 2], "stop", "`a"),
        (SamplingParams(max_tokens=9), [100, 300], "stop", "`"),
        (SamplingParams(max_tokens=9), [2], "stop", ""),
        (SamplingParams(max_tokens=3), [100, 101, 2], "stop", "`a"),
        (SamplingParams(max_tokens=3), [100, 101, 102], "length", "`ab"),
        (SamplingParams(max_tokens=3, ignore_eos=True), [100, 2, 300], "length", "`<300>"),
        (SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=[101, 102]), [100, 2, 102], "stop", "`"),
        (SamplingParams(max_tokens=9, stop_token_ids=(101,), stop="c"), [100, 101], "stop", "`"),
        (SamplingParams(max_tokens=2, stop="`a"), [100, 101], "stop", ""),
    ],
)
def test_a_row_ends_by_end_of_sequence_stop_token_or_length(
    params: SamplingParams, ids: list[int], reason: str, text: str, streamed: bool
) -> None:
    row = RowState(5, [60, 61], params, Ending(), streamed=streamed)
    pieces = []
    for token in ids:
        assert not row.finished
        pieces.append(row.push(token))
    completion = row.completion()
    assert (completion.finish_reason, completion.text, completion.token_ids) == (reason, text, tuple(ids))
    assert (completion.index, completion.prompt, completion.prompt_token_ids) == (5, None, (60, 61))
    if streamed:
        assert "".join(piece or "" for piece in pieces) == text


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("params", "ids", "reason", "text"),
    [
        ({"stop": "ab", "min_tokens": 3}, [101, 102, 101, 102], "ab", "ab"),
        ({"stop": "ab", "min_tokens": 2}, [101, 102, 103, 101, 102], "ab", "abc"),
        ({"stop": "ab", "min_tokens": 1}, [101, 102], "ab", ""),
        ({"stop": ["bc", "b"], "min_tokens": 2}, [101, 102, 103], "bc", "a"),
        ({"stop": ["bcd", "b"], "min_tokens": 2}, [101, 102, 104, 102], "b", "abd"),
        ({"stop": "ab", "min_tokens": 3, "max_tokens": 3}, [101, 101, 102], None, "aab"),
        ({"stop": "ab", "min_tokens": 3, "max_tokens": 4}, [101, 101, 102, 101], None, "aaba"),
        ({"stop": "ab", "include_stop_str_in_output": True}, [103, 101, 102], "ab", "cab"),
        ({"stop": ["b", "abc"], "include_stop_str_in_output": True}, [103, 101, 102], "b", "cab"),
        ({"stop_token_ids": [102], "include_stop_str_in_output": True}, [101, 102], 102, "ab"),
        ({"stop_token_ids": [102], "stop": "b", "include_stop_str_in_output": True}, [101, 102], 102, "ab"),
        ({"stop_token_ids": [102]}, [101, 102], 102, "a"),
        ({}, [101, 300], None, "a"),
    ],
)
def test_what_ends_a_row_is_told_and_shown_if_asked_and_not_looked_for_too_early(
    params: dict[str, Any], ids: list[int], reason: int | str | None, text: str, streamed: bool
) -> None:
    row, pieces = RowState(0, [60], SamplingParams(**{"max_tokens": 9, **params}), Ending(), streamed=streamed), list[str]()
    for token in ids:
        assert not row.finished
        pieces.append(row.push(token) or "")
    completion = row.completion()
    assert (completion.stop_reason, completion.text, completion.token_ids) == (reason, text, tuple(ids))
    assert completion.outputs[0].stop_reason == reason
    assert completion.finish_reason == ("stop" if reason is not None or ids[-1] == 300 else "length")
    if streamed:
        assert "".join(pieces) == text


def test_an_end_that_is_put_off_must_leave_a_token_to_go_on_with() -> None:
    with pytest.raises(ValueError, match="min_tokens of prompt 4 forbids to end, but every one of its allowed_token_ids would"):
        RowState(4, [60], SamplingParams(min_tokens=1, allowed_token_ids=[2, 70], stop_token_ids=[70]), Ending())


def test_a_row_knows_what_it_has_seen_and_keeps_logprobs_only_when_asked() -> None:
    step = StepLogprobs(TokenLogprob(70, -0.5))
    asked = RowState(0, [60, 61], SamplingParams(max_tokens=2, logprobs=0), ByteTokenizer(300))
    silent = RowState(1, [60, 61], SamplingParams(max_tokens=2), ByteTokenizer(300))
    for token in (70, 71):
        asked.push(token, step)
        silent.push(token)
    assert asked.seen == [60, 61, 70, 71]
    assert asked.num_generated == 2
    assert asked.completion().logprobs == (step, step)
    assert silent.completion().logprobs is None


@pytest.mark.parametrize("streamed", [False, True])
def test_a_row_that_starts_anew_gives_the_tokens_it_had_and_then_takes_others(streamed: bool) -> None:
    row = RowState(0, [60, 61], SamplingParams(max_tokens=4, logprobs=0, stop="zz"), ByteTokenizer(300), streamed=streamed)
    steps = [StepLogprobs(TokenLogprob(token, -0.5)) for token in (70, 71, 72)]
    for token, step in zip((70, 71, 72), steps):
        assert row.known is None
        row.push(token, step)
    row.start_anew()
    assert (row.seen, row.logprobs, row.num_generated) == ([60, 61], [], 0)
    assert row.known == (70, steps[0])
    row.push(*row.known)
    row.start_anew()  # again, before it is as far as it was
    for token, step in zip((70, 71, 72), steps):
        assert row.known == (token, step)
        row.push(token, step)
    assert row.known is None
    row.push(73, steps[0])
    completion = row.completion()
    assert (completion.token_ids, completion.finish_reason) == ((70, 71, 72, 73), "length")
    assert (completion.text, completion.logprobs) == ("BCDE", (*steps, steps[0]))


@pytest.mark.parametrize("streamed", [False, True])
def test_forced_tokens_are_given_end_nothing_and_come_again(streamed: bool) -> None:
    params = SamplingParams(max_tokens=6, logprobs=0, stop="ab", stop_token_ids=[101])
    row = RowState(0, [60, 61], params, Ending(), streamed=streamed, forced=[100, 101, 102, 2])
    steps = [StepLogprobs(TokenLogprob(token, -1.0)) for token in (100, 101, 102, 2)]
    for step in steps[:3]:
        assert row.given == step.chosen.token_id and row.known is None
        row.push(step.chosen.token_id, step)
    row.start_anew()
    for step in steps[:3]:
        assert row.given == step.chosen.token_id and row.known == (step.chosen.token_id, step)
        row.push(step.chosen.token_id, step)
    assert row.given == 2 and row.known is None and not row.finished
    row.push(2, steps[3])
    assert row.given is None and not row.finished
    row.push(101, steps[1])
    completion = row.completion()
    assert (completion.finish_reason, completion.text, completion.token_ids) == ("stop", "`ab", (100, 101, 102, 2, 101))
    assert completion.logprobs == (*steps, steps[1])
