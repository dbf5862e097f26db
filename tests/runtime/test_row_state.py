"""Rows: why they end, what they have seen, and what they hand back."""

from __future__ import annotations

import pytest

from h2o_flexgen.runtime.output import StepLogprobs, TokenLogprob
from h2o_flexgen.runtime.row_state import RowState
from h2o_flexgen.runtime.sampling_params import SamplingParams
from h2o_flexgen.runtime.tokenizer import ByteTokenizer


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
