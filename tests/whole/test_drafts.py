"""Tokens that are guessed and checked several in one pass: they are those of no guesses, drawn or greedy, under every plan."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.cli.slow import unguessed_reason
from h2o_flexgen.core.buffer_layout import states_of_one
from h2o_flexgen.core.model_spec import TRIED_AT_ONCE
from h2o_flexgen.core.site import HOST
from h2o_flexgen.core.workload import Workload
from h2o_flexgen.engine import graphs
from h2o_flexgen.engine.drafts import ALLOWED, GRANTED, PLAIN_FIRST, Drafted, Drafts, Lookup, Worth, _OfRow
from h2o_flexgen.engine.generate import job_of
from h2o_flexgen.engine.job import Request
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.rows import BatchRows
from h2o_flexgen.engine.stores.row_stores import StateStore
from h2o_flexgen.engine.stores.states_of_visits import Replays, StatesOfSteps, states_over
from h2o_flexgen.formats.kernel_table import INT8, TORCH
from h2o_flexgen.kernels import native
from h2o_flexgen.kv.layer_cache import LayerCache
from h2o_flexgen.kv.slots import Change, Guesses
from h2o_flexgen.models.new_tokens import Passing
from h2o_flexgen.planning.footprint import LOOKED_UP_BYTES
from h2o_flexgen.planning.plan import BFLOAT16, Plan
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.sampler import Sampler
from h2o_flexgen.schedule.ops import Op
from tests.clocked.backend import IS_POSSIBLE
from tests.clocked.context import sound
from tests.clocked.tensor import NAME as CLOCKED
from tests.engine.test_shrink import fail_at
from tests.helpers.contract import BY_HEAD, POLICIES, UNLIKE, Case, Checkpoints
from tests.helpers.samples import every_nth, first_of
from tests.whole.test_arrivals import hold_contract as hold_arrivals
from tests.whole.test_fuzz import check_logprobs, generate, random_case, random_params
from tests.whole.test_stream import LENGTHS as ARRIVING

LENGTHS, GROWTH = (5, 9, 4, 7, 6), (8, 10, 12, 6, 11)
ON_DISK = (0, 0, 100, 0, 100, 0)  # weights alone: they come for each pass
CASES = (
    Case("llama-gqa", ON_DISK, gpu_batch_size=3),
    Case("opt", ON_DISK, gpu_batch_size=1, num_gpu_batches=1),
    Case("qwen3", (50, 0, 100, 0, 0, 100), gpu_batch_size=2, num_gpu_batches=2, kv_codec="group4"),
    Case("mistral", ON_DISK, kv_codec="group8", gpu_batch_size=3, buffers=1, weight_codec="group4"),
    Case("llama-mha", ON_DISK, gpu_batch_size=2, weight_codec="group8", compute="int8"),
    Case("gemma3-capped", ON_DISK, gpu_batch_size=3, sep_layer=False),
    Case("deepseek-v3", ON_DISK, gpu_batch_size=2),
    Case("gpt-oss", ON_DISK, gpu_batch_size=3),
    Case("bloom", ON_DISK, gpu_batch_size=2),
    Case("qwen3-5", ON_DISK, gpu_batch_size=3),
    Case("qwen3-5", (0, 0, 100, 0, 100, 0), gpu_batch_size=2, state_dtype=BFLOAT16, policy=(("state", (0, 0)),)),
    Case("lfm2", ON_DISK, gpu_batch_size=2, buffers=1),
    Case("nemotron-h", ON_DISK, weight_codec="group8", compute="int8", state_dtype=BFLOAT16, policy=(("state", (0, 0)),)),
    Case("falcon-h1", ON_DISK, gpu_batch_size=3, policy=(("state", (0, 0)),)),
    Case("kimi-linear", ON_DISK, gpu_batch_size=2, state_dtype=BFLOAT16),
    Case("qwen3-next", ON_DISK, gpu_batch_size=2, policy=(("least_prefix", 4),)),
    Case("llama-gqa", ON_DISK, gpu_batch_size=3, policy=(("least_prefix", 4),)),
    Case("llama-gqa", ON_DISK, gpu_batch_size=2, policy=(("least_prefix", 4), ("prefix_policy", "judged"))),
    *(
        Case("llama-gqa", ON_DISK, gpu_batch_size=2 + number % 2, policy=policy)
        for number, policy in enumerate(POLICIES[1:])
        if policy in UNLIKE  # random plans have the others
    ),
    Case("qwen3", (50, 0, 100, 0, 100, 0), gpu_batch_size=3, kv_codec="group4", policy=POLICIES[1]),
    Case("deepseek-v3", ON_DISK, gpu_batch_size=2, policy=POLICIES[10]),
    Case("gemma3-capped", ON_DISK, gpu_batch_size=2, policy=POLICIES[3]),
    Case("llama-gqa", ON_DISK, gpu_batch_size=2, policy=BY_HEAD[0]),
    Case("mistral", ON_DISK, gpu_batch_size=3, policy=(*POLICIES[2], ("positions", "rolling"))),
    Case("llama-gqa", ON_DISK, gpu_batch_size=2, policy=(*POLICIES[1], ("least_prefix", 4), ("prefix_policy", "judged"))),
    Case("llama-gqa", ON_DISK, gpu_batch_size=3, policy=(*POLICIES[13], ("least_prefix", 4))),
    Case("llama-gqa", gpu_batch_size=1, num_gpu_batches=1),  # in memory, where steps without guesses are recorded
    Case("qwen3", gpu_batch_size=3, kv_codec="group4", policy=POLICIES[1]),
    Case("gemma3-capped", (50, 0, 100, 0, 100, 0), gpu_batch_size=2),
)
WEIGHTS = (0, 0), (0, 0), (50, 0), (30, 30), (100, 0)  # shares in memory; the others are on disk
LONG_ENOUGH = 5  # tokens of a text of which some are guessed
Texts = Sequence[Sequence[int]]  # prompts with what rows will say
Rows = Sequence[tuple[RowState, int]]
Levels = Callable[[BatchRows, Rows], Any]


def always() -> Any:
    """A context in which every pass is worth a guess, however long it takes."""
    return patch.object(Worth, "is_there", True)


def guessing(texts: Texts, seed: int, tried: list[int] | None = None) -> Any:
    """A context in which rows guess some tokens that they will say, and then some others. `tried`: gets their numbers."""
    random = Random(seed)

    def guess(own: _OfRow, seen: Sequence[int], most: int) -> None:
        text = next((text for text in texts if list(text[: len(seen)]) == list(seen)), seen)
        right, wrong = random.randrange(6), random.randrange(4)
        told = [*text[len(seen) :][:right], *(random.choice(seen) for _ in range(wrong))]
        own.tokens = told[: max(0, most)]
        if tried is not None and own.tokens:
            tried.append(len(own.tokens))

    return patch.multiple(_OfRow, guess=guess)


def said(completions: Sequence[Completion]) -> list[tuple[object, ...]]:
    return [
        (one.index, out.token_ids, out.text, out.finish_reason, out.stop_reason)
        for one in sorted(completions, key=lambda one: one.index)
        for out in one.outputs
    ]


def requests_of(case: Case) -> list[Request]:
    beginning = case.prompts[1] if dict(case.policy).get("least_prefix") else []  # that all share
    return [Request([*beginning, *prompt], SamplingParams(most)) for prompt, most in zip(case.prompts, GROWTH)]


def both_ways(llm: LLM, requests: Sequence[Request], **options: Any) -> Iterator[tuple[list[Completion], Drafted]]:
    """What a fixed block says, and a running one."""
    prompts, params = [one.prompt for one in requests], [one.params for one in requests]
    for run in (lambda: llm.generate(prompts, params, **options), lambda: [*llm.generate_stream(requests, **options)]):
        found = run()
        assert llm.stats is not None
        yield found, llm.stats.drafted


def texts_of(completions: Sequence[Completion]) -> Texts:
    return [[*one.prompt_token_ids, *out.token_ids] for one in completions for out in one.outputs]


@pytest.mark.parametrize("case", every_nth([replace(case, lengths=LENGTHS) for case in CASES], 6), ids=str)
def test_tokens_are_those_of_no_guesses(case: Case, checkpoints: Checkpoints, offload: Path) -> None:
    requests = requests_of(case)
    with case.open(checkpoints, offload) as llm:
        wanted = [found for found, drafted in both_ways(llm, requests) if drafted == Drafted()]
    texts = [*texts_of(wanted[0]), *texts_of(wanted[1])]  # which differ where running rows alone share what is not evicted
    with case.open(checkpoints, offload, draft="ngram") as llm, always(), guessing(texts, len(str(case))):
        for (found, drafted), own in zip(both_ways(llm, requests), wanted, strict=True):
            assert said(found) == said(own)
            assert drafted.accepted >= 12 and drafted.proposed >= drafted.accepted + 3


def test_tokens_are_those_of_the_resident_loop(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("llama-gqa", ON_DISK, lengths=LENGTHS, gen_len=24, gpu_batch_size=1, num_gpu_batches=2)
    made = [checkpoints.resident_logits(case, (row,)) for row in range(len(LENGTHS))]
    wanted = [[int(logits[0].argmax()) for logits in of_row] for of_row in made]
    texts = [[*prompt, *own] for prompt, own in zip(case.prompts, wanted)]
    with case.open(checkpoints, offload, draft="ngram") as llm, always(), guessing(texts, seed=2):
        found = llm.generate(case.prompts, SamplingParams(24))
        assert llm.stats is not None and llm.stats.drafted.accepted > 40
        assert len(llm.stats.step_seconds) < 0.7 * 23 * 3, "three blocks, each of fewer passes"
    assert [[*one.token_ids] for one in found] == wanted


def hold(seed: int, checkpoints: Checkpoints, offload: Path, devices: Sequence[str] = ("cpu", "pretended")) -> None:
    """A random plan under which keys and values stay says the same with guesses and without. In 8 bits logits have the same
    bits, too."""
    random, tried = Random(seed), list[int]()
    case = random_case(random, devices)
    percent = (*random.choice(WEIGHTS), 100, 0, *case.percent[4:])
    lengths = tuple(max(2, length) for length in case.lengths)
    case = replace(case, percent=percent, lengths=lengths, gen_len=random.randint(6, 14))
    params = [random_params(random, case.gen_len) for _ in case.lengths]
    try:
        with sound() if case.device == CLOCKED else nullcontext():
            wanted, plain = generate(case, params, checkpoints, offload)
        with sound() if case.device == CLOCKED else nullcontext(), always(), guessing(texts_of(wanted), seed, tried):
            found, logits = generate(replace(case, policy=(*case.policy, ("draft", "ngram"))), params, checkpoints, offload)
        assert said(found) == said(wanted)
        assert tried or max(len(out.token_ids) for one in wanted for out in one.outputs) < LONG_ENOUGH, "nothing was guessed"
        for own, other in zip(found, wanted, strict=True):
            check_logprobs(own, other)
        if case.compute == INT8 and case.device == "cpu" and native.in_use() != TORCH:
            assert all(torch.equal(own, plain[place]) for place, own in logits.items()), "logits have other bits"
    except BaseException as error:
        raise AssertionError(f"seed {seed}: Case({case})\nparams {params}") from error


@pytest.mark.parametrize("seed", first_of(range(6), 2))
def test_random_plans_say_the_same(seed: int, checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    hold(seed, checkpoints, offload)


@pytest.mark.skipif(not IS_POSSIBLE, reason="a pretended device with clocks is not possible here")
@pytest.mark.slow
@pytest.mark.parametrize("seed", [4])
def test_guesses_race_with_nothing(seed: int, checkpoints: Checkpoints, offload: Path) -> None:
    hold(seed, checkpoints, offload, (CLOCKED,))


@pytest.mark.fuzz
def test_many_more_random_plans_say_the_same(fuzz_seed: int, checkpoints: Checkpoints, offload: Path, pretended: None) -> None:
    hold(fuzz_seed, checkpoints, offload, ("cpu", "pretended", CLOCKED) if IS_POSSIBLE else ("cpu", "pretended"))


def test_rows_that_come_meanwhile_say_the_same(checkpoints: Checkpoints, offload: Path) -> None:
    """As with the server. All guesses are wrong."""
    with always(), guessing((), seed=3):
        hold_arrivals(Case("llama-gqa", ON_DISK, lengths=ARRIVING, policy=(("draft", "ngram"),)), checkpoints, offload)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offload")


def demo(folder: Path, **options: Any) -> LLM:
    given: dict[str, Any] = {"gpu_batch_size": 4, "percent": ON_DISK, "draft": "ngram", **options}
    return LLM("demo", dtype="float32", offload_dir=folder, **given)


HELD = {"regex": "[a-f ]{9}-FIXED-[0-9]{2}"}
PARAMS = (
    SamplingParams(30, temperature=1.0, n=3),
    SamplingParams(25, temperature=1.4, seed=4, repetition_penalty=1.3, presence_penalty=0.4, top_p=0.9),
    SamplingParams(3),
    SamplingParams(30, stop=["the", ", "]),
    SamplingParams(30, temperature=0.8, top_k=40, stop=["a"], include_stop_str_in_output=True),
    SamplingParams(20, logprobs=2, frequency_penalty=0.3),
    SamplingParams(20, min_tokens=9, temperature=0.7, logit_bias={5: 2.0}, no_repeat_ngram_size=2),
    SamplingParams(30, temperature=1.0, structured_outputs=HELD),
)
BEGINNINGS = ("It was", "My dear Watson", "Alice", "Call me", "So he said that", "There", "In the beginning", "Name:")


def test_drawn_tokens_and_all_that_ends_a_text_are_the_same(folder: Path) -> None:
    """Where a stop or the most tokens lie within a guess; with penalties, which count tokens, log-probabilities and forms."""
    pytest.importorskip("llguidance", reason="needs the extra [grammar]")
    requests = [Request(text, params) for text, params in zip(BEGINNINGS, PARAMS, strict=True)]
    told: list[dict[int, list[object]]] = []

    def heard() -> Callable[..., object]:
        told.append({})
        return lambda row, *rest, own=told[-1]: own.setdefault(row, []).append(rest)

    with demo(folder, draft="off") as llm:
        wanted = sorted(llm.generate_stream(requests, seed=3, on_token=heard()), key=lambda one: one.index)
    with demo(folder) as llm, always(), guessing(texts_of(wanted), seed=1):
        found = [*llm.generate_stream(requests, seed=3, on_token=heard())]
        assert llm.stats is not None and llm.stats.drafted.accepted > 60
        whole = llm.generate(list(BEGINNINGS), list(PARAMS), seed=3, on_token=heard())
        assert llm.stats.drafted.accepted > 60
    assert said(found) == said(whole) == said(wanted)
    assert told[0] == told[1] == told[2]
    for own in (found, whole):
        (scored,), (known,) = ([one.logprobs or () for one in each if one.index == 5] for each in (own, wanted))
        assert [one.chosen.token_id for one in scored] == [one.chosen.token_id for one in known]
        assert [one.chosen.logprob for one in scored] == pytest.approx([one.chosen.logprob for one in known], abs=1e-4)
    assert {one.finish_reason for each in found for one in each.outputs} == {"stop", "length"}


EVICTING = {"kv_policy": "h2o", "heavy": 6, "recent": 6}


@pytest.mark.parametrize("policy", first_of([EVICTING, {}], 1))
def test_a_conversation_goes_on_behind_what_was_guessed(policy: dict[str, Any], folder: Path) -> None:
    said_by: list[list[str]] = []
    turns = ["It was the day, the day, the day", " and the", " so the day, the day"]
    params = [SamplingParams(24, stop=["."], temperature=own) for own in (0, 0.3, 0)]
    for draft in ("off", "ngram"):
        with demo(folder, gpu_batch_size=1, draft=draft, **policy) as llm, always(), llm.converse(200, seed=1) as talk:
            said_by.append([talk.reply(*each).completion.text for each in zip(turns, params)])
            accepted = talk.drafted.accepted
    assert said_by[0] == said_by[1] and accepted > 5


def checked_in_memory(llm: LLM, text: Sequence[int]) -> tuple[list[Tensor], float]:
    """The logits of a row that guesses a usual number of tokens, of which some are wrong, and how many passes were replayed."""
    logits: list[Tensor] = []
    numbers = cycle((0, 4, 8, 4))

    def guess(own: _OfRow, seen: Sequence[int], most: int) -> None:
        count = next(numbers)
        told = [*text[len(seen) : len(seen) + count - 1], 3]
        own.tokens = told if len(told) == count <= most else ()

    with always(), patch.multiple(_OfRow, guess=guess):
        llm.generate([[*text[:5]]], SamplingParams(60), on_logits=lambda row, step, made: logits.append(made.clone()))
    assert llm.stats is not None and llm.stats.drafted.accepted > 20
    return logits, llm.stats.replayed / (len(llm.spec.layers) - 1)


def test_recorded_passes_with_guesses_have_the_bits_of_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"gpu_batch_size": 1, "percent": (100, 0, 100, 0, 100, 0)}
    with demo(folder, draft="off", **options) as llm:
        (wanted,) = llm.generate([[5, 9, 2, 7, 4]], SamplingParams(60))
        text = [*wanted.prompt_token_ids, *wanted.token_ids]
    with demo(folder, graphs="off", **options) as llm:
        plain, none = checked_in_memory(llm, text)
    with demo(folder, **options) as llm:
        recorded, many = checked_in_memory(llm, text)
        assert llm.stats is not None
        passes = len(llm.stats.step_seconds)
        monkeypatch.setattr(graphs, "_is_usual", lambda part: False)
        unrecorded, fewer = checked_in_memory(llm, text)
    assert len(plain) == len(recorded) == len(unrecorded) == len(wanted.token_ids)
    assert all(torch.equal(own, one) and torch.equal(own, other) for own, one, other in zip(plain, recorded, unrecorded))
    if native.in_use() != TORCH:
        assert none == 0 < fewer < many == passes - 1, "the first pass of all makes what the first ones with guesses find"


@pytest.mark.parametrize("case", [Case("llama-gqa", policy=POLICIES[1]), Case("gemma3-capped")], ids=str)
def test_recorded_passes_go_on_behind_what_was_taken_back(case: Case, checkpoints: Checkpoints, offload: Path) -> None:
    """Passes without guesses are one call, from the first layer on, which has no keys and values. A policy evicts, or windows
    are full."""
    case = replace(case, lengths=(16,), gpu_batch_size=1, num_gpu_batches=1)

    def made_by(text: Sequence[int] = (), **options: Any) -> tuple[list[Tensor], list[int], int]:
        logits: list[Tensor] = []
        numbers = cycle((*[0] * 8, 4, 0, 0, 0, 4))

        def guess(own: _OfRow, seen: Sequence[int], most: int) -> None:
            count = next(numbers)
            own.tokens = [*text[len(seen) :][:2], 3, 3] if 0 < count <= most else ()

        def heard(row: int, step: int, made: Tensor) -> None:
            logits.append(made.clone())

        with case.open(checkpoints, offload, **options) as llm, always(), patch.multiple(_OfRow, guess=guess):
            (said,) = llm.generate(case.prompts, SamplingParams(50, ignore_eos=True), on_logits=heard)
            assert llm.stats is not None and llm.stats.drafted.accepted >= 6 * bool(text)
            return logits, [*said.prompt_token_ids, *said.token_ids], llm.stats.replayed

    wanted, text, _ = made_by()
    made, same, none = made_by(text, draft="ngram", graphs="off")
    recorded, alike, many = made_by(text, draft="ngram")
    assert text == same == alike
    assert all(torch.equal(own, other) for own, other in zip(made, recorded, strict=True))
    assert max(float((own - other).abs().max()) for own, other in zip(wanted, recorded, strict=True)) < 1e-4
    if native.in_use() != TORCH:
        assert none == 0 < many


def test_rows_that_start_again_go_on_where_they_were(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request(text, SamplingParams(25, temperature=1.0)) for text in BEGINNINGS]
    with demo(folder, draft="off") as llm:
        wanted = [*llm.generate_stream(requests, seed=2)]
    fail_at(monkeypatch, Op.COMPUTE, step=3, most_rows=2)
    with demo(folder) as llm, always(), guessing(texts_of(wanted), seed=5), pytest.warns(RuntimeWarning, match="memory"):
        found = [*llm.generate_stream(requests, seed=2)]
        assert llm.stats is not None and llm.stats.drafted.accepted > 40
    assert said(found) == said(wanted)


# -- faults ------------------------------------------------------------------------------------------------------------------


def keeps_what_was_wrong(levels: Levels) -> Iterator[None]:
    """A row goes on behind a wrong token instead of on its place."""
    judge, wrong = Drafts.judge, set[int]()

    def judged(self: Drafts, rows: Sequence[RowState], accepted: Sequence[int]) -> None:
        wrong.update(row.row for row, right in zip(rows, accepted) if right < len(self.of(row)))
        judge(self, rows, accepted)

    def shifted(self: BatchRows, rows: Rows) -> Any:
        return levels(self, [(row, step + (row.row in wrong and step < row.max_tokens - 1)) for row, step in rows])

    with patch.object(Drafts, "judge", judged), patch.object(BatchRows, "_steps_at", shifted):
        yield


def is_at_the_next_position(levels: Levels) -> Iterator[None]:
    """A guessed token is computed as the one behind it."""

    def shifted(self: BatchRows, rows: Rows) -> Any:
        return levels(self, [(row, min(step + (step > row.num_generated), row.max_tokens - 1)) for row, step in rows])

    with patch.object(BatchRows, "_steps_at", shifted):
        yield


def draws_twice(_: Levels) -> Iterator[None]:
    """The tokens behind a guess are drawn with the number of the one before."""
    draws, try_on = Sampler._draws, BatchRows._try_on

    def earlier(self: Sampler, params: Any, rows: Any, steps: Sequence[int], *rest: Any) -> Any:
        return draws(self, params, rows, [step - 1 for step in steps], *rest)

    def tried(self: BatchRows, *given: Any) -> int:
        with patch.object(Sampler, "_draws", earlier):
            return try_on(self, *given)

    with patch.object(BatchRows, "_try_on", tried):
        yield


def believes_all(_: Levels) -> Iterator[None]:
    with patch.object(BatchRows, "_is_right", lambda self, row, turn: True):
        yield


def takes_the_slots_of_the_first_row(_: Levels) -> Iterator[None]:
    repeated = LayerCache.repeated
    with patch.object(LayerCache, "repeated", lambda self, row, times: repeated(self, 0, times)):
        yield


def reads_logits_one_turn_late(_: Levels) -> Iterator[None]:
    tried = BatchRows.tried_hidden

    def late(self: BatchRows, hidden: Tensor) -> Tensor | None:
        found = tried(self, hidden)
        return None if found is None else found.roll(1, 0)

    with patch.object(BatchRows, "tried_hidden", late):
        yield


def takes_nothing_back(_: Levels) -> Iterator[None]:
    with patch.object(Guesses, "take_back", lambda self, staying: self._turns.clear()):
        yield


def takes_one_too_many_back(_: Levels) -> Iterator[None]:
    take_back = Guesses.take_back
    with patch.object(Guesses, "take_back", lambda self, staying: take_back(self, [count - 1 for count in staying])):
        yield


def takes_the_first_back_first(_: Levels) -> Iterator[None]:
    take_back = Guesses.take_back

    def turned(self: Guesses, staying: Sequence[int]) -> None:
        self._turns.reverse()
        take_back(self, staying)

    with patch.object(Guesses, "take_back", turned):
        yield


def takes_slots_alone_back(_: Levels) -> Iterator[None]:
    take_back = Change.take_back
    with patch.object(Change, "take_back", lambda self, row: take_back(replace(self, before=self.noted), row)):
        yield


def takes_notes_alone_back(_: Levels) -> Iterator[None]:
    take_back = Change.take_back
    with patch.object(Change, "take_back", lambda self, row: take_back(replace(self, slots=None), row)):
        yield


def takes_the_first_row_back(_: Levels) -> Iterator[None]:
    take_back = Change.take_back
    with patch.object(Change, "take_back", lambda self, row: take_back(self, 0)):
        yield


OF_SLOTS = (
    takes_nothing_back,
    takes_one_too_many_back,
    takes_the_first_back_first,
    takes_slots_alone_back,
    takes_notes_alone_back,
    takes_the_first_row_back,
)
FAULTS = (
    keeps_what_was_wrong,
    is_at_the_next_position,
    draws_twice,
    believes_all,
    takes_the_slots_of_the_first_row,
    reads_logits_one_turn_late,
)


@pytest.mark.parametrize("policy", [(), POLICIES[1]])
def test_planted_faults_are_found(policy: tuple[tuple[str, Any], ...], checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("llama-gqa", ON_DISK, LENGTHS[:4], gpu_batch_size=4, num_gpu_batches=1, policy=policy)
    requests = [Request(prompt, SamplingParams(20, temperature=1.0)) for prompt in case.prompts]
    with case.open(checkpoints, offload) as llm:
        wanted = [*llm.generate_stream(requests, seed=2)]
    with case.open(checkpoints, offload, draft="ngram") as llm, always(), guessing(texts_of(wanted), seed=5):
        assert said([*llm.generate_stream(requests, seed=2)]) == said(wanted)
        for fault in OF_SLOTS if policy else FAULTS:
            with contextmanager(fault)(BatchRows._steps_at):
                assert said([*llm.generate_stream(requests, seed=2)]) != said(wanted), fault.__name__


# -- what is guessed, and when ------------------------------------------------------------------------------------------------


def test_what_came_behind_the_longest_of_the_last_tokens_is_guessed() -> None:
    look = Lookup()
    assert look.guess([1, 2, 3], 4) == []
    assert look.guess([1, 2, 3, 9, 2, 3], 2) == [9, 2], "behind 2 3"
    assert look.guess([1, 2, 3, 9, 2, 3, 8, 7, 2, 3], 3) == [8, 7, 2], "their last place"
    assert look.guess([1, 2, 3, 9, 2, 3, 8, 7, 2, 3, 9, 2, 3], 2) == [8, 7], "behind 3 9 2 3, not behind the newer 2 3"
    assert Lookup().guess([5, 6, 5, 6], 5) == [5, 6, 5, 6, 5], "a text that repeats itself goes on so"
    assert Lookup().guess([5], 3) == Lookup().guess([], 3) == []


@pytest.mark.parametrize("tokens", [50, 683, 1400, 5600, 8000])
def test_what_guesses_are_looked_up_in_takes_no_more_than_is_planned(tokens: int) -> None:
    """Of a text in which nothing comes twice. A dict is largest where it has just grown."""
    random = Random(tokens)
    text = [random.randrange(100_000) for _ in range(tokens)]
    gc.collect()
    tracemalloc.start()
    try:
        look = Lookup()
        assert look.guess(text, 4) == []
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.6 * LOOKED_UP_BYTES * tokens < most <= LOOKED_UP_BYTES * tokens


def test_plans_count_what_guesses_are_looked_up_in(folder: Path) -> None:
    workload, moved = Workload((30, 20, 9, 7), 12), (0, 0, 0, 0, 0, 0)
    each: list[tuple[dict[str, Any], int]] = [({}, 4 * 42), ({"draft": "off"}, 0), ({"percent": moved}, 0)]
    requests = [Request([5 + most] * length, SamplingParams(most)) for length, most in ((30, 5), (2, 12), (9, 33), (40, 1))]
    for options, tokens in each:
        with demo(folder, num_gpu_batches=1, **options) as llm:
            for planned in (llm.check(workload), llm.plan_job(job_of(requests, llm.row_maker))):
                assert planned.footprint.parts[HOST].get("drafts", 0) == tokens * LOOKED_UP_BYTES, options
    with demo(folder, gpu_batch_size=1) as llm, llm.converse(200) as talk:
        assert talk.planned_reply.guesses_any
        assert llm.loaded.planned(talk.extent.workload).footprint.parts[HOST]["drafts"] == 200 * LOOKED_UP_BYTES


def test_plans_count_what_guesses_change(folder: Path) -> None:
    take_back, sizes = Guesses.take_back, list[int]()

    def weighed(self: Guesses, staying: Sequence[int]) -> None:
        changes = [turn.change for turn in self._turns]
        there = [own for one in changes for own in (*one.before.tensors, one.slots, one.values) if own is not None]
        sizes.append(sum(own.nbytes for own in there))
        take_back(self, staying)

    def guess(own: _OfRow, seen: Sequence[int], most: int) -> None:
        own.tokens = [5] * min(16, most)

    with demo(folder, num_gpu_batches=1, **EVICTING) as llm, always(), patch.multiple(_OfRow, guess=guess):
        with patch.object(Guesses, "take_back", weighed):
            llm.generate([[9] * 40] * 4, SamplingParams(30))
        planned = llm.check(Workload((40,) * 4, 30)).footprint.parts[HOST]["guesses"]
    assert 0.9 * planned < max(sizes) <= planned


def test_plans_count_logits_of_guesses_but_no_states_of_prefixes_for_them(folder: Path) -> None:
    """Those are kept for log-probabilities of prompts alone."""

    def planned(logprobs: int | None = None, **options: Any) -> tuple[Mapping[str, int], int]:
        params = SamplingParams(9, prompt_logprobs=logprobs)
        requests = [Request([*range(5, 45), *[50 + row] * 20], params) for row in range(4)]
        with demo(folder, num_gpu_batches=1, least_prefix=4, **options) as llm:
            found = llm.plan_job(job_of(requests, llm.row_maker))
            return found.footprint.parts[HOST], found.blocks.first.block.prefix_room * llm.spec.width * llm.spec.itemsize

    guessing, plain, moving = planned(), planned(draft="off"), planned(percent=(0, 100, 0, 0, 0, 100))
    (scored, states), shared = planned(logprobs=1), "shared prefixes"
    assert scored[shared] - states == guessing[0][shared] == plain[0][shared] > 0 and states > 0
    assert guessing[0]["working space"] > plain[0]["working space"]
    assert moving == planned(draft="off", percent=(0, 100, 0, 0, 0, 100)), "nothing is guessed"


def test_a_row_guesses_more_when_it_is_right_and_rests_when_it_is_wrong() -> None:
    row, text = _OfRow(), [1, 2, 3] * 30
    lengths = []
    for accepted in (4, 8, 16, 16, 5, 4):
        row.guess(text, 100)
        lengths.append(len(row.tokens))
        row.judge(accepted)
    assert lengths == [4, 8, 16, 16, 16, 8]
    rests = []
    for _ in range(7):
        row.guess(text, 100)
        while not row.tokens:
            row.guess(text, 100)
            rests[-1] += 1
        row.judge(0)
        rests.append(0)
    assert rests[:-1] == [1, 3, 7, 15, 31, 32]
    row.rest = 0
    row.guess(text, 100)
    row.judge(0, is_free=True)
    assert row.rest == 0
    row.guess(text, 0)
    assert not row.tokens, "where there is no room"


def test_a_row_whose_guesses_are_dear_begins_where_much_speaks_for_them() -> None:
    row, text = _OfRow(needs=4), [1, 2, 3, 4, 9, 3, 4]
    row.guess(text, 100)
    assert not row.tokens, "two tokens came before"
    text += [1, 2, 3, 4]
    row.guess(text, 100)
    assert row.tokens == [9, 3, 4, 1]
    row.judge(1)
    text += [9, 7, 3, 4]
    row.guess(text, 100)
    assert row.tokens == [9, 7, 3, 4], "the last guess was right, so two tokens are enough"
    row.judge(0)
    row.rest = 0
    text += [8, 3, 4]
    row.guess(text, 100)
    assert not row.tokens


def test_passes_carry_guesses_where_these_bring_more_than_they_take() -> None:
    worth = Worth()
    assert not worth.is_there, "nothing is known of passes"
    for _ in range(PLAIN_FIRST):
        worth.note(1.0, 0, 0, rows=1)
    assert worth.is_there
    for _ in range(2):
        assert not worth.is_free
        worth.note(1.01, 8, 0, rows=1)
    assert worth.is_there and worth.is_free
    worth.note(4.0, 8, 3, rows=1)
    assert worth.is_there and not worth.is_free, "3 s more brought 3 tokens"
    worth.note(4.0, 8, 3, rows=2)
    assert not worth.is_there, "a token of two rows is worth half a pass: 1.5 s were lost"
    seconds = 0
    while not worth.is_there:
        worth.note(1.0, 0, 0, rows=2)
        seconds += 1
    assert seconds == pytest.approx((1.52 - GRANTED) / ALLOWED - 12, abs=2), "until they are few beside all"
    worth.note(2.0, 8, 3, rows=1)
    assert worth.debt == 0.0, "what was brought is not saved for later"


def test_wrong_guesses_cost_few_seconds_however_dear_they_are() -> None:
    worth, seconds = Worth(), 0.0
    for _ in range(2000):
        tried = 8 * worth.is_there
        worth.note(4.0 if tried else 1.0, tried, 0, rows=1)
        seconds += 4.0 if tried else 1.0
    assert 2000 < seconds < 1.02 * 2000


@pytest.mark.parametrize(
    ("options", "said_why"),
    [({"draft": "trees"}, "draft"), ({"draft": "ngram", "kv_recall": 0.5}, "kv_recall")],
)
def test_what_cannot_be_guessed_is_refused_in_one_line(options: dict[str, Any], said_why: str) -> None:
    with pytest.raises(ValueError, match=said_why) as refused:
        Plan.create(**options)
    assert "\n" not in str(refused.value)


# -- states --------------------------------------------------------------------------------------------------------------------


OF_STATES = Case("qwen3-5", ON_DISK, LENGTHS[:4], gpu_batch_size=4, num_gpu_batches=1, policy=(("state", (0, 0)),))


def forgets_what_stays() -> Any:
    """Tokens that were right are not replayed."""
    return patch.object(Replays, "of", lambda counts, device: None)


def replays_what_was_wrong() -> Any:
    """All tokens of a pass are replayed, whatever was said."""
    usual = Replays.of
    return patch.object(Replays, "of", lambda counts, device: usual([TRIED_AT_ONCE if own else 0 for own in counts], device))


def replays_other_rows() -> Any:
    usual = Replays.of
    return patch.object(Replays, "of", lambda counts, device: usual([*counts[1:], counts[0]], device))


def leaves_a_trace() -> Any:
    """Tokens on trial change the states."""
    usual = StatesOfSteps.passed

    def passed(self: StatesOfSteps, name: str, brought: Sequence[Tensor], passing: Passing) -> Tensor:
        return usual(self, name, brought, lambda *given: passing(*given[:3], False))

    return patch.object(StatesOfSteps, "passed", passed)


def notes_stay_where_rows_were() -> Any:
    """The rows move up, and what they have noted does not."""
    usual = StateStore.open

    def stayed(self: StateStore, task: Any, rows: BatchRows) -> Any:
        place = task.layer, task.batch
        moves = self._units[place].generation != rows.generation
        region, own = self._working_region(task), replace(self._layouts[place], rows=rows.size)
        before = {name: one.clone() for name, one in states_over(region, own).items()} if moves else {}
        made = usual(self, task, rows)
        for name, notes in made.notes.items() if moves else ():
            for number, one in enumerate(notes):
                one.copy_(before[f"{name} {number}"])
        return made

    return patch.object(StateStore, "open", stayed)


@pytest.mark.parametrize(
    "fault",
    [
        nullcontext,
        forgets_what_stays,
        replays_what_was_wrong,
        replays_other_rows,
        leaves_a_trace,
        notes_stay_where_rows_were,
    ],
)
def test_states_go_on_behind_what_stays_alone(fault: Callable[[], Any], checkpoints: Checkpoints, offload: Path) -> None:
    case = OF_STATES
    requests = [Request(prompt, SamplingParams(most, temperature=1.0)) for prompt, most in zip(case.prompts, (20, 9, 17, 22))]
    with case.open(checkpoints, offload) as llm:
        wanted = [*llm.generate_stream(requests, seed=2)]
    with case.open(checkpoints, offload, draft="ngram") as llm, always(), guessing(texts_of(wanted), seed=5), fault():
        found = [*llm.generate_stream(requests, seed=2)]
        assert llm.stats is not None
        assert (said(found) == said(wanted)) is (fault is nullcontext)
        assert llm.stats.drafted.proposed > 20


@pytest.mark.skipif(not IS_POSSIBLE, reason="a pretended device with clocks is not possible here")
def test_what_is_noted_of_trials_races_with_nothing(checkpoints: Checkpoints, offload: Path) -> None:
    case = replace(OF_STATES, device=CLOCKED)
    requests = [Request(prompt, SamplingParams(most)) for prompt, most in zip(case.prompts, (9, 5, 7, 8))]
    with sound(), case.open(checkpoints, offload) as llm:
        wanted = [*llm.generate_stream(requests)]
    with sound(), case.open(checkpoints, offload, draft="ngram") as llm, always(), guessing(texts_of(wanted), seed=5):
        assert said([*llm.generate_stream(requests)]) == said(wanted)
        assert llm.stats is not None and llm.stats.drafted.accepted > 5


def test_texts_that_live_on_with_states_are_not_guessed(checkpoints: Checkpoints, offload: Path) -> None:
    """Nothing of them is on trial when a turn is over."""
    case = replace(OF_STATES, gpu_batch_size=1, policy=())
    said_by = []
    for draft in ("off", "ngram"):
        with case.open(checkpoints, offload, draft=draft) as llm, always(), llm.converse(60, seed=1) as talk:
            params = SamplingParams(9, ignore_eos=True)
            said_by.append([talk.reply(case.prompts[turn], params).completion.token_ids for turn in range(2)])
            assert not talk.planned_reply.guesses_any
            reasons = [*unguessed_reason(talk.planned_reply)]
            assert ["a talk keeps the states" in own for own in reasons] == [True] * (draft == "ngram")
    assert said_by[0] == said_by[1]


def test_what_is_noted_of_trials_is_planned_where_states_are(checkpoints: Checkpoints, offload: Path) -> None:
    """It lies and moves with them; prefixes have none of it."""
    found = []
    for draft in ("off", "ngram"):
        with OF_STATES.open(checkpoints, offload, draft=draft) as llm:
            planned = llm.planned(Workload(OF_STATES.lengths, 4))
            found.append(
                (planned.footprint.parts["disk"]["states"], next(iter(planned.blocks.first.states.values())).row_bytes)
            )
            assert len(states_of_one(llm.spec)[0].tensors) == 2
    (plain, row), (noted, wider) = found
    assert noted > plain and wider > row


def test_nothing_is_guessed_where_keys_and_values_move(folder: Path) -> None:
    with demo(folder, percent=(0, 0, 0, 0, 0, 0)) as llm, always():
        llm.generate(["the day, the day, the day, the day,"], SamplingParams(10))
        assert llm.stats is not None and llm.stats.drafted == Drafted()
