"""Rows that come and go: whenever it joins, each row says what the resident loop says of it alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from h2o_flexgen.engine import generate as stream_of_completions
from h2o_flexgen.engine.generate import ListedJob, job_of
from h2o_flexgen.engine.job import Request, RequestSize
from h2o_flexgen.engine.reports import Tick
from h2o_flexgen.engine.restarted_run import Shrink
from h2o_flexgen.engine.rows import RowsPart
from h2o_flexgen.engine.seated_rows import SeatedRows
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.schedule.ops import Op
from tests.engine.test_shrink import OF_TORCH, fail_at
from tests.engine.test_shrink import same as same_but_for_last_bits
from tests.helpers.contract import POLICIES, UNLIKE, WEIGHTS, Case, Checkpoints, compare_each_alone, recorded_logits
from tests.helpers.held_by_hand import HELD
from tests.helpers.pairwise import ELSEWHERE, on_devices
from tests.helpers.samples import first_of, spread
from tests.whole.test_contract import has_code_elsewhere

LENGTHS = (5, 9, 2, 7, 4, 11, 3, 6, 8, 5, 1, 12, 4, 9)
GROWTH = (4, 1, 9, 3, 12, 2, 7, 1, 5, 11, 3, 8, 2, 6)
LITTLE_GROWTH = (4, 1, 6, 3, 5, 2)
MIXES = (
    (100, 0, 100, 0, 100, 0),
    (0, 100, 0, 100, 0, 100),
    (0, 0, 0, 0, 0, 0),
    (30, 30, 20, 50, 40, 30),
    (0, 40, 60, 0, 0, 50),
)
CHOICES = {
    "kind": ("opt", "llama-gqa", "gpt-oss", "mixtral", "deepseek-v3"),
    "percent": (
        MIXES[3],
        *MIXES[:3],
        *MIXES[4:],
    ),  # the first of a choice stands in cases that meet nothing new: offload, and overlap
    "gpu_batch_size": (2, 1, 4),
    "num_gpu_batches": (2, 1, 3),
    "buffers": (2, 1, 3),
    "schedule": ("zigzag", "flexgen_barrier"),
    "policy": UNLIKE,
    "prefill_tokens": (1024, 12, 1),
    ("weight_codec", "compute"): WEIGHTS,
    "kv_codec": (PLAIN, "group4", "group8"),
    "held": ((), HELD),
}


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Iterator[None]:
    before = {thread.name for thread in threading.enumerate()}
    yield
    assert {thread.name for thread in threading.enumerate()} - {"tqdm_monitor"} <= before  # that one is of transformers


def requests_of(case: Case, growth: Sequence[int] = GROWTH) -> list[Request]:
    each = zip(case.prompts, case.params, growth)
    return [Request(prompt, params.up_to(grown)) for prompt, params, grown in each]


def streamed(llm: LLM, requests: Sequence[Request], **options: Any) -> list[Completion]:
    return sorted(llm.generate_stream(requests, **options), key=lambda one: one.index)


@pytest.mark.parametrize("values", on_devices(CHOICES, has_code_elsewhere, ELSEWHERE))
def test_each_row_says_what_the_resident_loop_says_of_it_alone(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    hold_contract(Case(lengths=LENGTHS[:6], **values), LITTLE_GROWTH, checkpoints, offload)


def test_a_stream_in_the_middle_keeps_its_thread_from_starting_another(checkpoints: Checkpoints, offload: Path) -> None:
    """Both would bring their weights through the same buffers."""
    case = Case("opt", MIXES[2], LENGTHS[:4])
    alone = [checkpoints.greedy(case, row, 4)[0] for row in range(4)]
    with case.open(checkpoints, offload) as llm:
        stream = llm.generate_stream(requests_of(case, (4, 4, 4, 4)))
        first = next(stream)
        with pytest.raises(
            ValueError, match="is in the middle of another generation of this thread: read its stream to the end"
        ):
            llm.generate(case.prompts[0], SamplingParams(max_tokens=4))
        completions = sorted((first, *stream), key=lambda one: one.index)
        assert [list(one.token_ids) for one in completions] == alone
        assert [list(one.token_ids) for one in llm.generate(case.prompts, SamplingParams(max_tokens=4))] == alone


def hold_contract(case: Case, growth: Sequence[int], checkpoints: Checkpoints, offload: Path) -> None:
    with case.open(checkpoints, offload) as llm, recorded_logits() as logits:
        completions = streamed(llm, requests_of(case, growth))
        assert llm.loaded._memories is not None and llm.loaded._memories.disk.meter.used_bytes == 0
    compare_each_alone(case, growth, checkpoints, completions)
    assert len(logits) == sum(growth) or (case.held and len(logits) < sum(growth)), "only what must come is not asked for"


def test_a_row_that_is_done_is_handed_out_at_once_and_seats_are_taken_again(checkpoints: Checkpoints, offload: Path) -> None:
    case, ticks = Case("llama-gqa", lengths=LENGTHS, gpu_batch_size=3, num_gpu_batches=2), list[Tick]()
    with case.open(checkpoints, offload) as llm:
        done_at = {one.index: len(ticks) for one in llm.generate_stream(requests_of(case), on_tick=ticks.append)}
    assert [tick.number for tick in ticks] == list(range(1, len(ticks) + 1))
    assert len(ticks) < sum(GROWTH) / 6 * 1.5, "seats stayed empty although others waited"
    assert len(set(done_at.values())) > len(GROWTH) / 3, "completions came in heaps"
    last = ticks[-1]
    assert (last.prompt_tokens, last.generated_tokens) == (sum(LENGTHS), sum(GROWTH))
    assert last.computed_tokens >= sum(LENGTHS) + sum(GROWTH) - len(GROWTH) and (last.alive, last.seats) == (0, 6)
    assert all(earlier.requests_done <= later.requests_done for earlier, later in pairwise(ticks))
    assert last.busy_seconds["compute"] <= last.prompt_seconds + last.decode_seconds


def sampled(case: Case, seed: int | None = None) -> list[Request]:
    random, requests = Random(7), []
    for place, prompt in enumerate(case.prompts):
        params = SamplingParams(
            max_tokens=GROWTH[place],
            temperature=random.choice((0.0, 1.3)),
            logprobs=random.choice((None, 2)),
            stop_token_ids=(7, 70),
            repetition_penalty=random.choice((1.0, 1.2)),
            prompt_logprobs=random.choice((None, 1)),
            seed=seed,
        )
        requests.append(Request(prompt, params if params.is_greedy else replace(params, n=random.choice((1, 3)))))
    return requests


def apart(completions: Sequence[Completion]) -> list[Completion]:
    """Every completion of a prompt by itself, as `same` compares them."""
    each = [(one, *one.others) for one in completions]
    return [
        replace(
            own[0], others=(), **{name: getattr(other, name) for name in ("text", "token_ids", "logprobs", "finish_reason")}
        )
        for own in each
        for other in own
    ]


def same(these: Sequence[Completion], those: Sequence[Completion]) -> bool:
    return same_but_for_last_bits(apart(these), apart(those))


def assert_alike_prompt_logprobs(found: Sequence[Completion], wanted: Sequence[Completion]) -> None:
    """The same tokens come with log-probabilities that are as good as equal, and the same ones beside them."""
    for one, other in zip(found, wanted, strict=True):
        assert one.prompt_logprobs is not None and other.prompt_logprobs is not None
        assert one.prompt_logprobs[0] is other.prompt_logprobs[0] is None
        for mine, its in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert mine is not None and its is not None and mine.chosen.token_id == its.chosen.token_id
            assert mine.chosen.logprob == pytest.approx(its.chosen.logprob, abs=1e-4)
            assert [each.token_id for each in mine.top] == [each.token_id for each in its.top]


def test_samples_log_probabilities_and_stops_are_those_of_generate(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("qwen3", MIXES[3], LENGTHS, gpu_batch_size=3)
    requests = sampled(case)
    with case.open(checkpoints, offload) as llm:
        wanted = llm.generate(case.prompts, [one.params or SamplingParams() for one in requests], seed=5)
        assert same(streamed(llm, requests, seed=5), wanted)
        assert llm.stats is not None and llm.stats.num_prompts == len(LENGTHS)
        own = [SamplingParams() if one.params is None else one.params for one in requests]
        assert llm.stats.generated_tokens == sum(len(each.token_ids) for one in wanted for each in (one, *one.others)) and any(
            one.n > 1 for one in own
        )


def test_a_request_is_sampled_by_its_own_number_wherever_it_stands(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("opt", lengths=LENGTHS, gpu_batch_size=2)
    requests = [replace(one, index=100 + place) for place, one in enumerate(sampled(case))]
    with case.open(checkpoints, offload) as llm:
        all_of_them = streamed(llm, requests, seed=5)
        a_few = streamed(llm, [requests[place] for place in (9, 3, 12, 4)], seed=5)
    assert [one.index for one in a_few] == [103, 104, 109, 112]
    assert same(a_few, [all_of_them[one.index - 100] for one in a_few])


def test_prompts_that_are_only_scored_end_with_the_pass_that_reads_them(checkpoints: Checkpoints, offload: Path) -> None:
    case, ticks = Case("neox-parallel", MIXES[3], LENGTHS, gpu_batch_size=8), list[Tick]()
    asked = SamplingParams(max_tokens=0, prompt_logprobs=2)
    with case.open(checkpoints, offload) as llm:
        wanted = llm.generate(case.prompts, SamplingParams(max_tokens=1, prompt_logprobs=2))
        scored = streamed(llm, [Request(prompt, asked) for prompt in case.prompts], on_tick=ticks.append)
        also = llm.generate(case.prompts, asked)
    for one, other, by_block in zip(scored, wanted, also, strict=True):
        assert one.token_ids == by_block.token_ids == () and one.finish_reason == "length"
        for mine, its in zip(one.prompt_logprobs or (), other.prompt_logprobs or (), strict=True):
            assert mine is its is None or (mine and its and mine.chosen.logprob == pytest.approx(its.chosen.logprob, abs=1e-4))
    assert len(ticks) == 1, "sixteen seats hold fourteen prompts"


def test_whoever_wants_no_more_closes_the_iterator(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("llama-gqa", MIXES[2], LENGTHS, gpu_batch_size=3)
    with case.open(checkpoints, offload) as llm:
        stream = llm.generate_stream(requests_of(case))
        first = next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert llm.loaded._memories is not None and llm.loaded._memories.disk.meter.used_bytes == 0
        assert len(first.token_ids) == GROWTH[first.index]
        assert len(streamed(llm, requests_of(case))) == len(LENGTHS)


@pytest.mark.parametrize(
    ("place", "policy"),
    first_of(spread([(Op.READ_KV, POLICIES[0]), (Op.COMPUTE, POLICIES[1]), (Op.WRITE_KV, POLICIES[1])]), 2),
)
def test_where_memory_runs_out_the_rest_goes_on_in_smaller_blocks(
    place: Op, policy: tuple[Any, ...], checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("llama-gqa", MIXES[2], LENGTHS[:10], gpu_batch_size=4, policy=policy)
    requests, told = sampled(case), list[Shrink]()
    with case.open(checkpoints, offload) as llm:
        wanted = streamed(llm, requests, seed=3)
    fail_at(monkeypatch, place, step=6, most_rows=4, error=lambda: RuntimeError(OF_TORCH))
    tokens: dict[int, int] = {}

    def count(row: int, token: int, text: str | None) -> None:
        tokens[row] = tokens.get(row, 0) + 1

    with case.open(checkpoints, offload) as llm:
        assert same(streamed(llm, requests, seed=3, on_shrink=told.append, on_token=count), wanted)
    assert [shrink.tried for shrink in told] == [(4, 2)]
    assert sum(tokens.values()) == sum(len(each.token_ids) for one in wanted for each in (one, *one.others))


def test_a_batch_is_not_done_between_rows_that_leave_and_those_that_join(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, seen, join = Case("opt", lengths=LENGTHS, gpu_batch_size=1, num_gpu_batches=1), list[bool](), SeatedRows._join

    def seen_by_lanes(rows: SeatedRows) -> list[RowsPart]:
        seen.append(rows.is_done)
        return join(rows)

    monkeypatch.setattr(SeatedRows, "_join", seen_by_lanes)
    with case.open(checkpoints, offload) as llm:
        assert len(streamed(llm, requests_of(case))) == len(LENGTHS)
    assert len(seen) > len(LENGTHS) and not any(seen), "lanes would have fetched nothing for those that join"


def test_what_is_no_request_is_a_prompt_and_nothing_asked_is_nothing_done(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("opt", lengths=LENGTHS)
    with case.open(checkpoints, offload) as llm:
        assert not list(llm.generate_stream([]))
        assert [len(one.token_ids) for one in streamed(llm, case.prompts)] == [32] * len(LENGTHS)
        with pytest.raises(ValueError, match="prompt 1 is empty"):
            list(llm.generate_stream([[1], []]))


def test_a_request_that_is_not_what_its_job_said_is_refused(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("opt", lengths=LENGTHS, gpu_batch_size=2, num_gpu_batches=1)
    with case.open(checkpoints, offload) as llm:
        job = job_of(requests_of(case), llm.row_maker)
        assert isinstance(job, ListedJob)
        said = replace(job, sizes=[one_longer(size) for size in job.sizes])
        with pytest.raises(ValueError, match="request 9 was declared with 6 tokens, max_tokens 11 and n 1, but now has 5, 11"):
            list(llm.generate_stream(said))
        assert llm.loaded._memories is None or llm.loaded._memories.disk.meter.used_bytes == 0


def one_longer(size: RequestSize) -> RequestSize:
    return size._replace(prompt_len=size.prompt_len + 1)


@pytest.mark.parametrize("failing", ["completion_of", "on_tick"])
def test_nothing_runs_on_behind_an_error_that_is_kept(
    failing: str, checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> Completion:
        raise LookupError("kept")

    case = Case("llama-gqa", MIXES[2], LENGTHS, gpu_batch_size=3)
    if failing == "completion_of":
        monkeypatch.setattr(stream_of_completions, "completion_of", fail)
    with case.open(checkpoints, offload) as llm:
        with pytest.raises(LookupError) as kept:
            list(llm.generate_stream(requests_of(case), on_tick=fail if failing == "on_tick" else None))
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("lane-")], kept
        assert llm.loaded._memories is not None and llm.loaded._memories.disk.meter.used_bytes == 0


def test_a_pass_is_told_of_when_its_completions_were_handed_out(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("llama-gqa", lengths=LENGTHS, gpu_batch_size=2, num_gpu_batches=2)
    there, told = list[int](), list[tuple[int, int]]()

    def tell(tick: Tick) -> None:
        told.append((tick.requests_done, len(there)))

    with case.open(checkpoints, offload) as llm:
        for one in llm.generate_stream(requests_of(case), on_tick=tell):
            there.append(one.index)
    assert all(done == handed_out for done, handed_out in told), told
    assert told[-1] == (len(LENGTHS), len(LENGTHS))


def test_whoever_hears_of_a_pass_may_end_the_job(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("llama-gqa", MIXES[4], LENGTHS, gpu_batch_size=2, num_gpu_batches=2)

    def end(tick: Tick) -> None:
        if tick.number == 4:
            raise KeyboardInterrupt

    with case.open(checkpoints, offload) as llm:
        with pytest.raises(KeyboardInterrupt):
            streamed(llm, requests_of(case), on_tick=end)
        assert llm.loaded._memories is not None and llm.loaded._memories.disk.meter.used_bytes == 0
        assert len(streamed(llm, requests_of(case))) == len(LENGTHS)


def test_a_row_too_short_for_a_share_of_it_is_refused_before_any_is_run(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("llama-gqa", lengths=(9, 1), policy=(("kv_policy", "h2o"), ("kv_budget", 0.3)))
    with case.open(checkpoints, offload) as llm:
        stream = llm.generate_stream([Request(prompt, SamplingParams(max_tokens=1)) for prompt in case.prompts])
        with pytest.raises(ValueError, match="budget of 0 slots for a prompt of 1 and 1 to generate"):
            next(stream)
        assert llm.loaded._memories is None, "nothing was loaded"
