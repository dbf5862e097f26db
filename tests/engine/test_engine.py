"""The engine around the contract: rows that end early, runs that end early, and what is left behind when things go wrong."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen.engine import engine
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.engine.rows import RowsPart
from h2o_flexgen.llm import LLM
from h2o_flexgen.models.llama import Llama
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.schedule.ops import Op, Task, Visit
from tests.helpers.contract import Case, Checkpoints, generate_with, recorded_logits
from tests.helpers.pairwise import on_devices
from tests.helpers.samples import first_of

ALL_ON_DISK, ALL_ON_HOST, MIXED = (0, 0, 0, 0, 0, 0), (0, 100, 0, 100, 0, 100), (30, 30, 20, 30, 40, 30)
RAGGED = (5, 9, 2, 7, 4, 11, 3)
GEN_LEN = 9


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Iterator[None]:
    before = {thread.name for thread in threading.enumerate()}
    yield
    assert {thread.name for thread in threading.enumerate()} - {"tqdm_monitor"} <= before  # that one is of transformers


def open_files() -> set[str]:
    gc.collect()  # what an earlier test of this process has left may be closed at any time
    return {
        os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")
    }


def greedy(case: Case, checkpoints: Checkpoints) -> list[list[int]]:
    """Row by row, by transformers."""
    return [checkpoints.greedy(case, row, GEN_LEN)[0] for row in range(len(case.lengths))]


def stops_at(tokens: list[int], step: int) -> list[int]:
    """What is generated when the token of this step is a stop token: it may well have come before."""
    return tokens[: tokens.index(tokens[step]) + 1]


def stopping(wanted: list[list[int]]) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=GEN_LEN, stop_token_ids=(tokens[-1],))
        if len(tokens) < GEN_LEN
        else SamplingParams(max_tokens=GEN_LEN)
        for tokens in wanted
    ]


ENDING = {"kind": ("opt", "llama-gqa"), "percent": (ALL_ON_DISK, ALL_ON_HOST, MIXED), "schedule": tuple(SCHEDULES)}


@pytest.mark.parametrize("values", on_devices(ENDING))
def test_rows_that_end_at_different_steps_get_the_tokens_that_they_get_alone(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    """With KV on disk and beside an accelerator too, where the caches of the living move together."""
    case = Case(lengths=RAGGED, gen_len=GEN_LEN, gpu_batch_size=3, num_gpu_batches=2, **values)
    every = greedy(case, checkpoints)
    wanted = [stops_at(tokens, step) for tokens, step in zip(every, (0, 4, 8, 2, 6, 1, 3))]
    with case.open(checkpoints, offload) as llm, recorded_logits() as logits:
        completions = llm.generate(case.prompts, stopping(wanted))
        stats = llm.stats
    assert [list(completion.token_ids) for completion in completions] == wanted
    assert len(logits) == sum(map(len, wanted)), "a row was computed after its end"
    assert stats is not None and stats.generated_tokens == sum(map(len, wanted))


def test_rows_end_at_their_own_max_tokens(any_device: str, checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("llama-gqa", ALL_ON_DISK, RAGGED, GEN_LEN, gpu_batch_size=4, device=any_device)
    limits = (1, 9, 2, 5, 3, 7, 4)
    with case.open(checkpoints, offload) as llm:
        completions = llm.generate(case.prompts, [SamplingParams(max_tokens=limit) for limit in limits])
    assert [list(each.token_ids) for each in completions] == [
        tokens[:limit] for tokens, limit in zip(greedy(case, checkpoints), limits)
    ]
    assert {each.finish_reason for each in completions} == {"length"}


def test_no_layer_computes_a_row_that_has_ended(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("llama-gqa", ALL_ON_DISK, RAGGED, GEN_LEN, gpu_batch_size=4)
    limits = (1, 9, 2, 5, 3, 7, 4)
    computed: Counter[str] = Counter()

    def count(name: str) -> None:
        function = getattr(Llama, name)

        @wraps(function)  # layers name their functions
        def counted(self: Llama, hidden: torch.Tensor, *rest: Any) -> Any:
            computed[name] += hidden.shape[0]
            return function(self, hidden, *rest)

        monkeypatch.setattr(Llama, name, counted)

    for name in ("embed", "attention", "mlp", "head"):
        count(name)
    with case.open(checkpoints, offload, graphs="off") as llm:
        llm.generate(case.prompts, [SamplingParams(max_tokens=limit) for limit in limits])
        blocks = len(llm.spec.kv_layers)
    rows = sum(limits)
    assert computed == {"embed": rows, "attention": rows * blocks, "mlp": rows * blocks, "head": rows}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("buffers", first_of([3, 1, 2], 1))
def test_when_all_rows_have_ended_the_run_ends(
    schedule: str, buffers: int, any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    case = Case("opt", ALL_ON_DISK, (5, 9, 2), 60, device=any_device, buffers=buffers, schedule=schedule)
    every = greedy(case, checkpoints)
    wanted = [stops_at(tokens, 2) for tokens in every]
    params = [SamplingParams(max_tokens=60, stop_token_ids=(tokens[-1],)) for tokens in wanted]
    with case.open(checkpoints, offload, trace=True) as llm:
        completions = llm.generate(case.prompts, params)
        assert llm.stats is not None
        trace = llm.stats.last_block.trace
    assert [list(each.token_ids) for each in completions] == wanted
    if schedule != "row_by_row":  # there a batch that has ended is passed over step by step until the next one's turn
        assert max(span.key.step for span in trace.spans if span.key.op is Op.COMPUTE) <= 3
    read = sum(span.bytes for span in trace.spans if span.key.op is Op.READ_W and span.key.step > 3)
    assert read == 0, "weights were read for no row"


def test_a_batch_that_has_ended_moves_nothing_while_others_go_on(
    any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    case = Case("opt", ALL_ON_DISK, (9, 8, 3, 2), GEN_LEN, num_gpu_batches=2, device=any_device)
    with case.open(checkpoints, offload, trace=True) as llm:
        llm.generate(case.prompts, [SamplingParams(max_tokens=limit) for limit in (2, 1, GEN_LEN, 4)])
        assert llm.stats is not None
        spans = llm.stats.last_block.trace.spans
    own = [span for span in spans if span.key.batch == 0 and span.key.op not in (Op.READ_W, Op.LOAD_W)]
    assert sum(span.bytes for span in own if span.key.step > 2) == 0, "the second step was its last; a third may be under way"
    assert all(span.bytes for span in spans if span.key.batch == 1 and span.key.op in (Op.READ_KV, Op.WRITE_KV, Op.STORE_H))


def test_a_run_can_be_ended_from_outside_and_gives_the_rows_that_are_finished(checkpoints: Checkpoints, offload: Path) -> None:
    """`until` ends a block at a task: what was issued is done, what is generated so far is kept."""
    case = Case("opt", ALL_ON_DISK, RAGGED, GEN_LEN, gpu_batch_size=7)
    with case.open(checkpoints, offload) as llm:
        params = [SamplingParams(max_tokens=2 if row % 2 else GEN_LEN) for row in range(len(RAGGED))]
        completions = llm.generate(case.prompts, params, stop_at=lambda task: task.step == 4)
    assert [each.index for each in completions] == [1, 3, 5]


@pytest.mark.parametrize("hidden", [(0, 100), (0, 0)], ids=["at rest", "from disk"])
@pytest.mark.parametrize("kind", ["olmoe", "gpt-oss"])
def test_slices_of_experts_overwrite_what_no_buffer_holds(
    kind: str, hidden: tuple[int, int], checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is promised for one wide state of a batch that rests, in prompts that are read in several parts as well. Recorded
    steps work in a tensor of their own, which they overwrite in any case."""
    told, whole = set[tuple[bool, bool]](), Engine._computed

    def watched(self: Engine, visit: Visit, part: RowsPart, states: Tensor | None, *args: Any, **options: Any) -> Tensor:
        computed = whole(self, visit, part, states, *args, **options)
        told.add((self._spec.layers[visit.layer].overwrites, computed is states))
        return computed

    monkeypatch.setattr(Engine, "_computed", watched)
    case = Case(kind, (0, 0, 0, 100, *hidden), lengths=(30, 25, 9, 20), prefill_tokens=16, buffers=3)
    generate_with_case(case, checkpoints, offload, graphs="off")
    rests = hidden == (0, 100)
    assert told == {(True, rests), (False, False)}


