"""Tokens that must come are taken without asking the model, several in one pass: they are those of taking them one by one, and
so is all that comes behind them, under every plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.engine.job import Request
from h2o_flexgen.engine.reports import Tick
from h2o_flexgen.engine.row_state import RowState
from h2o_flexgen.engine.seated_rows import SeatedRows
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.schedule.ops import Op
from tests.engine.test_shrink import fail_at
from tests.helpers.contract import BY_HEAD, POLICIES, Case, Checkpoints
from tests.helpers.held_by_hand import likeliest_held
from tests.helpers.samples import every_nth

pytest.importorskip("llguidance", reason="needs the extra [grammar]")

# in the lowest 108 characters; rows are held to them in turn, one to nothing
HELD = ("", "(ABCDEFG[0-9]{2}XYZ)*", "[A-C]-FIXED-[A-C]{3}-MORE-[0-9]*", "([a-d]{2}==)*")
LENGTHS, GROWTH = (5, 9, 2, 7, 4, 6, 3), (8, 12, 11, 9, 4, 13, 9)
ON_DISK = (0, 0, 100, 0, 100, 0)  # weights alone: they come for each pass
CASES = (
    Case("llama-gqa", ON_DISK, gpu_batch_size=3),
    Case("llama-gqa", ON_DISK, policy=POLICIES[1], kv_codec="group4"),
    Case("opt", ON_DISK, policy=POLICIES[2], gpu_batch_size=4, num_gpu_batches=1),
    Case("qwen3", ON_DISK, policy=POLICIES[6], gpu_batch_size=1, num_gpu_batches=3),
    Case("qwen3", ON_DISK, policy=POLICIES[12], gpu_batch_size=3, buffers=1),
    Case("mistral", ON_DISK, kv_codec="group8", gpu_batch_size=3),
    Case("gemma3-capped", ON_DISK, gpu_batch_size=3, sep_layer=False),
    Case("deepseek-v3", ON_DISK, gpu_batch_size=3),
    Case("qwen3-5", ON_DISK, gpu_batch_size=3),
    Case("bamba", ON_DISK, gpu_batch_size=2, policy=POLICIES[1]),
    Case("gpt-oss", ON_DISK, policy=(*POLICIES[6], ("positions", "rolling")), gpu_batch_size=3),
    Case("llama-mha", ON_DISK, policy=BY_HEAD[0], gpu_batch_size=3),
    Case("llama-mha", ON_DISK, policy=BY_HEAD[3], gpu_batch_size=2, weight_codec="group4"),
    Case("llama-gqa", ON_DISK, policy=(("least_prefix", 4),), gpu_batch_size=3),
    Case("llama-gqa", ON_DISK, policy=(*POLICIES[1], ("least_prefix", 4), ("prefix_policy", "judged")), gpu_batch_size=3),
)


def requests_of(case: Case, held: Sequence[str] = HELD) -> list[Request]:
    beginning = case.prompts[1] if dict(case.policy).get("least_prefix") else []  # that all share
    params = replace(case, held=tuple(held)).params
    each = zip(case.prompts, params, GROWTH)
    return [Request([*beginning, *prompt], own.up_to(most)) for prompt, own, most in each]


def streamed(llm: LLM, requests: Sequence[Request], **options: Any) -> tuple[list[Completion], int]:
    """What is said, and the passes that it took."""
    ticks: list[Tick] = []
    found = sorted(llm.generate_stream(requests, on_tick=ticks.append, **options), key=lambda one: one.index)
    assert ticks[-1].generated_tokens == sum(len(output.token_ids) for one in found for output in one.outputs)
    return found, len(ticks)


def one_by_one() -> Any:
    """A context in which no token is taken ahead."""
    return patch.object(SeatedRows, "_room_ahead", lambda rows: 0)


def said(completions: Sequence[Completion]) -> list[tuple[object, ...]]:
    return [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for each in completions for one in each.outputs]


@pytest.mark.parametrize("case", every_nth([replace(case, lengths=LENGTHS) for case in CASES], 3), ids=str)
def test_tokens_are_those_of_taking_them_one_by_one(case: Case, checkpoints: Checkpoints, offload: Path) -> None:
    with case.open(checkpoints, offload) as llm:
        found, passes = streamed(llm, requests_of(case))
        with one_by_one():
            wanted, more_passes = streamed(llm, requests_of(case))
    assert said(found) == said(wanted)
    assert passes < 0.8 * more_passes, "tokens were taken ahead"


def test_tokens_are_those_of_the_resident_loop(checkpoints: Checkpoints, offload: Path) -> None:
    case = replace(CASES[1], lengths=LENGTHS, held=HELD)
    with case.open(checkpoints, offload) as llm:
        found, _ = streamed(llm, requests_of(case))
    for row, (one, most) in enumerate(zip(found, GROWTH)):
        made = checkpoints.resident_logits(replace(case, gen_len=most), (row,))
        tokens: list[int] = []
        for logits in made:
            tokens += likeliest_held(logits, (row,), HELD, [tokens])
        assert list(one.token_ids) == tokens, row


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("offload")
    with LLM("demo", dtype="float32", gpu_batch_size=4, num_gpu_batches=1, percent=ON_DISK, offload_dir=folder) as llm:
        yield llm


PERSON = {
    "type": "object",
    "properties": {"full name of the person": {"type": "string", "maxLength": 6}, "age in years": {"enum": [1, 22, 333]}},
    "required": ["full name of the person", "age in years"],
    "additionalProperties": False,
}


def held(max_tokens: int = 60, **given: Any) -> SamplingParams:
    of_sampling = {name: given.pop(name) for name in [*given] if name in SamplingParams.__dataclass_fields__}
    return SamplingParams(max_tokens, structured_outputs={"json": PERSON, "disable_any_whitespace": True}, **of_sampling)


def test_drawn_tokens_and_all_that_ends_a_text_are_the_same(demo: LLM) -> None:
    """Where a stop, the end, or the most tokens lie among those that must come; and with penalties, which count them."""
    quote = demo.tokenizer.encode_more('"')[-1]
    params = [
        held(temperature=1.0, n=3),
        held(temperature=1.5, seed=4, repetition_penalty=1.4, presence_penalty=0.5),
        held(7),
        held(stop=["name", "}"]),
        held(stop_token_ids=[quote]),
        held(temperature=0.8, top_p=0.7, stop=["of", "}"], include_stop_str_in_output=True),
        SamplingParams(11, temperature=0.9),
    ]
    requests = [Request("It was", own) for own in params]
    heard: dict[int, list[tuple[int, str | None]]] = {}
    told: dict[int, list[tuple[int, str | None]]] = {}
    found, passes = streamed(demo, requests, seed=3, on_token=lambda row, *rest: heard.setdefault(row, []).append(rest))
    with one_by_one():
        wanted, more = streamed(demo, requests, seed=3, on_token=lambda row, *rest: told.setdefault(row, []).append(rest))
    assert said(found) == said(wanted) and heard == told and passes < 0.8 * more
    assert {one.finish_reason for each in found for one in each.outputs} == {"stop", "length"}


@pytest.mark.parametrize("asked", [{"logprobs": 1}, {"allowed_token_ids": [*range(2, 4096)]}, {"no_repeat_ngram_size": 40}])
def test_rows_of_which_more_is_asked_take_their_tokens_one_by_one(asked: dict[str, Any], demo: LLM) -> None:
    requests = [Request("It was", held(30, **asked))]
    found, passes = streamed(demo, requests)
    with one_by_one():
        assert (said(found), passes) == (said(streamed(demo, requests)[0]), len(found[0].token_ids))
    assert asked.get("logprobs") is None or len(found[0].logprobs or ()) == len(found[0].token_ids)


@pytest.mark.parametrize("percent", [(0, 0, 0, 0, 0, 0), (100, 0, 100, 0, 100, 0)])
def test_tokens_are_taken_one_by_one_where_a_pass_fewer_moves_no_less(
    percent: tuple[float, ...], tmp_path: Path, demo: LLM
) -> None:
    """Keys and values would move more; or there are no weights to move."""
    requests = [Request("It was", held())]
    with LLM("demo", dtype="float32", gpu_batch_size=4, percent=percent, offload_dir=tmp_path) as other:
        found, passes = streamed(other, requests)
    wanted, fewer = streamed(demo, requests)
    assert said(found) == said(wanted) and fewer < 0.8 * passes == 0.8 * len(found[0].token_ids)


def test_rows_that_start_again_go_on_where_they_were(demo: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request(prompt, held(temperature=1.0)) for prompt in ("It was", "My dear", "Alice", "Call me", "So")]
    wanted, _ = streamed(demo, requests, seed=2)
    fail_at(monkeypatch, Op.COMPUTE, step=3, most_rows=2)
    heard: dict[int, list[int]] = {}
    options: dict[str, Any] = {"gpu_batch_size": 4, "percent": ON_DISK, "offload_dir": tmp_path}
    with LLM("demo", dtype="float32", **options) as other, pytest.warns(RuntimeWarning, match="memory"):
        note = lambda row, token, _: heard.setdefault(row, []).append(token)  # noqa: E731
        found = sorted(other.generate_stream(requests, seed=2, on_token=note), key=lambda one: one.index)
    assert said(found) == said(wanted)
    assert [tuple(heard[row]) for row in range(len(heard))] == [one.token_ids for one in wanted]


def test_given_tokens_come_before_those_that_a_grammar_makes_of_the_same_text(demo: LLM) -> None:
    letters = [demo.tokenizer.encode_more(letter)[-1] for letter in "null"]
    assert demo.tokenizer.grammars.tokens.greedy_tokenize("null") != letters
    params = SamplingParams(20, structured_outputs={"regex": "null-FIXED"})
    (one,), (alone,) = demo.generate(["It was"], params, forced=[letters]), demo.generate(["It was"], params)
    assert one.text == alone.text == "null-FIXED" and [*one.token_ids[:4]] == letters != [*alone.token_ids[:4]]
    begun, forced = (RowState(0, [5], params, demo.tokenizer, forced=own) for own in ((), letters))
    for token in letters:
        begun.push(token)
    begun.start_anew()
    for row in (begun, forced):
        for token in letters:
            assert row.given == token and row.only_token in (None, token)
            row.push(token)
        assert row.given is None and row.only_token is not None
