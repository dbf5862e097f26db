"""Memory that runs out in spite of the plan: the run goes on with smaller blocks, and its output is that of a run in which
nothing happened.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from h2o_flexgen.core.workload import BlockSize
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.engine.restarted_run import Shrink
from h2o_flexgen.engine.stores.kv import KVStore
from h2o_flexgen.llm import LLM
from h2o_flexgen.memory import host
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.sampling.sampler import Sampler
from h2o_flexgen.schedule.ops import Op, Task
from h2o_flexgen.schedule.schedule import Schedule
from tests.helpers.contract import POLICIES, Case, Checkpoints
from tests.helpers.pairwise import ELSEWHERE, most_of
from tests.helpers.samples import first_of

ALL_ON_DISK, ALL_ON_HOST, MIXED = (0, 0, 0, 0, 0, 0), (0, 100, 0, 100, 0, 100), (30, 30, 20, 30, 40, 30)
RAGGED = (5, 9, 2, 7, 4, 11, 3, 6, 8, 5)  # with 4 x 2 rows two blocks, the last one of two rows
GEN_LEN = 6
OF_TORCH = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Iterator[None]:
    before = {thread.name for thread in threading.enumerate()}
    yield
    assert {thread.name for thread in threading.enumerate()} - {"tqdm_monitor"} <= before  # that one is of transformers


def case_of(**changes: Any) -> Case:
    return replace(Case("llama-gqa", MIXED, RAGGED, GEN_LEN, gpu_batch_size=4, num_gpu_batches=2), **changes)


def each_its_own(count: int) -> list[SamplingParams]:
    """Rows that end at different steps, greedy and sampled, with and without log-probabilities, penalties and stops."""
    return [
        SamplingParams(
            max_tokens=(GEN_LEN, 2, GEN_LEN, 4)[row % 4],
            temperature=(0.0, 1.3, 0.0)[row % 3],
            logprobs=(None, 2)[row % 2],
            repetition_penalty=(1.0, 1.2)[row % 2],
            stop_token_ids=(7, 70),
            min_tokens=(0, 2)[row % 2],
            frequency_penalty=(0.0, 0.0, 0.7)[row % 3],
            prompt_logprobs=(None, 1)[row % 2],
        )
        for row in range(count)
    ]


def fail_to_allocate(monkeypatch: pytest.MonkeyPatch, most_rows: int, error: Callable[[], Exception] = MemoryError) -> None:
    """The KV of blocks of more rows finds no room, when half of it has been given."""
    allocate = KVStore._allocate

    def failing(self: KVStore, held: Any) -> None:
        allocate(self, held)
        rows = {batch: layout.rows for (_, batch), layout in self._layouts.items()}
        if sum(rows.values()) > most_rows:
            raise error()

    monkeypatch.setattr(KVStore, "_allocate", failing)


def fail_at(
    monkeypatch: pytest.MonkeyPatch, op: Op, step: int, most_rows: int, error: Callable[[], BaseException] = MemoryError
) -> None:
    """The last task of this kind in a step of blocks of more rows fails."""
    actions = Engine._actions

    def failing(self: Engine, schedule: Schedule, state: Any) -> dict[Op, Any]:
        table, rows = actions(self, schedule, state), state.seats
        action = table[op]
        last = max((task for task in schedule.tasks() if task.op is op and task.step == step), default=None)

        def act(task: Task) -> int:
            if last is not None and rows > most_rows and task.key == last.key:
                raise error()
            return action(task)

        return {**table, op: act}

    monkeypatch.setattr(Engine, "_actions", failing)


def same(these: list[Completion], those: list[Completion]) -> bool:
    """But for the last bits of log-probabilities, which depend on how many rows are computed at once."""
    for one, other in zip(these, those, strict=True):
        bare = {"logprobs": None, "prompt_logprobs": None}
        assert replace(one, **bare) == replace(other, **bare)  # type: ignore[arg-type]
        assert (one.logprobs is None, one.prompt_logprobs is None) == (other.logprobs is None, other.prompt_logprobs is None)
        steps, twins = ([*(each.logprobs or ()), *(each.prompt_logprobs or ())[1:]] for each in (one, other))
        for step, twin in zip(steps, twins, strict=True):
            assert step is not None and twin is not None
            assert [top.token_id for top in (step.chosen, *step.top)] == [top.token_id for top in (twin.chosen, *twin.top)]
            assert step.chosen.logprob == pytest.approx(twin.chosen.logprob, abs=1e-4)
    return True


def undisturbed(case: Case, checkpoints: Checkpoints, offload: Path, params: Any) -> list[Completion]:
    with case.open(checkpoints, offload) as llm:
        completions = llm.generate(case.prompts, params, seed=3)
        assert llm.stats is not None and llm.stats.shrunk == ()
        return completions


def arenas_of(llm: LLM) -> int:
    assert llm.loaded._memories is not None
    return llm.loaded._memories.host.meter.used_bytes + llm.loaded._memories.weights.meter.used_bytes


# -- the output ----------------------------------------------------------------------------------------------------------


SHORT = {
    "place": ("allocation", Op.COMPUTE, Op.READ_KV, Op.WRITE_KV),
    "policy": (POLICIES[0], POLICIES[2], POLICIES[3], POLICIES[8]),
    "schedule": ("zigzag", "row_by_row"),
}


def is_of_rows(pair: Mapping[Any, Any]) -> bool:
    """Rows begin anew alike wherever the memory ran out: each policy meets two places."""
    return "policy" not in pair or pair.get("place") in ("allocation", Op.COMPUTE) or pair["policy"] in SHORT["policy"][:2]


@pytest.mark.parametrize("values", most_of(SHORT, is_of_rows, ELSEWHERE))
def test_the_output_is_that_of_a_run_in_which_memory_lasts(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: str | Op = values["place"]
    case, params = case_of(schedule=values["schedule"], policy=values["policy"]), each_its_own(len(RAGGED))
    wanted = undisturbed(case, checkpoints, offload, params)
    if isinstance(place, Op):
        fail_at(monkeypatch, place, step=3, most_rows=4, error=lambda: RuntimeError(OF_TORCH))
    else:
        fail_to_allocate(monkeypatch, most_rows=4)
    told: list[Shrink] = []
    with case.open(checkpoints, offload) as llm:
        completions = llm.generate(case.prompts, params, seed=3, on_shrink=told.append)
        stats = llm.stats
        assert llm.loaded._memories is not None and llm.loaded._memories.disk.meter.used_bytes == 0
    assert same(completions, wanted)
    assert stats is not None and stats.shrunk == ((4, 2),) == tuple(shrink.tried for shrink in told)
    assert stats.generated_tokens == sum(len(each.token_ids) for each in wanted)
    assert all(run.shortage is None for run in stats.blocks)
    (shrink,) = told
    assert str(shrink) == "CPU memory ran out in a block of 4 x 2 rows: going on with 2 x 2"
    assert [BlockSize.of(one.block) for one in shrink.rest] == [BlockSize.of(run.block) for run in stats.blocks]


OTHERS = {"percent": ALL_ON_DISK, "buffers": 1}, {"kv_codec": "group4"}, {"sep_layer": False}


@pytest.mark.parametrize("changes", first_of(OTHERS, 1))
def test_under_other_plans_too_and_on_an_accelerator(
    changes: dict[str, Any], any_device: str, checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, few = case_of(device=any_device, **changes), SamplingParams(max_tokens=4)
    wanted = undisturbed(case, checkpoints, offload, few)
    fail_at(monkeypatch, Op.COMPUTE, step=2, most_rows=2, error=lambda: torch.OutOfMemoryError("out of memory.\nTried to"))
    told: list[Shrink] = []
    with case.open(checkpoints, offload) as llm:
        assert same(llm.generate(case.prompts, few, on_shrink=told.append), wanted)
    assert [shrink.tried for shrink in told] == [(4, 2), (2, 2)]
    assert {(shrink.shortage.tier, shrink.shortage.reason) for shrink in told} == {("device", "out of memory.")}


def test_what_is_finished_is_not_generated_again_and_told_once(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, params = case_of(), each_its_own(len(RAGGED))
    pieces: dict[str, dict[int, list[tuple[int, str | None]]]] = {"plain": {}, "shrunk": {}}

    def listener(name: str) -> Callable[[int, int, str | None], None]:
        return lambda row, token, text: pieces[name].setdefault(row, []).append((token, text))

    with case.open(checkpoints, offload) as llm:
        wanted = llm.generate(case.prompts, params, seed=3, on_token=listener("plain"))
    fail_at(monkeypatch, Op.COMPUTE, step=5, most_rows=2)
    sampled: Counter[int] = Counter()
    sample = Sampler.sample
    with monkeypatch.context() as patch, case.open(checkpoints, offload) as llm:
        patch.setattr(Sampler, "sample", lambda *given: sampled.update(given[3]) or sample(*given))
        assert same(llm.generate(case.prompts, params, seed=3, on_token=listener("shrunk"), on_shrink=lambda _: None), wanted)
        assert llm.stats is not None and len(llm.stats.shrunk) == 2
    assert pieces["shrunk"] == pieces["plain"]
    lengths = [len(each.token_ids) for each in wanted]
    assert any(length <= 4 for length in lengths) and all(
        sampled[row] == length for row, length in enumerate(lengths) if length <= 5
    )
    assert any(sampled[row] > length for row, length in enumerate(lengths))


def test_a_row_that_starts_anew_keeps_the_tokens_it_had_whatever_is_picked_then(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits, beside other rows, two tokens that are nearly as likely may change places: not what was handed out."""
    case = case_of(gpu_batch_size=2, num_gpu_batches=1, lengths=(5, 9))
    fail_at(monkeypatch, Op.COMPUTE, step=3, most_rows=1)
    sample, came, calls = Sampler.sample, list[tuple[int, int]](), Counter[int]()

    def moody(self: Sampler, logits: torch.Tensor, params: Any, rows: Any, steps: list[int], *rest: Any) -> Any:
        calls[steps[0]] += 1
        return sample(self, -logits if calls[steps[0]] > 1 else logits, params, rows, steps, *rest)

    monkeypatch.setattr(Sampler, "sample", moody)
    with case.open(checkpoints, offload) as llm:
        completions = llm.generate(
            case.prompts,
            SamplingParams(max_tokens=6),
            on_token=lambda row, token, _: came.append((row, token)),
            on_shrink=lambda _: None,
        )
    for each in completions:
        assert tuple(token for row, token in came if row == each.index) == each.token_ids
    assert sorted(row for row, _ in came) == [0] * 6 + [1] * 6