@pytest.mark.parametrize(("kind", "batches"), [("olmoe", 1), ("olmoe", 2), ("opt", 2)])
def test_what_prompts_worked_in_is_given_back_before_states_widen(
    kind: str, batches: int, checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before their first tokens are handed on; not in steps, nor for a few tokens."""
    calls = list[int]()
    monkeypatch.setattr(engine, "give_back_freed", lambda: calls.append(1))
    case = Case(kind, (0, 100, 0, 100, 0, 100), lengths=(9,) * 4, gpu_batch_size=4 // batches, num_gpu_batches=batches)
    generate_with_case(case, checkpoints, offload)
    assert len(calls) == batches
    monkeypatch.setattr(engine, "PROMPTS_WORTH_IT", 1)
    generate_with_case(case, checkpoints, offload)
    blocks = checkpoints.spec(case).num_blocks if kind == "olmoe" else 0
    assert len(calls) == batches * (2 + blocks)


def generate_with_case(case: Case, checkpoints: Checkpoints, offload: Path, **options: Any) -> None:
    with case.open(checkpoints, offload, **options) as llm:
        generate_with(llm, case)


def test_the_spans_of_a_run_keep_to_the_needs_of_its_schedule(any_device: str, checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("opt", MIXED, RAGGED, num_gpu_batches=4, device=any_device)
    with case.open(checkpoints, offload, trace=True) as llm:
        generate_with(llm, case)
        assert llm.stats is not None
        run = llm.stats.last_block
    spans = {span.key: span for span in run.trace.spans}
    tasks = list(run.planned.schedule.tasks())
    assert len(spans) == len(tasks)
    for task in tasks:
        for need in task.needs:
            assert spans[need].end <= spans[task.key].start + (1e-3 if any_device == "cuda" else 0)


# -- sampling, streaming -------------------------------------------------------------------------------------------------


def sampled(case: Case, checkpoints: Checkpoints, offload: Path, seed: int) -> list[Completion]:
    params = SamplingParams(max_tokens=6, temperature=1.5, top_k=40, top_p=0.95, logprobs=2)
    with case.open(checkpoints, offload) as llm:
        return llm.generate(case.prompts, params, seed=seed)


def test_a_rows_sample_depends_on_neither_its_mates_nor_the_plan(
    any_device: str, checkpoints: Checkpoints, offload: Path
) -> None:
    first = sampled(Case("qwen3", ALL_ON_DISK, RAGGED, gpu_batch_size=3, device=any_device), checkpoints, offload, seed=5)
    other = sampled(Case("qwen3", ALL_ON_HOST, RAGGED, gpu_batch_size=1, num_gpu_batches=4), checkpoints, offload, seed=5)
    assert [each.token_ids for each in first] == [each.token_ids for each in other]
    another_seed = sampled(Case("qwen3", ALL_ON_HOST, RAGGED), checkpoints, offload, seed=6)
    assert [each.token_ids for each in first] != [each.token_ids for each in another_seed]


def test_streamed_tokens_are_those_of_the_completions(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("opt", MIXED, RAGGED)
    came: dict[int, list[int]] = {}
    texts: Counter[int] = Counter()

    def on_token(row: int, token: int, text: str | None) -> None:
        came.setdefault(row, []).append(token)
        assert text is not None
        texts[row] += len(text)

    with case.open(checkpoints, offload) as llm:
        completions = llm.generate(case.prompts, SamplingParams(max_tokens=5), on_token=on_token)
    assert [came[row] for row in range(len(RAGGED))] == [list(each.token_ids) for each in completions]
    assert [texts[row] for row in range(len(RAGGED))] == [len(each.text) for each in completions]


def test_a_callback_that_raises_ends_the_run_with_its_error_and_leaves_nothing(checkpoints: Checkpoints, offload: Path) -> None:
    def on_token(row: int, token: int, text: str | None) -> None:
        raise LookupError("no listener")

    case = Case("opt", ALL_ON_DISK, RAGGED)
    with pytest.raises(TaskFailed, match="no listener"), case.open(checkpoints, offload) as llm:
        llm.generate(case.prompts, SamplingParams(max_tokens=5), on_token=on_token)


# -- what is left behind -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [Op.READ_W, Op.READ_KV, Op.WRITE_KV, Op.STORE_H, Op.LOAD_H, Op.COMPUTE], ids=str)
def test_after_an_error_in_mid_run_everything_is_given_back(
    op: Op, checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("opt", ALL_ON_DISK, RAGGED, GEN_LEN)
    before = open_files()
    fail_at(monkeypatch, op)
    with case.open(checkpoints, offload) as llm:
        with pytest.raises(TaskFailed, match=f"while running {op} 2"):
            llm.generate(case.prompts, SamplingParams(max_tokens=GEN_LEN))
        assert not list(offload.iterdir()), "a file has a name in the offload folder"
        assert llm.loaded._memories is not None and llm.loaded._memories.disk.meter.used_bytes == 0
    assert open_files() == before


def fail_at(monkeypatch: pytest.MonkeyPatch, op: Op) -> None:
    """The first task of this kind in step 2 fails, as its action would."""
    from h2o_flexgen.engine.engine import Engine

    actions = Engine._actions

    def failing(self: Engine, *state: Any) -> dict[Op, Any]:
        table = actions(self, *state)
        action = table[op]

        def act(task: Task) -> int:
            if task.step == 2:
                raise OSError(5, "broken cable")
            return action(task)

        return {**table, op: act}

    monkeypatch.setattr(Engine, "_actions", failing)


def test_an_engine_can_be_used_again_after_an_error(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("opt", MIXED, RAGGED)

    def interrupt(task: Task, tokens: int) -> None:
        if task.step == 1:
            raise KeyboardInterrupt

    with case.open(checkpoints, offload) as llm:
        expected = llm.generate(case.prompts, SamplingParams(max_tokens=5))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(case.prompts, SamplingParams(max_tokens=5), on_visit=interrupt)
        assert llm.generate(case.prompts, SamplingParams(max_tokens=5)) == expected


def test_a_disk_that_is_full_before_the_run_is_told_and_leaves_nothing(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("opt", ALL_ON_DISK, RAGGED)
    full_after(monkeypatch, "posix_fallocate", 3)
    with case.open(checkpoints, offload) as llm:
        with pytest.raises(OSError, match=r"disk is full: .* could not be written in .*; lower the disk share"):
            llm.generate(case.prompts, SamplingParams(max_tokens=5))
        monkeypatch.undo()
        memories = llm.loaded._memories
        assert memories is not None and memories.disk.meter.used_bytes == 0, "what was reserved is not given back"


def test_a_disk_that_is_full_in_mid_run_is_told_and_leaves_nothing(
    checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("opt", ALL_ON_DISK, RAGGED)
    full_after(monkeypatch, "pwrite", 20)
    with case.open(checkpoints, offload) as llm, pytest.raises(TaskFailed, match="disk is full") as caught:
        llm.generate(case.prompts, SamplingParams(max_tokens=5))
    assert str(offload) in str(caught.value) and isinstance(caught.value.cause, OSError)


def full_after(monkeypatch: pytest.MonkeyPatch, function: str, calls: int) -> None:
    work, counted = getattr(os, function), iter(range(calls))

    def fill_up(*arguments: Any) -> Any:
        if next(counted, None) is None:
            raise OSError(28, "No space left on device")
        return work(*arguments)

    monkeypatch.setattr(os, function, fill_up)


@pytest.mark.parametrize("percent", [ALL_ON_HOST, ALL_ON_DISK])
def test_weights_that_are_cut_off_while_they_are_used_are_named_and_nothing_is_left(
    percent: tuple[float, ...], checkpoints: Checkpoints, offload: Path, tmp_path: Path
) -> None:
    """Headers and lengths were right when the model was opened."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoints.folder("opt"), folder)
    before = open_files()
    with LLM(str(folder), percent=percent, dtype="float32", offload_dir=offload) as llm:
        shards = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size)
        os.truncate(shards[-1], 4096)
        for _ in range(2):
            with pytest.raises((OSError, TaskFailed), match=rf"{shards[-1]}: ends at byte 4096.* is it truncated"):
                llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    assert open_files() == before


