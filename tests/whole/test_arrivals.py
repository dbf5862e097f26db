"""Requests that come while a block runs: whenever it comes, each row says what the resident loop says of it alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.engine.arrivals import GIVEN_UP, Arrival, Arrivals, Closed, TooLong
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.engine.job import Request
from h2o_flexgen.engine.reports import Tick
from h2o_flexgen.engine.restarted_run import Shrink
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.sampling.sampler import NoTokenLeft, Sampler
from h2o_flexgen.schedule.ops import Op
from h2o_flexgen.text.prompts import Prompt
from tests.engine.test_shrink import OF_TORCH, fail_at
from tests.helpers.contract import BY_HEAD, POLICIES, WEIGHTS, Case, Checkpoints
from tests.helpers.pairwise import ELSEWHERE, on_devices
from tests.helpers.patience import PATIENCE_SECONDS
from tests.whole.test_stream import GROWTH, LENGTHS, MIXES, nothing_runs_on, same

__all__ = ["nothing_runs_on"]

LONGEST, MOST = max(LENGTHS), max(GROWTH)
FOUR = SamplingParams(max_tokens=4)
CHOICES = {
    "kind": ("opt", "llama-gqa"),
    "percent": MIXES,
    "gpu_batch_size": (1, 2, 3),
    "num_gpu_batches": (1, 2),
    "policy": (POLICIES[0], POLICIES[1], POLICIES[4], BY_HEAD[0]),
    "prefill_tokens": (1024, 12),
    ("weight_codec", "compute"): WEIGHTS[:2],
    "kv_codec": (PLAIN, "group4"),
}


class Guests:
    """The requests: the first few at once, and each other one when so many tokens were heard of."""

    def __init__(self, case: Case, arrivals: Arrivals, at_once: int, every: int) -> None:
        self.case, self.arrivals, self.every = case, arrivals, every
        self.heard: dict[int, list[int]] = {}
        self.come: list[Arrival] = []
        for _ in range(at_once):
            self.one_comes()

    def one_comes(self) -> None:
        place = len(self.come)
        if place < len(self.case.prompts):
            request = Request(Prompt(None, tuple(self.case.prompts[place])), SamplingParams(max_tokens=GROWTH[place]))
            self.come.append(self.arrivals.offer(request, self.hear))

    def hear(self, row: RowState, token: int, text: str | None) -> None:
        self.heard.setdefault(row.row, []).append(token)
        if sum(map(len, self.heard.values())) % self.every == 0:
            self.one_comes()

    def all_served(self, llm: LLM, **options: Any) -> list[Arrival]:
        over = []
        while len(self.come) < len(self.case.prompts) or len(over) < len(self.come):
            over += llm.generate_arriving(self.arrivals, **options)
            self.one_comes()
        return over


def hold_contract(case: Case, checkpoints: Checkpoints, offload: Path, at_once: int = 2, every: int = 3) -> None:
    with case.open(checkpoints, offload) as llm:
        guests = Guests(case, llm.arrivals(LONGEST, MOST), at_once, every)
        assert len(guests.all_served(llm)) == len(case.prompts)
        assert guests.arrivals.load == (0, 0, case.gpu_batch_size * case.num_gpu_batches)
        assert llm.loaded._memories is not None and llm.loaded._memories.disk.meter.used_bytes == 0
    for place, arrival in enumerate(guests.come):
        alone = checkpoints.resident_logits(replace(case, gen_len=GROWTH[place]), (place,))
        assert list(arrival.completion.token_ids) == [int(step[0].argmax()) for step in alone], f"row {place}: {case}"
        assert guests.heard[place] == list(arrival.completion.token_ids)


@pytest.mark.parametrize("values", on_devices(CHOICES, share=ELSEWHERE))
def test_each_row_says_what_the_resident_loop_says_of_it_alone(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    hold_contract(Case(lengths=LENGTHS[:6], **values), checkpoints, offload)


def served(case: Case, checkpoints: Checkpoints, offload: Path, at_once: int, every: int = 1) -> tuple[list[Tick], Guests]:
    ticks = list[Tick]()
    with case.open(checkpoints, offload) as llm:
        guests = Guests(case, llm.arrivals(LONGEST, MOST), at_once, every)
        guests.all_served(llm, on_tick=ticks.append)
    return ticks, guests


def test_whoever_comes_takes_a_seat_at_the_next_pass(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("llama-gqa", lengths=LENGTHS, gpu_batch_size=4)
    ticks, _ = served(case, checkpoints, offload, at_once=1)
    assert sum(GROWTH) / 4 <= len(ticks) < sum(GROWTH) / 4 * 1.5, "seats stayed empty although others waited"


def test_a_batch_without_requests_is_filled_again_when_so_many_wait(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("llama-gqa", lengths=LENGTHS, gpu_batch_size=2, num_gpu_batches=2)
    ticks, guests = served(case, checkpoints, offload, at_once=1)
    begun_anew = [tick.number for tick in ticks if tick.alive > 2]
    assert begun_anew, "one batch served them all"
    assert guests.arrivals.load.waiting == 0


def test_a_block_ends_before_its_passes_do_and_the_next_goes_on(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("opt", lengths=LENGTHS, gpu_batch_size=1)
    with case.open(checkpoints, offload) as llm:
        arrivals = llm.arrivals(LONGEST, MOST, rows=1)
        few = replace(arrivals.planned.workload, prompt_lens=(LONGEST,) * 3, gen_lens=(MOST,) * 3)
        arrivals = Arrivals(replace(arrivals.planned, workload=few), llm.row_maker)
        guests = Guests(case, arrivals, len(LENGTHS), 1)
        blocks = 0
        while any(not arrival.is_over for arrival in guests.come):
            blocks += bool(list(llm.generate_arriving(arrivals)))
    assert blocks >= sum(GROWTH) / (3 * MOST + 1)


def test_a_request_that_is_given_up_leaves_the_queue_or_the_seat(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("opt", lengths=LENGTHS[:4], gpu_batch_size=1)
    with case.open(checkpoints, offload) as llm:
        arrivals = llm.arrivals(LONGEST, MOST)
        come: list[Arrival] = []

        def hear(row: RowState, token: int, text: str | None) -> None:
            if row.num_generated == 2:
                arrivals.give_up(come[0])
                arrivals.give_up(come[2])

        params = SamplingParams(max_tokens=5)
        come += [arrivals.offer(Request(Prompt(None, tuple(one)), params), hear) for one in case.prompts]
        over = list(llm.generate_arriving(arrivals))
    assert [arrival.completion.finish_reason for arrival in come] == [GIVEN_UP, "length", GIVEN_UP, "length"]
    assert [len(arrival.rows[0].token_ids) for arrival in come] == [2, 5, 0, 5]
    assert over == [come[0], come[1], come[3]]


def test_several_completions_and_log_probabilities_are_those_of_generate(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("qwen3", lengths=LENGTHS[:3], gpu_batch_size=3)
    params = SamplingParams(max_tokens=4, n=3, temperature=1.0, seed=5, logprobs=2, prompt_logprobs=1)
    with case.open(checkpoints, offload) as llm:
        wanted = llm.generate(case.prompts, params)
        arrivals = llm.arrivals(LONGEST, MOST)
        come = [arrivals.offer(Request(Prompt(None, tuple(one)), params)) for one in case.prompts]
        assert list(llm.generate_arriving(arrivals)) and all(one.is_over for one in come)
    assert same([one.completion for one in come], wanted)


def test_where_memory_runs_out_the_block_goes_on_smaller_and_nothing_is_lost(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, Op.COMPUTE, step=3, most_rows=2, error=lambda: RuntimeError(OF_TORCH))
    case, shrinks = Case("opt", lengths=LENGTHS[:8], gpu_batch_size=4, num_gpu_batches=1), list[Shrink]()
    with case.open(checkpoints, offload) as llm:
        guests = Guests(case, llm.arrivals(LONGEST, MOST), 6, 2)
        guests.all_served(llm, on_shrink=shrinks.append)
    assert [shrink.size.batch_size for shrink in shrinks] == [2]
    for place, arrival in enumerate(guests.come):
        alone = checkpoints.resident_logits(replace(case, gen_len=GROWTH[place]), (place,))
        assert list(arrival.completion.token_ids) == [int(step[0].argmax()) for step in alone]


def test_what_has_no_room_is_refused_and_after_closing_everything(checkpoints: Checkpoints, offload: Path) -> None:
    with Case("opt").open(checkpoints, offload) as llm:
        arrivals = llm.arrivals(6, 4)
        for prompt, params, said in (
            (range(1, 8), FOUR, "the prompt has 7 tokens, and no more than 6 are taken"),
            ((1, 2), SamplingParams(max_tokens=5), "max_tokens is 5; a seat has room for 4 at most"),
        ):
            with pytest.raises(TooLong, match=said):
                arrivals.offer(Request(Prompt(None, tuple(prompt)), params))
        unbounded = arrivals.offer(Request(Prompt(None, (1, 2)), SamplingParams(max_tokens=None, ignore_eos=True)))
        arrivals.close()
        with pytest.raises(Closed):
            arrivals.offer(Request(Prompt(None, (1, 2)), FOUR))
        assert arrivals.gather(0.0) and list(llm.generate_arriving(arrivals)) == [unbounded]
        assert len(unbounded.completion.token_ids) == 4 and not arrivals.gather(0.0)


def test_a_request_that_is_abandoned_is_named_and_forgotten(checkpoints: Checkpoints, offload: Path) -> None:
    with Case("opt", gpu_batch_size=1, num_gpu_batches=1).open(checkpoints, offload) as llm:
        arrivals = llm.arrivals(6, 4)

        def fail(row: RowState, token: int, text: str | None) -> None:
            raise RuntimeError("the listener fails")

        come = [arrivals.offer(Request(Prompt(None, (1, 2)), FOUR), fail) for _ in range(2)]
        with pytest.raises(RuntimeError, match="the listener fails"):
            list(llm.generate_arriving(arrivals))
        assert arrivals.load == (1, 1, 1)
        assert arrivals.abandon() == come and arrivals.load == (0, 0, 1)
        after = arrivals.offer(Request(Prompt(None, (1, 2)), FOUR))
        assert list(llm.generate_arriving(arrivals)) == [after]


def test_a_request_that_breaks_a_block_is_forgotten_alone_and_the_others_go_on(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("opt", lengths=LENGTHS[:4], gpu_batch_size=2, num_gpu_batches=1)
    with case.open(checkpoints, offload) as llm:
        arrivals = llm.arrivals(LONGEST, MOST)
        heard: dict[int, list[int]] = {}

        def hear(row: RowState, token: int, text: str | None) -> None:
            heard.setdefault(row.row, []).append(token)
            if row is come[1].rows[0] and row.num_generated == 2:
                raise RuntimeError("the second breaks")

        prompts = [Prompt(None, tuple(one)) for one in case.prompts]
        come = [arrivals.offer(Request(one, FOUR, 7), hear) for one in prompts]  # whose number is the same goes on, too
        with pytest.raises(RuntimeError, match="the second breaks"):
            list(llm.generate_arriving(arrivals))
        second = come[1].rows[0].row
        assert arrivals.requests == (2, 2) and arrivals.drop(second) == [come[1]]
        assert arrivals.requests == (0, 3) and arrivals.load.waiting == 3
        assert list(llm.generate_arriving(arrivals)) == [come[0], come[2], come[3]] and arrivals.drop(second) == []
    for place in (0, 2, 3):
        alone = [int(step[0].argmax()) for step in checkpoints.resident_logits(replace(case, gen_len=4), (place,))]
        assert list(come[place].completion.token_ids) == heard[place] == alone


def test_where_a_block_fails_those_with_a_seat_are_lost_and_the_others_wait_on(checkpoints: Checkpoints, offload: Path) -> None:
    case, fails = Case("opt", lengths=LENGTHS[:5], gpu_batch_size=2, num_gpu_batches=1), [True]

    def hear(row: RowState, token: int, text: str | None) -> None:
        if fails and row is come[1].rows[0] and row.num_generated == 2:
            fails.clear()
            raise OSError("the block fails")

    with case.open(checkpoints, offload) as llm:
        arrivals = llm.arrivals(LONGEST, MOST)
        params = [SamplingParams(max_tokens=1), *[FOUR] * 4]
        come = [arrivals.offer(Request(Prompt(None, tuple(one)), own), hear) for one, own in zip(case.prompts, params)]
        over = list[Arrival]()
        with pytest.raises(TaskFailed, match="the block fails"):
            for one in llm.generate_arriving(arrivals):
                over.append(one)
        assert arrivals.load == (2, 2, 2) and arrivals.break_off() == come[1:3] and arrivals.load == (2, 0, 2)
        over += llm.generate_arriving(arrivals)
        assert over == [come[0], *come[3:]] and arrivals.break_off() == [], "none is left"
    for place in (0, 3, 4):
        alone = checkpoints.resident_logits(replace(case, gen_len=params[place].max_tokens), (place,))
        assert list(come[place].completion.token_ids) == [int(step[0].argmax()) for step in alone]


def test_where_a_block_fails_before_any_request_has_a_seat_none_is_tried_for_ever(
    checkpoints: Checkpoints, offload: Path
) -> None:
    with Case("opt").open(checkpoints, offload) as llm:
        arrivals = llm.arrivals(6, 4)
        come = [arrivals.offer(Request(Prompt(None, (1, 2)), FOUR)) for _ in range(2)]
        assert arrivals.break_off() == come and arrivals.load.waiting == 0
        after = arrivals.offer(Request(Prompt(None, (1, 2)), FOUR))
        assert list(llm.generate_arriving(arrivals)) == [after]


def test_a_request_that_ends_in_the_pass_that_fails_is_told(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Sampler.sample

    def broken(self: Sampler, logits: Any, params: Any, rows: Any, steps: Any, *others: Any) -> Any:
        logits[0] = float("nan")
        return sample(self, logits, params, rows, steps, *others)

    monkeypatch.setattr(Sampler, "sample", broken)
    scored = SamplingParams(max_tokens=0, prompt_logprobs=1)
    with Case("opt", gpu_batch_size=2, num_gpu_batches=1).open(checkpoints, offload) as llm:
        arrivals = llm.arrivals(6, 4)
        first, second = (arrivals.offer(Request(Prompt(None, (1, 2)), params, 0)) for params in (scored, FOUR))
        over = list[Arrival]()
        with pytest.raises(TaskFailed) as failed:
            for one in llm.generate_arriving(arrivals):
                over.append(one)
        assert over == [first] and first.completion.prompt_logprobs is not None
        assert isinstance(failed.value.cause, NoTokenLeft) and failed.value.cause.row == second.rows[0].row
        assert arrivals.drop(second.rows[0].row) == [second] and arrivals.load == (0, 0, 2)


@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[1], BY_HEAD[0]])
def test_the_keys_and_values_that_rows_hold_are_told(policy: Any, checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("llama-gqa", gpu_batch_size=2, num_gpu_batches=1, policy=policy)
    found: list[tuple[int, int]] = []
    with case.open(checkpoints, offload) as llm:
        arrivals = llm.arrivals(LONGEST, MOST)
        capacity = arrivals.kv_bytes.of_seats
        assert arrivals.kv_bytes.held == 0

        def hear(row: RowState, token: int, text: str | None) -> None:
            found.append((row.num_generated, arrivals.kv_bytes.held))

        arrivals.offer(Request(Prompt(None, (5, 6, 7, 8, 9, 10)), FOUR), hear)
        list(llm.generate_arriving(arrivals))
        of_token = len(llm.spec.kv_layers) * llm.spec.kv_heads * llm.spec.kv_bytes_per_head
        assert arrivals.kv_bytes.held == 0 and 0 < max(held for _, held in found) <= capacity
    if not policy:
        assert found == [(step, of_token * (5 + step)) for step in range(1, 5)]
        assert capacity == 2 * of_token * (LONGEST + MOST - 1)
    elif policy == POLICIES[1]:
        assert {held for _, held in found} == {4 * of_token}


def test_where_all_requests_are_given_up_the_next_is_waited_for(checkpoints: Checkpoints, offload: Path) -> None:
    with Case("opt").open(checkpoints, offload) as llm:
        arrivals = llm.arrivals(6, 4)
        first = arrivals.offer(Request(Prompt(None, (1, 2)), FOUR))
        gathering = ThreadPoolExecutor(1)
        waits = gathering.submit(arrivals.gather, 3600.0)
        arrivals.give_up(first)
        for _ in range(sum(arrivals._sizes)):  # as many as fill the seats: no other is waited for
            arrivals.offer(Request(Prompt(None, (1, 2)), FOUR))
        assert waits.result(PATIENCE_SECONDS)
        arrivals.close()
        assert len(list(llm.generate_arriving(arrivals))) == sum(arrivals._sizes) and not arrivals.gather(3600.0)
        gathering.shutdown()


# -- in the background --------------------------------------------------------------------------------------------------------


def asked(case: Case, place: int, max_tokens: int = 4) -> Request:
    return Request(Prompt(None, tuple(case.prompts[place])), SamplingParams(max_tokens=max_tokens), place)


def picked(arrival: Arrival) -> list[int]:
    return list(arrival.completion.token_ids)


@pytest.mark.parametrize("num_gpu_batches", [1, 2])
def test_whoever_waits_takes_a_seat_before_the_background_and_each_says_the_same(
    num_gpu_batches: int, checkpoints: Checkpoints, offload: Path
) -> None:
    case = Case("llama-gqa", lengths=LENGTHS[:8], gpu_batch_size=1, num_gpu_batches=num_gpu_batches)
    with case.open(checkpoints, offload) as llm:
        arrivals, come = llm.arrivals(LONGEST, MOST), dict[int, Arrival]()

        def hear(row: RowState, token: int, text: str | None) -> None:
            if row.index == 0 and row.num_generated == 1:  # five have come in the background, and now three others
                come.update({place: arrivals.offer(asked(case, place)) for place in (5, 6, 7)})
                assert arrivals.load.waiting == 3

        come[0] = arrivals.prepare(asked(case, 0), hear)
        come |= {place: arrivals.prepare(asked(case, place)) for place in range(1, 5)}
        arrivals.admit([come[place] for place in range(5)], in_background=True)
        assert arrivals.load.waiting == 0 and arrivals.waiting_in_background == 5 and arrivals.requests == (0, 5)
        over = list(llm.generate_arriving(arrivals))
        assert arrivals.load.waiting == arrivals.waiting_in_background == 0 and arrivals.requests == (0, 0)
    assert [place for one in over for place in come if come[place] is one][-3:] in ([2, 3, 4], [7, 3, 4])
    for place, arrival in come.items():
        alone = checkpoints.resident_logits(replace(case, gen_len=4), (place,))
        assert picked(arrival) == [int(step[0].argmax()) for step in alone]


def test_requests_that_wait_in_the_background_keep_no_other_waiting(checkpoints: Checkpoints, offload: Path) -> None:
    """It would fill a batch that is empty, and waits for it, while others join; but if these go on and on, not for ever."""
    case = Case("opt", lengths=LENGTHS[:1], gpu_batch_size=2, num_gpu_batches=2)
    heard, tokens_before = list[int](), list[int]()
    with case.open(checkpoints, offload) as llm:
        arrivals = llm.arrivals(LONGEST, MOST)

        def other(row: RowState, token: int, text: str | None) -> None:
            heard.append(token)
            if len(heard) == 1:
                behind = [arrivals.prepare(asked(case, 0), background) for _ in range(6)]
                arrivals.admit(behind, in_background=True)
            if row.num_generated == 3 and len(tokens_before) < 6 * 4:
                arrivals.offer(asked(case, 0), other)  # joins beside this one, at the next pass

        def background(row: RowState, token: int, text: str | None) -> None:
            tokens_before.append(len(heard))

        arrivals.offer(asked(case, 0), other)
        assert all(one.is_over for one in llm.generate_arriving(arrivals))
    assert MOST <= tokens_before[0] <= 3 * MOST and len(tokens_before) == 6 * 4


def test_the_background_gets_all_seats_when_the_block_is_over(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("opt", lengths=LENGTHS[:1], gpu_batch_size=2, num_gpu_batches=2)
    with case.open(checkpoints, offload) as llm:
        arrivals, seated = llm.arrivals(LONGEST, MOST), list[int]()

        def hear(row: RowState, token: int, text: str | None) -> None:
            seated.append(arrivals.load.seated)
            if len(seated) == 1:
                arrivals.admit([arrivals.prepare(asked(case, 0), hear) for _ in range(4)], in_background=True)

        arrivals.offer(asked(case, 0), hear)
        first = list(llm.generate_arriving(arrivals))
        assert len(first) == 1 and seated == [1] * 4 and arrivals.waiting_in_background == 4
        assert arrivals.gather(3600.0), "none is waited for"
        assert len(list(llm.generate_arriving(arrivals))) == 4 and max(seated) == 4


def test_a_request_that_loses_a_seat_in_the_background_comes_first_there(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("opt", lengths=LENGTHS[:5], gpu_batch_size=3, num_gpu_batches=1)
    with case.open(checkpoints, offload) as llm:
        arrivals = llm.arrivals(LONGEST, MOST)

        def hear(row: RowState, token: int, text: str | None) -> None:
            if row.num_generated == 2:
                raise RuntimeError("the first breaks")

        broken = arrivals.offer(asked(case, 0), hear)
        behind = [arrivals.offer(asked(case, place), in_background=True) for place in (1, 2, 3, 4)]
        with pytest.raises(RuntimeError, match="the first breaks"):
            list(llm.generate_arriving(arrivals))
        assert arrivals.load == (0, 3, 3) and arrivals.drop(broken.rows[0].row) == [broken]
        assert arrivals.load == (0, 0, 3) and arrivals.waiting_in_background == 4
        last = arrivals.offer(asked(case, 0))
        arrivals.give_up(behind[3])
        assert arrivals.drop(behind[1].rows[0].row) == [behind[1]] and arrivals.waiting_in_background == 2
        assert {*llm.generate_arriving(arrivals)} == {last, behind[0], behind[2]}
        assert behind[3].completion.finish_reason == GIVEN_UP
        left = [arrivals.offer(asked(case, 0), in_background=True), arrivals.offer(asked(case, 1))]
        assert {*arrivals.abandon()} == {*left} and arrivals.requests == (0, 0) and not arrivals.waiting_in_background