def test_earlier_blocks_are_left_alone_and_later_ones_are_smaller(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(lengths=(6,) * 10, gpu_batch_size=2, num_gpu_batches=2)
    wanted = undisturbed(case, checkpoints, offload, SamplingParams(max_tokens=GEN_LEN))
    blocks = iter(range(100))
    allocate = KVStore._allocate

    def second_fails(self: KVStore, held: Any) -> None:
        allocate(self, held)
        if next(blocks) == 1:
            raise MemoryError("no room")

    monkeypatch.setattr(KVStore, "_allocate", second_fails)
    told: list[Shrink] = []
    with case.open(checkpoints, offload) as llm:
        assert same(llm.generate(case.prompts, SamplingParams(max_tokens=GEN_LEN), on_shrink=told.append), wanted)
        assert llm.stats is not None
        ran = [tuple(batch.rows for batch in run.block.batches) for run in llm.stats.blocks]
    assert ran == [((0, 1), (2, 3)), ((4,), (5,)), ((6,), (7,)), ((8,), (9,))]
    assert [(shrink.num_ended, shrink.tried, shrink.size) for shrink in told] == [(1, (2, 2), (1, 2))]


def test_a_block_that_is_smaller_than_the_plan_is_halved_itself(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With half the plan's rows it would be tried once more as it is."""
    case = case_of(lengths=(5, 9, 2), gpu_batch_size=64, num_gpu_batches=4)
    fail_to_allocate(monkeypatch, most_rows=1)
    told: list[Shrink] = []
    with case.open(checkpoints, offload) as llm:
        llm.generate(case.prompts, SamplingParams(max_tokens=2), on_shrink=told.append)
    assert [(shrink.tried, shrink.size) for shrink in told] == [((3, 1), (1, 1))]


def test_a_caller_that_listens_to_nothing_is_warned(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_allocate(monkeypatch, most_rows=4, error=lambda: MemoryError("no room"))
    with case_of().open(checkpoints, offload) as llm:
        message = r"CPU memory ran out in a block of 4 x 2 rows: going on with 2 x 2 \(no room\)"
        with pytest.warns(RuntimeWarning, match=message) as caught:
            llm.generate(case_of().prompts, SamplingParams(max_tokens=2))
    assert len(caught) == 1


# -- the end of it -------------------------------------------------------------------------------------------------------


def test_below_one_row_it_is_an_error_of_one_line_that_says_what_to_do(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, Op.COMPUTE, step=1, most_rows=0, error=lambda: RuntimeError(OF_TORCH))
    told: list[Shrink] = []
    with case_of().open(checkpoints, offload) as llm:
        with pytest.raises(MemoryError, match=r"can't allocate memory.* keep less KV .*, or give more memory") as caught:
            llm.generate(case_of().prompts, SamplingParams(max_tokens=4), on_shrink=told.append)
        assert llm.loaded._memories is not None and llm.loaded._memories.disk.meter.used_bytes == 0
        monkeypatch.undo()
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=1)), "it can be used again"
    assert "\n" not in str(caught.value)
    assert [shrink.tried for shrink in told] == [(4, 2), (2, 2), (1, 2)]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (lambda: ValueError("a bad value"), TaskFailed),
        (lambda: RuntimeError("a bug"), TaskFailed),
        (lambda: OSError(28, "No space left on device"), TaskFailed),
        (KeyboardInterrupt, KeyboardInterrupt),
    ],
)
def test_any_other_error_stays_one(
    error: Callable[[], BaseException],
    raised: type[BaseException],
    checkpoints: Checkpoints,
    offload: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_at(monkeypatch, Op.COMPUTE, step=1, most_rows=4, error=error)
    told: list[Shrink] = []
    with case_of().open(checkpoints, offload) as llm, pytest.raises(raised):
        llm.generate(case_of().prompts, SamplingParams(max_tokens=4), on_shrink=told.append)
    assert told == []


def test_a_benchmark_of_a_block_may_forbid_smaller_ones(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, Op.COMPUTE, step=1, most_rows=4)
    with case_of().open(checkpoints, offload) as llm, pytest.raises(TaskFailed, match="while running COMPUTE 1"):
        llm.generate(case_of().prompts, SamplingParams(max_tokens=4), may_shrink=False)


def test_a_conversation_has_no_smaller_block(checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, Op.COMPUTE, step=1, most_rows=0)
    with case_of().open(checkpoints, offload) as llm, llm.converse() as talk, pytest.raises(TaskFailed):
        talk.reply([1, 2, 3], SamplingParams(max_tokens=4))


# -- what is given back --------------------------------------------------------------------------------------------------


@contextmanager
def mapped_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Bytes of what was mapped inside and is still looked at."""
    make, made = host.Pages, list[Any]()

    def mapping(*given: Any, **options: Any) -> host.Pages:
        pages = make(*given, **options)
        made.append(weakref.ref(pages))
        return pages

    with monkeypatch.context() as patch:
        patch.setattr(host, "Pages", mapping)
        yield lambda: sum(len(pages) for ref in made if (pages := ref()) is not None)


@pytest.mark.parametrize("place", ["allocation", Op.COMPUTE], ids=str)
def test_before_the_next_block_begins_the_memory_of_the_last_is_given_back(
    place: str | Op, checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(percent=ALL_ON_HOST)
    if isinstance(place, Op):
        fail_at(monkeypatch, place, step=3, most_rows=2)
    else:
        fail_to_allocate(monkeypatch, most_rows=2)
    arenas: list[tuple[int, int]] = []
    with mapped_memory(monkeypatch) as mapped, case.open(checkpoints, offload) as llm:
        llm.generate(case.prompts[:1], SamplingParams(max_tokens=1), stop_at=lambda _: True)  # only loads
        assert llm.loaded._engine is not None
        llm.loaded._engine.trim()
        before = arenas_of(llm), mapped()

        def note(_: Shrink) -> None:
            arenas.append((arenas_of(llm), mapped()))

        llm.generate(case.prompts, SamplingParams(max_tokens=GEN_LEN), on_shrink=note)
        assert arenas_of(llm) > before[0], "blocks do hold arenas"
    assert arenas == [before, before] and before[1] >= before[0] > 0


class Grown:
    """A process that holds more and more."""

    rss = 1 << 30

    def memory_info(self) -> Grown:
        Grown.rss += 1 << 26
        return self


def test_near_the_limit_of_the_host_the_block_is_stopped_and_one_row_is_left_to_try(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of()
    wanted = undisturbed(case, checkpoints, offload, SamplingParams(max_tokens=GEN_LEN))
    told: list[Shrink] = []
    with case.open(checkpoints, offload) as llm:
        llm.generate(case.prompts[:1], SamplingParams(max_tokens=1))
        monkeypatch.setattr(host, "available_bytes", lambda: 7_000_000)
        monkeypatch.setattr(psutil, "Process", Grown)
        assert same(llm.generate(case.prompts, SamplingParams(max_tokens=GEN_LEN), on_shrink=told.append), wanted)
    assert [shrink.tried for shrink in told] == [(4, 2), (2, 2), (1, 2)]
    assert "only 7 MB are left" in told[0].shortage.reason
