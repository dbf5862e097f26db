"""Texts of the model of the package that are held to something: what ends is what was asked for, whatever is beside it in the
batch, and its tokens are the likeliest of those that may come, or drawn from these.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen import LLM, SamplingParams, StructuredOutputsParams
from h2o_flexgen.checkpoints.model_places import SMOLLM2
from h2o_flexgen.engine.executor import TaskFailed
from h2o_flexgen.engine.generate import ListedJob
from h2o_flexgen.engine.job import BrokenRequest, Request
from h2o_flexgen.engine.masks import THREAD
from h2o_flexgen.engine.restarted_run import RestartedRun
from h2o_flexgen.engine.row_maker import RowMaker
from h2o_flexgen.kernels.pick_tokens import mask_words
from h2o_flexgen.sampling.completion import Completion, Output
from h2o_flexgen.schedule.ops import Op
from h2o_flexgen.text import grammar
from tests.engine.test_shrink import fail_at
from tests.helpers.held_by_hand import FIRST, HELD, allowed_by_hand, pattern_of
from tests.helpers.random_schemas import random_schema, validated
from tests.helpers.refusals import one_line
from tests.whole.test_sampling_options import SEED, Case, Checkpoints, adjusted_by_hand, picked_by_hand, uniform

pytest.importorskip("llguidance", reason="needs the extra [grammar]")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PHONE, COLOURS = "[0-9]{3}-[0-9]{4}", ("red", "green", "blue")
PROMPTS = ["It was", "My dear", "Alice", "The two brothers", "Call me"]
MIXED = (0, 60, 0, 100, 0, 100)


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == THREAD or thread.name.startswith("lane")]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("offload")
    with LLM("demo", dtype="float32", gpu_batch_size=4, num_gpu_batches=2, percent=MIXED, offload_dir=folder) as opened:
        yield opened


def held(max_tokens: int = 60, **given: Any) -> SamplingParams:
    of_sampling = {name: given.pop(name) for name in [*given] if name in SamplingParams.__dataclass_fields__}
    return SamplingParams(max_tokens, structured_outputs=given, **of_sampling)


def of_five() -> list[SamplingParams]:
    """Of each prompt: all kinds, greedy and drawn, and one that is held to nothing."""
    return [
        held(json=PERSON),
        held(json=PERSON, temperature=1.2, n=3, disable_any_whitespace=True),
        SamplingParams(12, temperature=0.7),
        held(choice=COLOURS, logprobs=2),
        held(regex=PHONE, temperature=2.0, top_p=0.9, repetition_penalty=1.3, seed=4, n=2),
    ]


def hold(completions: Sequence[Completion]) -> None:
    """Every text is what was asked of it by `of_five`."""
    persons = [*completions[0].outputs, *completions[1].outputs]
    assert all(validated(PERSON, one.text) for one in persons)
    assert all(re.search(r"[:,] ", one.text) is None for one in completions[1].outputs)
    assert completions[3].text in COLOURS and all(re.fullmatch(PHONE, one.text) for one in completions[4].outputs)
    assert [one.finish_reason for one in persons] == ["stop"] * 4
    assert completions[2].finish_reason == "length" and len(completions[2].token_ids) == 12


def bare(completions: Sequence[Completion]) -> list[tuple[object, ...]]:
    """Without log-probabilities, whose last bits depend on how many rows are computed at once."""
    return [(one.text, one.token_ids, one.finish_reason) for each in completions for one in each.outputs]


def test_texts_of_all_kinds_are_made_beside_each_other_and_come_again(llm: LLM) -> None:
    first = llm.generate(PROMPTS, of_five(), seed=5)
    hold(first)
    assert len({one.text for one in first[1].outputs}) > 1, "each is drawn by itself"
    assert bare(llm.generate(PROMPTS, of_five(), seed=5)) == bare(first)
    assert bare(llm.generate(PROMPTS, of_five(), seed=6)) != bare(first)
    assert llm.get_tokenizer().decode(first[3].token_ids) == first[3].text, "no token stands for the end of a text that is over"


def test_rows_that_come_and_go_say_what_they_say_alone(llm: LLM) -> None:
    wanted = llm.generate(PROMPTS * 2, of_five() * 2, seed=5)
    requests = [Request(prompt, params) for prompt, params in zip(PROMPTS * 2, of_five() * 2)]
    found = sorted(llm.generate_stream(requests, seed=5), key=lambda one: one.index)
    assert bare(found) == bare(wanted)
    heard: dict[int, str] = {}
    llm.generate(PROMPTS, of_five(), seed=5, on_token=lambda row, _, text: heard.update({row: heard.get(row, "") + str(text)}))
    assert [heard[row] for row in range(len(heard))] == [one.text for each in wanted[:5] for one in each.outputs], (
        "as they are streamed"
    )


def test_tokens_are_picked_from_those_that_may_come_and_log_probabilities_are_the_models_own(
    checkpoints: Checkpoints, offload: Path
) -> None:
    """Beside penalties, biases, filters and seeds: the reference does all of it to the logits, and forbids by hand."""
    case = Case("llama-gqa", gen_len=8, held=HELD)
    options: Sequence[dict[str, Any]] = (
        {"temperature": 1.5, "frequency_penalty": 0.5},
        {"temperature": 1.1, "top_k": 5, "logit_bias": {69: 2.0, 5: 50.0}},
        {"repetition_penalty": 1.3, "presence_penalty": 1.0},
        {"temperature": 0.9, "top_p": 0.8, "min_p": 0.01, "allowed_token_ids": [*range(52, 62), *range(101, 106)]},
        {"temperature": 3.0},
    )
    params = [replace(one, logprobs=1, **own) for one, own in zip(case.params, options)]
    logits: dict[tuple[int, int], Tensor] = {}
    with case.open(checkpoints, offload) as llm:
        found = llm.generate(
            case.prompts, params, seed=SEED, on_logits=lambda row, step, own: logits.update({(row, step): own.clone()})
        )
    for row, (one, own) in enumerate(zip(found, params)):
        assert one.logprobs is not None and len(one.token_ids) == 8
        for step, token in enumerate(one.token_ids):
            before = list(one.token_ids[:step])
            scores = adjusted_by_hand(logits[row, step].tolist(), own, case.prompts[row], before, ())
            may_come = allowed_by_hand(pattern_of(HELD, row), "".join(chr(each - FIRST) for each in before), len(scores))
            scores = [score if is_allowed else -torch.inf for score, is_allowed in zip(scores, may_come)]
            assert token == picked_by_hand(scores, own, uniform(SEED, row, step)), (row, step)
            unmasked = logits[row, step].log_softmax(-1)
            assert one.logprobs[step].chosen.logprob == pytest.approx(float(unmasked[token]), abs=1e-5)
            assert one.logprobs[step].top[0].token_id == int(unmasked.argmax())


def test_a_row_without_draws_has_a_mask_only_where_its_likeliest_token_may_not_come(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU masks take from layers what they cost."""
    write, made = grammar.HeldText.write_mask, list[int]()
    monkeypatch.setattr(grammar.HeldText, "write_mask", lambda held, words: (made.append(id(held)), write(held, words))[1])
    anything, no_blank = held(12, regex="(.|\n)*"), held(12, regex="[^ ]*")
    free, likeliest = llm.generate(PROMPTS[:2], [SamplingParams(12), anything])
    assert made == [] and (free, likeliest) == tuple(llm.generate(PROMPTS[:2], SamplingParams(12)))
    (drawn,) = llm.generate(PROMPTS[:1], replace(anything, temperature=1.0))
    assert len(made) == len(drawn.token_ids) == 12
    (refused,) = llm.generate(PROMPTS[:1], no_blank)
    assert 12 < len(made) <= 24 and " " in free.text and " " not in refused.text


