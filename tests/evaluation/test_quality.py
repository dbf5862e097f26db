"""A guard: what the demo model recalls with heavy hitters and the last tokens, a tenth of the text each, and with one alone."""

from __future__ import annotations

import random

import pytest

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.checkpoints.model_places import DEMO, held_out_prose
from h2o_flexgen.evaluation.tasks.recall import Recall, RecallExample
from h2o_flexgen.text.given_texts import start_tokens

LENGTH, KEPT = 512, 0.2
TASKS, DEPTHS = ("passkey", "lookup", "copy"), (0.0, 0.2, 0.4, 0.6)
FLOOR = 0.9  # of what the full cache recalls: h2o is not below it
BROKEN = 0.5  # and nothing else above this


@pytest.fixture(scope="module")
def examples() -> list[RecallExample]:
    with LLM(DEMO) as llm:
        recall = Recall.of(held_out_prose(), llm.tokenizer.encode_more, start_tokens(llm.tokenizer))
    draw = random.Random(7)
    return [recall.example(task, LENGTH, depth, draw) for task in TASKS for depth in DEPTHS]


def recalled(examples: list[RecallExample], **plan: object) -> float:
    """The share of questions, visible in the prompt, that are answered right in full."""
    params = SamplingParams(max_tokens=max(len(one.answer) for one in examples), ignore_eos=True)
    kept = {"head_budgets": "equal", **plan}
    with LLM(DEMO, dtype="float32", gpu_batch_size=len(examples), prefill_tokens=4096, **kept) as llm:  # type: ignore[arg-type]
        done = llm.generate([one.context + one.question for one in examples], params)
    return sum(text.token_ids[: len(one.answer)] == one.answer for one, text in zip(examples, done)) / len(examples)


def test_h2o_recalls_what_the_full_cache_does_and_neither_half_alone_does(examples: list[RecallExample]) -> None:
    full = recalled(examples)
    assert full >= FLOOR
    shares = {policy: recalled(examples, kv_policy=policy, kv_budget=KEPT) for policy in ("h2o", "heavy", "local", "random")}
    assert shares["h2o"] >= FLOOR * full
    assert max(shares["heavy"], shares["local"], shares["random"]) <= BROKEN * full