def test_two_engines_share_a_process_and_an_offload_folder(checkpoints: Checkpoints, offload: Path) -> None:
    first, second = Case("opt", ALL_ON_DISK, RAGGED), Case("neox-parallel", MIXED, RAGGED)
    alone = []
    for case in (first, second):
        with case.open(checkpoints, offload) as llm:
            alone.append(llm.generate(case.prompts, SamplingParams(max_tokens=5)))
    with first.open(checkpoints, offload) as one, second.open(checkpoints, offload) as other:
        outputs: dict[int, list[Completion]] = {}

        def run(place: int, llm: LLM, case: Case) -> None:
            outputs[place] = llm.generate(case.prompts, SamplingParams(max_tokens=5))

        threads = [threading.Thread(target=run, args=each) for each in ((0, one, first), (1, other, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [outputs[0], outputs[1]] == alone


def test_an_engine_that_is_closed_twice_or_before_it_ran_is_closed(checkpoints: Checkpoints, offload: Path) -> None:
    llm = Case().open(checkpoints, offload)
    llm.close()
    llm.close()
    with Case().open(checkpoints, offload) as used:
        used.generate([[1, 2]], SamplingParams(max_tokens=1))
        used.close()


@pytest.mark.parametrize("stage", ["not a folder", "below a file"])
def test_an_offload_folder_that_cannot_be_made_is_named(stage: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    folder = file if stage == "not a folder" else file / "deep" / "deeper"
    line = f"offload_dir {folder}: no file can be written in {file}; give another folder"
    with pytest.raises(ValueError, match=line), Case().open(checkpoints, folder) as llm:
        llm.generate([[1, 2]], SamplingParams(max_tokens=1))
    assert file.read_text() == "mine" and list(tmp_path.iterdir()) == [file]


def test_an_offload_folder_in_one_that_is_not_there_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = tmp_path / "mistyped" / "deep" / "deeper"
    line = f"offload_dir {folder}: {tmp_path}/mistyped is not there; mend the path, or make {folder.parent}"
    with pytest.raises(ValueError, match=line), Case().open(checkpoints, folder):
        pass
    assert not list(tmp_path.iterdir())


def test_peaks_are_of_the_last_generate(checkpoints: Checkpoints, offload: Path) -> None:
    with Case("opt", ALL_ON_DISK).open(checkpoints, offload) as llm:
        llm.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=40))
        assert llm.stats is not None
        large = llm.stats.peak_bytes["disk"]
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        assert 0 < llm.stats.peak_bytes["disk"] < large