# -- where a text ends ---------------------------------------------------------------------------------------------------------


def only(llm: LLM, params: SamplingParams, prompt: str = "It was") -> Output:
    return llm.generate([prompt], params)[0].outputs[0]


def test_a_text_that_reaches_its_most_tokens_in_the_middle_says_so(llm: LLM) -> None:
    whole = only(llm, held(json=PERSON))
    assert whole.finish_reason == "stop" and whole.stop_reason is None
    places = range(1, len(whole.token_ids), 5)
    cuts = llm.generate(["It was"] * len(places), [held(most, json=PERSON) for most in places])
    assert [(one.finish_reason, len(one.token_ids)) for one in cuts] == [("length", most) for most in places]
    assert only(llm, held(len(whole.token_ids), json=PERSON)) == whole


def test_a_text_ends_at_a_stop_only_where_it_is_whole(llm: LLM) -> None:
    """What would break a text is text; what stands behind a whole one ends it."""
    tokens = llm.tokenizer.encode_more('"')
    whole = only(llm, held(json=PERSON))
    for stops in ({"stop": ['"', "age", "}"]}, {"stop_token_ids": tokens}, {"stop": ["a"], "include_stop_str_in_output": True}):
        one = only(llm, held(json=PERSON, **stops))
        assert (one.text, one.finish_reason, one.stop_reason) == (whole.text, "stop", None)
    kept = only(llm, held(json=PERSON, stop=["}"], include_stop_str_in_output=True))
    assert (kept.text, kept.finish_reason, kept.stop_reason) == (whole.text, "stop", "}")
    lines = held(30, regex="([a-z]{2,4}\n)+", stop=["\n"], ignore_eos=True)
    before_one = only(llm, lines)
    assert before_one.finish_reason == "length" and before_one.text.count("\n") > 2
    with_one = only(llm, replace(lines, include_stop_str_in_output=True))
    assert with_one.stop_reason == "\n" and re.fullmatch("[a-z]{2,4}\n", with_one.text)


