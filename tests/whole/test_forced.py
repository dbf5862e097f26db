"""Forced tokens: they take the way of any generated token, whatever the plan, and nothing else of a row is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.schedule.ops import Op
from tests.engine.test_shrink import case_of, fail_at, same
from tests.helpers import tiny
from tests.helpers.contract import POLICIES, UNLIKE, Case, Checkpoints, Logits, generate_with
from tests.helpers.pairwise import ELSEWHERE, on_devices
from tests.helpers.resident import resident_generate
from tests.helpers.samples import every_nth, first_of

ON_DEVICE, ON_HOST, ON_DISK, MIXED = (100, 0) * 3, (0, 100) * 3, (0, 0) * 3, (30, 30, 20, 50, 40, 30)
ARCHITECTURES = ("opt", "llama-gqa", "neox-parallel")


def told_logits(llm: LLM, case: Case, forced: Sequence[Sequence[int]], params: Any = None) -> tuple[list[Any], Logits]:
    """As `generate_with`, but as a listener hears them."""
    logits: Logits = {}

    def listen(row: int, number: int, values: Tensor) -> None:
        assert (number, row) not in logits and values.dtype == torch.float32
        logits[number, row] = values.clone()

    params = params or SamplingParams(max_tokens=case.gen_len)
    return llm.generate(case.prompts, params, forced=forced, on_logits=listen), logits


def arbitrary(case: Case, seed: int = 3) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(tiny.VOCAB) for _ in range(case.gen_len)] for _ in case.prompts]


def assert_equal(these: Logits, those: Logits) -> None:
    assert these.keys() == those.keys()
    for key, values in these.items():
        assert torch.equal(values, those[key].float().cpu()), key


PLANS = {  # the head forces tokens, which knows nothing of policies: two of them stand for all
    "kind": ARCHITECTURES,
    "percent": (ON_DEVICE, ON_HOST, ON_DISK, MIXED),
    ("policy", "kv_codec"): ((POLICIES[0], "plain"), (POLICIES[1], "group4")),
}


@pytest.mark.parametrize("values", on_devices(PLANS, share=ELSEWHERE))
def test_greedy_tokens_that_are_forced_change_nothing(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, pretended: None
) -> None:
    case = Case(gen_len=5, **values)
    with case.open(checkpoints, offload) as llm:
        free, logits = generate_with(llm, case)
        for count in (case.gen_len, 2, 0):
            forced, told = told_logits(llm, case, [completion.token_ids[:count] for completion in free])
            assert forced == free
            assert_equal(told, logits)


CASES = [
    Case(ARCHITECTURES[number % 3], (ON_DEVICE, ON_HOST, ON_DISK, MIXED)[number % 4], policy=policy, kv_codec=format, gen_len=5)
    for number, (policy, format) in enumerate(zip(UNLIKE, cycle(("plain", "group4"))))
]


@pytest.mark.parametrize("case", every_nth(CASES, 2), ids=str)
def test_any_tokens_that_are_forced_are_seen_as_the_resident_loop_sees_them(
    case: Case, checkpoints: Checkpoints, offload: Path
) -> None:
    forced = arbitrary(case)
    with case.open(checkpoints, offload) as llm:
        completions, told = told_logits(llm, case, forced)
    assert [list(completion.token_ids) for completion in completions] == forced
    model, weights = checkpoints.model(case.kind, case.stored, case.dtype)
    for rows in case.batches():
        expected = resident_generate(
            model,
            weights,
            [case.prompts[row] for row in rows],
            case.gen_len,
            policy=case.kv_policy,
            kv_codec=case.kv_codec,
            forced=[forced[row] for row in rows],
        )
        for step, logits in enumerate(expected):
            for place, row in enumerate(rows):
                assert torch.equal(told[step, row], logits[place]), (step, row)


def test_behind_forced_tokens_a_row_goes_on_as_behind_a_prompt_that_ends_with_them(
    checkpoints: Checkpoints, offload: Path
) -> None:
    case, forced = Case("llama-gqa", MIXED, gen_len=6), [[5, 6, 7], [], [8], [9, 10], [1, 2, 3, 4, 5, 6]]
    with case.open(checkpoints, offload) as llm:
        behind = llm.generate(case.prompts, SamplingParams(max_tokens=6), forced=forced)
        for prompt, given, completion in zip(case.prompts, forced, behind):
            assert completion.prompt_token_ids == tuple(prompt) and completion.token_ids[: len(given)] == tuple(given)
            if len(given) < 6:
                (alone,) = llm.generate([[*prompt, *given]], SamplingParams(max_tokens=6 - len(given)))
                assert completion.token_ids[len(given) :] == alone.token_ids


def test_log_probabilities_are_those_of_the_forced_token(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case("opt", ON_DISK, gen_len=4, policy=POLICIES[1])
    forced = arbitrary(case)
    with case.open(checkpoints, offload) as llm:
        completions, told = told_logits(llm, case, forced, SamplingParams(max_tokens=4, logprobs=2, temperature=0.9))
    for completion, tokens in zip(completions, forced):
        assert completion.logprobs is not None and len(completion.logprobs) == 4
        for number, (step, token) in enumerate(zip(completion.logprobs, tokens)):
            wanted = told[number, completion.index].log_softmax(-1)
            assert step.chosen.token_id == token and step.chosen.logprob == pytest.approx(wanted[token].item(), abs=1e-5)
            assert step.top[0].token_id == int(wanted.argmax()) and len(step.top) == 2


def test_nothing_among_forced_tokens_ends_a_row_and_behind_them_all_does(checkpoints: Checkpoints, offload: Path) -> None:
    case = Case(gen_len=6)
    with case.open(checkpoints, offload) as llm:
        (free,) = llm.generate(case.prompts[:1], SamplingParams(max_tokens=6))
        ends = SamplingParams(max_tokens=6, stop_token_ids=free.token_ids)
        (stopped,) = llm.generate(case.prompts[:1], ends, forced=[free.token_ids[:3]])
        assert stopped.token_ids == free.token_ids[:4] and stopped.finish_reason == "stop"
        (whole,) = llm.generate(case.prompts[:1], ends, forced=[free.token_ids])
        assert whole.token_ids == free.token_ids and whole.finish_reason == "length" and whole.text == free.text
        (by_text,) = llm.generate(case.prompts[:1], replace(ends, stop=[free.text[0]]), forced=[free.token_ids])
        assert by_text.token_ids == free.token_ids and by_text.finish_reason == "length"


@pytest.mark.parametrize("policy", first_of([POLICIES[1], POLICIES[0], POLICIES[3]], 1), ids=lambda one: str(dict(one)))
def test_forced_tokens_come_again_with_their_log_probabilities_when_memory_ran_out(
    policy: tuple[tuple[str, Any], ...], checkpoints: Checkpoints, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(policy=policy)
    forced = [tokens[: row % (case.gen_len + 1)] for row, tokens in enumerate(arbitrary(case))]
    params = SamplingParams(max_tokens=case.gen_len, logprobs=1)
    with case.open(checkpoints, offload) as llm:
        wanted, _ = told_logits(llm, case, forced, params)
    fail_at(monkeypatch, Op.COMPUTE, step=3, most_rows=4)
    with case.open(checkpoints, offload) as llm, pytest.warns(RuntimeWarning, match="memory ran out"):
        found, logits = told_logits(llm, case, forced, params)
    assert same(found, wanted) and len(logits) == len(case.prompts) * case.gen_len


@pytest.mark.parametrize(
    ("forced", "message"),
    [
        ([[1]], "2 prompts came with forced tokens for 1"),
        ([[1], [1, 2, 3]], "row 1 has 3 forced tokens, but max_tokens is 2"),
        ([[1], [tiny.VOCAB]], f"row 1 is forced to take the token id {tiny.VOCAB}; .* knows 0 to {tiny.VOCAB - 1}"),
        ([[-1], []], "row 0 is forced to take the token id -1"),
    ],
)
def test_tokens_that_cannot_be_forced_are_refused(
    forced: list[list[int]], message: str, checkpoints: Checkpoints, offload: Path
) -> None:
    with Case().open(checkpoints, offload) as llm, pytest.raises(ValueError, match=message):
        llm.generate([[5], [6]], SamplingParams(max_tokens=2), forced=forced)