def test_the_end_of_a_text_may_be_picked_where_more_could_come(llm: LLM) -> None:
    end = min(llm.tokenizer.eos_ids)
    wants_to_end = {"logit_bias": {end: 100.0}}
    one = only(llm, held(20, regex="[a-z]{3}( [a-z]{3})*", **wants_to_end))
    assert re.fullmatch("[a-z]{3}", one.text) and one.token_ids[-1] == end and one.finish_reason == "stop"
    longer = only(llm, held(20, regex="[a-z]{3}( [a-z]{3})*", min_tokens=9, **wants_to_end))
    assert re.fullmatch("[a-z]{3}( [a-z]{3})+", longer.text) and len(longer.token_ids) > 9
    endless = only(llm, held(20, regex="[a-z]{3}( [a-z]{3})*", ignore_eos=True, **wants_to_end))
    assert endless.finish_reason == "length" and len(endless.token_ids) == 20
    over = only(llm, held(20, choice=["red"], min_tokens=15))
    assert over.text == "red" and over.finish_reason == "stop", "a text that is over ends, however many tokens it has"
    comma = llm.tokenizer.encode_more(",")[-1:]
    stopped = only(llm, held(20, regex="[a-z]{3}( [a-z]{3})*", stop_token_ids=comma, logit_bias={comma[0]: 100.0}))
    assert stopped.stop_reason == comma[0] and re.fullmatch("[a-z]{3}", stopped.text)


def test_given_tokens_are_held_to_it_as_well(llm: LLM) -> None:
    tokens = llm.tokenizer.encode_more('{"name":"Bob')
    (one,) = llm.generate(["It was"], held(json=PERSON), forced=[tokens])
    assert one.text.startswith('{"name":"Bob') and validated(PERSON, one.text)
    wrong = llm.tokenizer.encode_more("Bob")
    said = one_line(lambda: llm.generate(["It was"], held(json=PERSON), forced=[wrong]))
    assert said.startswith("row 0 is forced to take tokens that structured_outputs forbids")


# -- what may happen -----------------------------------------------------------------------------------------------------------


def test_rows_that_start_again_go_on_where_they_were(tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = llm.generate(PROMPTS, of_five(), seed=5)
    fail_at(monkeypatch, Op.COMPUTE, step=3, most_rows=4)
    heard: dict[int, list[int]] = {}
    with (
        LLM("demo", dtype="float32", gpu_batch_size=4, num_gpu_batches=2) as other,
        pytest.warns(RuntimeWarning, match="memory"),
    ):
        found = other.generate(
            PROMPTS, of_five(), seed=5, on_token=lambda row, token, _: heard.setdefault(row, []).append(token)
        )
    assert bare(found) == bare(wanted)
    assert [tuple(heard[row]) for row in range(len(heard))] == [one.token_ids for each in wanted for one in each.outputs]


def broken_after(monkeypatch: pytest.MonkeyPatch, tokens: int, action: str) -> None:
    """Every text that is held to a regular expression breaks behind so many tokens."""
    take, act, taken = grammar.HeldText.take, getattr(grammar.HeldText, action), dict[int, int]()

    def count(self: grammar.HeldText, token: int) -> None:
        taken[id(self)] = taken.get(id(self), 0) + 1
        if action == "take" and taken[id(self)] > tokens:
            raise grammar.ConstraintBroken("planted")
        take(self, token)

    def fail(self: grammar.HeldText, *given: Any) -> None:
        if taken.get(id(self), 0) >= tokens:
            raise grammar.ConstraintBroken("planted")
        act(self, *given)

    if action != "take":
        monkeypatch.setattr(grammar.HeldText, action, fail)
    monkeypatch.setattr(grammar.HeldText, "take", count)


@pytest.mark.parametrize("action", ["take", "write_mask"])
def test_a_row_that_cannot_go_on_is_an_error_of_its_own(action: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(6), held(30, regex="[a-z]{20}"), SamplingParams(6), SamplingParams(6)]
    wanted = llm.generate(PROMPTS[:4], SamplingParams(6))
    llm.tokenizer.grammars.check(StructuredOutputsParams(regex="[a-z]{20}"))  # compiled before
    broken_after(monkeypatch, 2, action)
    maker = RowMaker(llm.spec, llm.plan, llm.tokenizer)
    job = ListedJob.of([Request(prompt, own) for prompt, own in zip(PROMPTS, params)], maker)
    outcomes = {one.index: one for one in RestartedRun(llm.generate_stream, job).outcomes()}
    assert outcomes.pop(1) == BrokenRequest(1, "prompt 1 cannot go on: planted")
    assert [outcomes[row].text for row in (0, 2, 3)] == [wanted[row].text for row in (0, 2, 3)]  # type: ignore[union-attr]
    with pytest.raises(TaskFailed, match="prompt 1 cannot go on: planted"):
        llm.generate(PROMPTS[:4], params)


def test_a_conversation_is_held_to_it_turn_by_turn(llm: LLM) -> None:
    with llm.converse() as talk:
        for asked, holds in ((held(json=PERSON), None), (held(choice=COLOURS), COLOURS), (SamplingParams(5), None)):
            reply = talk.reply(" and then", asked).completion
            assert holds is None or reply.text in holds
        assert reply.finish_reason == "length"


def test_what_cannot_be_held_to_is_refused_before_anything_is_computed(llm: LLM) -> None:
    for call in (
        lambda: llm.generate(PROMPTS, held(regex="(a")),
        lambda: llm.read(PROMPTS, held(regex="(a")),
        lambda: [*llm.generate_stream([Request("It", held(regex="(a"))])],
        lambda: llm.chat([{"role": "user", "content": "x"}], held(regex="(a")),
    ):
        assert "the regular expression '(a' is refused (unclosed group)" in one_line(call)  # type: ignore[arg-type]


# -- random schemas ------------------------------------------------------------------------------------------------------------


def hold_random_schemas(llm: LLM, seeds: Sequence[int], max_tokens: int, least: float) -> None:
    """Of each schema a text, greedy or drawn. At least such a share of them ends, and nearly all that cannot be long."""
    are_bounded = [seed % 2 == 0 for seed in seeds]
    schemas = [random_schema(Random(seed), is_bounded) for seed, is_bounded in zip(seeds, are_bounded)]
    params = [held(max_tokens, json=own, temperature=seed % 3 / 2) for seed, own in zip(seeds, schemas)]
    requests = [Request(PROMPTS[seed % 5], own) for seed, own in zip(seeds, params)]
    ended = []
    for one in llm.generate_stream(requests, seed=1):
        if one.finish_reason == "stop":
            validated(schemas[one.index], one.text)
            ended.append(are_bounded[one.index])
    assert len(ended) >= least * len(seeds), len(ended)
    assert sum(ended) >= 0.9 * sum(are_bounded), sum(ended)


def test_what_ends_of_random_schemas_validates(llm: LLM) -> None:
    hold_random_schemas(llm, range(36), max_tokens=70, least=0.6)


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("model", ["demo", pytest.param("smollm2", marks=pytest.mark.smollm2)])
def test_what_ends_of_a_thousand_random_schemas_validates(model: str) -> None:
    """A small model writes numbers, and names that a schema leaves open, until it has no token left."""
    with LLM(model, dtype="float32", gpu_batch_size=64, num_gpu_batches=1) as opened:
        hold_random_schemas(opened, range(1000), max_tokens=120, least=0.7)


@pytest.mark.smollm2
def test_a_real_model_answers_in_a_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"enum": ["France", "Spain", "Italy"]}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    assert SMOLLM2.path.is_file()
    with LLM("smollm2", dtype="float32") as opened:
        messages = [{"role": "user", "content": "What is the capital of France? Answer in JSON."}]
        (answer,) = opened.chat(messages, held(40, json=schema))
        end = opened.chat(messages, held(6, choice=["Paris", "Madrid"]))[0]
    assert json.loads(answer.text) == {"city": "Paris", "country": "France"} and end.text == "Paris"
    assert mask_words(opened.spec.vocab) * 32 >= opened.spec.vocab
